"""The boundary's kernels on a GPU, one rank: values against float64 beside the reference's own, and graph replays."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from specialized_decode.boundary import Boundaries, BoundaryAllReduce, CudaSideStream, reference, tuning
from specialized_decode.boundary.coefficients import Mixes
from specialized_decode.boundary.fused import FusedBoundary, FusedCoefficients
from specialized_decode.boundary.types import Pending, QuantizedInput, UnfinalizedRows
from tests.helpers.poisoned import poisoned
from tests.helpers.step_gates import FixedGroup, Gates
from tests.helpers.step_mhc import LayerWeights, MixerWeights, random_layer, random_mixer, same_bits

ROWS = (*range(1, 17), 47, 48, 49, 383, 384)
MAX_ROWS = 384
SIZES = [(5120, rows) for rows in ROWS]
SIZES += [(hidden, rows) for hidden in (128, 256, 7168) for rows in (1, 8, 9, 49, 384)]
PENDING = ("tensor", "topk 6", "topk 3")
NORM_EPS = 1e-6
DEVICE = torch.device("cuda")

Result = tuple[Tensor, Tensor | None, QuantizedInput | None]


@dataclass
class Inputs:
    """One boundary's inputs; what the float64 model knows of them too."""

    pending: Pending
    residual: Tensor
    post: Tensor
    comb: Tensor
    pre: Tensor
    norm: Tensor


@pytest.fixture(scope="module")
def boundaries() -> Callable[[int], FusedBoundary]:
    made: dict[int, FusedBoundary] = {}

    def make(hidden: int) -> FusedBoundary:
        if hidden not in made:
            made[hidden] = FusedBoundary(hidden, MAX_ROWS, FixedGroup(0, []), DEVICE)
        return made[hidden]

    return make


@pytest.fixture(scope="module")
def coefficients() -> Callable[[int], FusedCoefficients]:
    """One object a width for all tests: its scratch carries over from call to call."""
    made: dict[int, FusedCoefficients] = {}

    def make(hidden: int) -> FusedCoefficients:
        if hidden not in made:
            made[hidden] = FusedCoefficients(hidden, MAX_ROWS, DEVICE)
        return made[hidden]

    return make


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)


def make_inputs(hidden: int, rows: int, kind: str, seed: int = 0) -> Inputs:
    """Rows of sizes from 2^-6 to 2^6; a doubly stochastic mix as Sinkhorn leaves one."""
    size = torch.exp2(draw(seed + 1, rows, 1).mul(2).clamp(-6, 6).round())
    if kind == "tensor":
        pending: Pending = (draw(seed + 2, rows, hidden) * size).bfloat16()
    else:
        topk = int(kind.split()[1])
        weights = draw(seed + 3, rows, topk).softmax(1) * 2.5
        parts = (draw(seed + 4, rows, topk, hidden) * size[:, None]).bfloat16()
        pending = UnfinalizedRows(parts, weights, (draw(seed + 5, rows, hidden) * size).bfloat16())
    residual = (draw(seed + 6, rows, 4, hidden) * size[:, None]).bfloat16()
    comb = draw(seed + 7, rows, 4, 4).exp()
    for _ in range(5):
        comb = comb / comb.sum(2, keepdim=True)
        comb = comb / comb.sum(1, keepdim=True)
    post, pre = 2 * draw(seed + 8, rows, 4).sigmoid(), draw(seed + 9, rows, 4).sigmoid() + 1e-6
    return Inputs(pending, residual, post, comb, pre, (1 + 0.2 * draw(seed + 10, hidden)).bfloat16())


def run(
    fused: FusedBoundary, inputs: Inputs, full: bool = True, quantize: bool = False, settled: bool = False
) -> Result:
    collapse = (inputs.pre, inputs.norm, NORM_EPS) if full else None
    return fused.run(inputs.pending, False, inputs.residual, inputs.post, inputs.comb, collapse, quantize, settled)


def by_reference(inputs: Inputs) -> tuple[Tensor, Tensor]:
    pending = inputs.pending
    contribution = reference.finalize(pending) if isinstance(pending, UnfinalizedRows) else pending
    reduced = reference.all_reduce(contribution[None])
    streams = reference.mix_streams(reduced, inputs.residual, inputs.post, inputs.comb)
    return streams, reference.rms_norm(reference.collapse(streams, inputs.pre), inputs.norm, NORM_EPS)


def exact(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Streams and input in float64, rounded nowhere."""
    pending = inputs.pending
    if isinstance(pending, UnfinalizedRows):
        total = (pending.rows.double() * pending.weights.double()[:, :, None]).sum(1) + pending.shared.double()
    else:
        total = pending.double()
    streams = torch.einsum("tij,tih->tjh", inputs.comb.double(), inputs.residual.double())
    streams = streams + inputs.post.double()[:, :, None] * total[:, None]
    collapsed = torch.einsum("tj,tjh->th", inputs.pre.double(), streams)
    inverse = (collapsed.pow(2).mean(1, keepdim=True) + NORM_EPS).rsqrt()
    return streams, collapsed * inverse * inputs.norm.double()


def assert_as_good(what: str, found: Tensor, expected: Tensor, true: Tensor) -> None:
    """found: bfloat16; its error against `true` is no more than a tenth above that of `expected`, in the mean and at
    worst. Rounding to bfloat16 makes nearly all of both."""
    assert found.dtype == torch.bfloat16 and found.shape == true.shape
    assert found.isfinite().all(), f"{what}: {int((~found.isfinite()).sum())} values are not finite"
    size = true.abs().amax().item()
    ours, theirs = (found.double() - true).abs(), (expected.double() - true).abs()
    square, allowed = ours.pow(2).mean().sqrt().item(), theirs.pow(2).mean().sqrt().item()
    assert square <= 1.1 * allowed + 1e-6 * size, (
        f"{what}: found an RMS error of {square:g}, the reference's {allowed:g}"
    )
    worst, allowed = ours.amax().item(), theirs.amax().item()
    assert worst <= 1.1 * allowed + 2.0**-12 * size, f"{what}: found an error of {worst:g}, the reference's {allowed:g}"


def assert_quantized(found: QuantizedInput, x: Tensor) -> None:
    expected = reference.quantize_mxfp8(x)
    assert same_bits(found.scales, expected.scales), wrong_blocks(found, expected, x)
    assert same_bits(found.values, expected.values), wrong_blocks(found, expected, x)


def wrong_blocks(found: QuantizedInput, expected: QuantizedInput, x: Tensor) -> str:
    """The first block whose scale, or else values, differ."""
    values = (found.values.view(torch.uint8) != expected.values.view(torch.uint8)).unflatten(1, (-1, 32)).any(2)
    different = (found.scales != expected.scales) | values
    row, block = different.nonzero()[0].tolist()
    part = x[row, 32 * block : 32 * block + 32]
    return (
        f"{int(different.sum())} of {different.numel()} blocks differ; row {row}, block {block}, largest "
        f"{part.float().abs().max().item():g}: found scale {int(found.scales[row, block])}, expected "
        f"{int(expected.scales[row, block])}"
    )


@pytest.mark.parametrize("kind", PENDING)
@pytest.mark.parametrize(("hidden", "rows"), SIZES)
def test_values(boundaries: Callable[[int], FusedBoundary], hidden: int, rows: int, kind: str) -> None:
    inputs = make_inputs(hidden, rows, kind, seed=1000 * rows)
    with poisoned():
        alone, no_x, no_quant = run(boundaries(hidden), inputs, full=False)
        streams, x, plain = run(boundaries(hidden), inputs)
        again, quantized_x, quant = run(boundaries(hidden), inputs, quantize=True)
        settled = [run(boundaries(hidden), inputs, full, settled=True)[0] for full in (True, False)]
        settled_x, settled_quant = run(boundaries(hidden), inputs, quantize=True, settled=True)[1:]
    assert no_x is None and no_quant is None and plain is None
    assert settled_x is not None and settled_quant is not None
    assert x is not None and quantized_x is not None and quant is not None
    # The sum of squares may run in another order where the row is laid out for quantizing.
    assert same_bits(alone, streams) and same_bits(again, streams)
    # What is read ahead of the contribution is the same.
    assert all(same_bits(one, streams) for one in settled) and same_bits(settled_x, quantized_x)
    assert all(same_bits(one, two) for one, two in zip(settled_quant, quant, strict=True))
    expected, true = by_reference(inputs), exact(inputs)
    assert_as_good("streams", streams, expected[0], true[0])
    assert_as_good("input", x, expected[1], true[1])
    assert_as_good("quantized input", quantized_x, expected[1], true[1])
    assert_quantized(quant, quantized_x)


@pytest.mark.parametrize("kind", PENDING)
def test_inputs_are_left_alone(boundaries: Callable[[int], FusedBoundary], kind: str) -> None:
    inputs, twin = make_inputs(5120, 5, kind), make_inputs(5120, 5, kind)
    run(boundaries(5120), inputs, quantize=True)
    for ours, theirs in zip(tensors(inputs), tensors(twin), strict=True):
        assert same_bits(ours, theirs)


def tensors(inputs: Inputs) -> list[Tensor]:
    pending = inputs.pending
    parts = [pending.rows, pending.weights, pending.shared] if isinstance(pending, UnfinalizedRows) else [pending]
    return [*parts, inputs.residual, inputs.post, inputs.comb, inputs.pre, inputs.norm]


def own_output(pending: Pending) -> Tensor:
    return pending.shared if isinstance(pending, UnfinalizedRows) else pending


@pytest.mark.parametrize("kind", PENDING)
@pytest.mark.parametrize("place", ["pending", "residual"])
@pytest.mark.parametrize(
    "bits", [0x7FC0, 0x7F81, -1, -64, 0x7F80, -128], ids=["nan", "signalling", "ffff", "-nan", "inf", "-inf"]
)
def test_special_values_stay_in_their_row(
    boundaries: Callable[[int], FusedBoundary], kind: str, place: str, bits: int
) -> None:
    """bits: of bfloat16, as int16."""
    hidden, rows, row, column = 5120, 7, 3, 4711
    clean = make_inputs(hidden, rows, kind)
    streams, x, quant = run(boundaries(hidden), clean, quantize=True)
    dirty = make_inputs(hidden, rows, kind)
    target = own_output(dirty.pending)[row] if place == "pending" else dirty.residual[row, 2]
    target.view(torch.int16)[column] = bits
    expected = by_reference(dirty)
    with poisoned():
        found_streams, found_x, found = run(boundaries(hidden), dirty, quantize=True)
    assert x is not None and quant is not None and found_x is not None and found is not None
    others = [i for i in range(rows) if i != row]
    for ours, theirs in zip((found_streams, found_x, *found), (streams, x, *quant), strict=True):
        assert same_bits(ours[others], theirs[others])
    # Within the row: where the reference is not finite, the kernel is the same non-number.
    for ours, theirs in ((found_streams[row], expected[0][row]), (found_x[row], expected[1][row])):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.isinf(), theirs.isinf())
    column_streams = found_streams[row, :, column]
    assert not column_streams.isfinite().any()
    assert found_x[row].isnan().any()
    # An input that is no number must not become one as MXFP8.
    assert found.values[row].float()[found_x[row].isnan()].isnan().all()


@pytest.mark.parametrize("kind", PENDING)
def test_zeros_and_subnormals(boundaries: Callable[[int], FusedBoundary], kind: str) -> None:
    inputs = make_inputs(5120, 6, kind)
    parts = [own_output(inputs.pending), inputs.residual]
    if isinstance(inputs.pending, UnfinalizedRows):
        parts.append(inputs.pending.rows)
    for part in parts:
        part[1] = -0.0
        part[2] = 0.0
        # The smallest subnormals of bfloat16, of both signs.
        part[3].view(torch.int16).copy_(torch.where(part[3] > 0, 1, 1 - 2**15))
        part[4] = (part[4].float() * 2.0**-130).bfloat16()
    with poisoned():
        streams, x, quant = run(boundaries(5120), inputs, quantize=True)
    assert x is not None and quant is not None
    expected, true = by_reference(inputs), exact(inputs)
    for ours, theirs, value in zip((streams, x), expected, true, strict=True):
        for row in range(6):
            error = (ours[row].double() - value[row]).abs().amax().item()
            allowed = 1.1 * (theirs[row].double() - value[row]).abs().amax().item()
            allowed += 2.0**-12 * value[row].abs().amax().item() + 2.0**-133
            assert error <= allowed, f"row {row}: found an error of {error:g}, expected at most {allowed:g}"
    assert (streams[1:3] == 0).all() and (x[1:3] == 0).all()
    assert_quantized(quant, x)


@pytest.mark.parametrize("exponent", range(-128, 101, 4))
def test_mxfp8_of_every_size(boundaries: Callable[[int], FusedBoundary], exponent: int) -> None:
    """Norm weights carry the input through all sizes; blocks' largest values meet the powers of two times 448."""
    inputs = make_inputs(5120, 16, "tensor", seed=exponent + 200)
    inputs.norm = (inputs.norm.float() * 2.0**exponent).bfloat16()
    _, x, quant = run(boundaries(5120), inputs, quantize=True)
    assert x is not None and quant is not None
    assert_quantized(quant, x)


def test_mxfp8_at_the_largest_value(boundaries: Callable[[int], FusedBoundary]) -> None:
    """Inputs of 1.75 times a power of two: 448 exactly, where the next scale must not be taken."""
    inputs = make_inputs(5120, 4, "tensor")
    hidden = inputs.norm.shape[0]
    inputs.pending = torch.zeros(4, hidden, dtype=torch.bfloat16, device=DEVICE)
    inputs.residual = torch.ones(4, 4, hidden, dtype=torch.bfloat16, device=DEVICE)
    inputs.pre = torch.full((4, 4), 0.25, device=DEVICE)
    inputs.comb = torch.full((4, 4, 4), 0.25, device=DEVICE)
    block = torch.arange(hidden, device=DEVICE) // 32
    inputs.norm = (1.75 * torch.exp2((block % 200 - 110).float())).bfloat16()
    _, x, quant = run(boundaries(5120), inputs, quantize=True)
    assert x is not None and quant is not None
    exact_448 = x == inputs.norm
    assert exact_448.float().mean() > 0.9
    assert_quantized(quant, x)


def gpu_mixer(mixer: MixerWeights) -> MixerWeights:
    return replace(mixer, fn=mixer.fn.cuda(), base=mixer.base.cuda(), scale=mixer.scale.cuda())


def exact_mixes(residual: Tensor, mixer: MixerWeights) -> Mixes:
    flat = residual.flatten(1).double()
    inverse = (flat.pow(2).mean(1, keepdim=True) + mixer.rms_eps).rsqrt()
    logits = flat @ mixer.fn.double().T * inverse
    scale = mixer.scale.double().repeat_interleave(torch.tensor([4, 4, 16], device=DEVICE))
    pre, post, comb = (logits * scale + mixer.base.double()).split([4, 4, 16], 1)
    comb = comb.view(-1, 4, 4).softmax(2) + mixer.hc_eps
    for iteration in range(mixer.sinkhorn_iters):
        if iteration:
            comb = comb / (comb.sum(2, keepdim=True) + mixer.hc_eps)
        comb = comb / (comb.sum(1, keepdim=True) + mixer.hc_eps)
    return pre.sigmoid() + mixer.hc_eps, 2 * post.sigmoid(), comb


def assert_mixes(found: Mixes, residual: Tensor, mixer: MixerWeights) -> None:
    true, expected = exact_mixes(residual, mixer), reference.coefficients(residual, mixer)
    for name, ours, theirs, value in zip(("pre", "post", "comb"), found, expected, true, strict=True):
        assert ours.shape == value.shape and ours.dtype == torch.float32
        assert ours.isfinite().all(), f"{name}: not finite"
        error, other = (ours - value).abs().max().item(), (theirs - value).abs().max().item()
        assert error < 2e-6, f"{name}: found an error of {error:g}, expected below 2e-6"
        assert error <= 1.1 * other + 1e-7, f"{name}: found an error of {error:g}, the reference's is {other:g}"


@pytest.mark.parametrize(("hidden", "rows"), SIZES)
def test_coefficients(coefficients: Callable[[int], FusedCoefficients], hidden: int, rows: int) -> None:
    ops, mixer = coefficients(hidden), gpu_mixer(random_mixer(rows, hidden))
    ops.prepare(mixer)
    size = torch.exp2(draw(rows, rows, 1, 1).mul(4).round())
    residual = (draw(rows + 1, rows, 4, hidden) * size).bfloat16()
    with poisoned():
        once, mean = ops(residual, mixer), ops.mean(residual)
        again = ops(residual, mixer)
    assert_mixes(once, residual, mixer)
    for first, second in zip(once, again, strict=True):
        assert same_bits(first, second)
    assert not ops._arrived.any()
    assert_as_good("mean", mean, reference.stream_mean(residual), residual.double().mean(1))


@pytest.mark.parametrize(("hidden", "rows"), SIZES)
def test_first_coefficients(coefficients: Callable[[int], FusedCoefficients], hidden: int, rows: int) -> None:
    """Streams that are all alike, whose projection is of one of them."""
    ops, mixer = coefficients(hidden), gpu_mixer(random_mixer(500 + rows, hidden))
    ops.prepare_first(mixer)
    x = (draw(rows + 2, rows, hidden) * 0.1).bfloat16()
    residual = reference.broadcast_streams(x, 4)
    with poisoned():
        found = ops.first(x, residual, mixer)
    assert_mixes(found, residual, mixer)
    assert not ops._arrived.any()


def test_coefficients_of_row_counts_in_turn(coefficients: Callable[[int], FusedCoefficients]) -> None:
    """Scratch that one row count leaves disturbs no other; a row's mixes depend on the path alone."""
    ops, mixer = coefficients(5120), gpu_mixer(random_mixer(3, 5120))
    ops.prepare(mixer)
    residual = draw(4, MAX_ROWS, 4, 5120).bfloat16()
    most = tuning.ONE_LAUNCH_ROWS
    order = [1, 384, most, 8, 9, 3, 48, 49, 2, 16, 1, 5, 384, 7, 17] * 2
    found = [(rows, ops(residual[:rows], mixer)) for rows in order]
    assert not ops._arrived.any()
    seen: dict[int, Mixes] = {}
    for rows, mixes in found:
        assert_mixes(mixes, residual[:rows], mixer)
        for ours, theirs in zip(mixes, seen.setdefault(rows, mixes), strict=True):
            assert same_bits(ours, theirs)
    for rows, more in ((1, most), (2, most), (3, most), (5, 8), (7, 8)):
        for ours, theirs in zip(seen[rows], seen[more], strict=True):
            assert same_bits(ours, theirs[:rows])


@pytest.mark.parametrize("rows", [4, 49, 384])
def test_coefficients_finished_beside(coefficients: Callable[[int], FusedCoefficients], rows: int) -> None:
    """In one graph, a stand-in for a sublayer between the reading of the streams and the join: the same bits."""
    ops, mixers = coefficients(5120), [gpu_mixer(random_mixer(seed, 5120)) for seed in range(4)]
    residuals, beside = [draw(seed, rows, 4, 5120).bfloat16() for seed in range(4)], CudaSideStream(DEVICE)
    for mixer in mixers:
        ops.prepare(mixer)
    expected = [ops(residual, mixer) for residual, mixer in zip(residuals, mixers, strict=True)]
    weight = torch.randn(5120, 5120, device=DEVICE).bfloat16()

    def chain() -> list[Mixes]:
        found = []
        for residual, mixer in zip(residuals, mixers, strict=True):
            found.append(ops(residual, mixer, beside))
            torch.mm(residual[:, 0], weight)
            beside.join()
        return found

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain()
    for _ in range(20):
        for tensor in (tensor for mixes in found for tensor in mixes):
            tensor.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        for ours, theirs in zip(found, expected, strict=True):
            assert all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("rows", [1, 7, 9, 65])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_special_values_in_coefficients(
    coefficients: Callable[[int], FusedCoefficients], rows: int, value: float
) -> None:
    ops, mixer = coefficients(5120), gpu_mixer(random_mixer(5, 5120))
    ops.prepare(mixer)
    residual = draw(6, rows, 4, 5120).bfloat16()
    clean, mean = ops(residual, mixer), ops.mean(residual)
    residual[rows // 2, 1, 77] = value
    residual[rows // 2, 2, 78] = value
    dirty, dirty_mean = ops(residual, mixer), ops.mean(residual)
    others = [row for row in range(rows) if row != rows // 2]
    for ours, theirs in zip((*dirty, dirty_mean), (*clean, mean), strict=True):
        assert same_bits(ours[others], theirs[others])
    for part in dirty:
        assert part[rows // 2].isnan().all()
    assert (~dirty_mean[rows // 2].isfinite()).nonzero().flatten().tolist() == [77, 78]


@pytest.mark.parametrize("rows", [1, 9])
def test_coefficients_of_zeros(coefficients: Callable[[int], FusedCoefficients], rows: int) -> None:
    """An all-zero row's norm is rms_eps alone: the mixes are the bases'."""
    mixer = gpu_mixer(random_mixer(8, 5120))
    residual = torch.zeros(rows, 4, 5120, dtype=torch.bfloat16, device=DEVICE)
    assert_mixes(coefficients(5120)(residual, mixer), residual, mixer)


class Chain:
    """Two layers of boundaries around sublayers that scale their input, as an executor calls them."""

    def __init__(self, rows: int, ops: Boundaries, layers: list[LayerWeights], side_stream: bool) -> None:
        self.rows, self.ops, self.layers = rows, ops, layers
        self.step = Gates(rows, side_stream=side_stream)
        self.x = torch.zeros(rows, 5120, dtype=torch.bfloat16, device=DEVICE)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.found: list[Tensor] = []

    def run(self) -> list[Tensor]:
        ops = self.ops
        ops.all_reduce.reset()
        found: list[Tensor] = []
        x, state = ops.first(self.layers[0], self.x, self.step)
        for number, layer in enumerate(self.layers):
            if number:
                x, quant, mean = ops.sublayer(layer, False, state, self.step, quantize=True, capture_aux=True)
                assert quant is not None and mean is not None
                found += [quant.values.view(torch.uint8), quant.scales, mean, x]
            state.pending = x * -1.5
            ops.join()
            x, _, _ = ops.sublayer(layer, True, state, self.step)
            found.append(x)
            rows = torch.stack([x * 0.5, x * 0.25, x * -2.0], 1)
            ops.join()
            state.pending = UnfinalizedRows(rows, state.pre[:, :3].contiguous(), x)
        found += [ops.post_only(state), state.pre, state.post, state.comb]
        ops.all_reduce.end_step()
        ops.join()
        return found

    def capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.found = self.run()
        self.graph = graph


@pytest.mark.parametrize("side_stream", [True, False])
def test_graph_replays(side_stream: bool) -> None:
    """Graphs of several row counts in random order, with changed inputs, give what eager launches give."""
    layers = [
        replace(
            layer,
            attn_mixer=gpu_mixer(layer.attn_mixer),
            ffn_mixer=gpu_mixer(layer.ffn_mixer),
            attn_norm=layer.attn_norm.cuda(),
            ffn_norm=layer.ffn_norm.cuda(),
        )
        for layer in (random_layer(number, 5120) for number in range(2))
    ]
    group, stream = FixedGroup(0, []), CudaSideStream(DEVICE)
    fused, mixes = FusedBoundary(5120, MAX_ROWS, group, DEVICE), FusedCoefficients(5120, MAX_ROWS, DEVICE)
    mixes.prepare_first(layers[0].attn_mixer)
    for layer in layers:
        mixes.prepare(layer.attn_mixer)
        mixes.prepare(layer.ffn_mixer)
    ops = Boundaries(BoundaryAllReduce(5120, MAX_ROWS, group, DEVICE, fused), stream, 4, mixes)
    plain = Boundaries(BoundaryAllReduce(5120, MAX_ROWS, group, DEVICE), stream, 4)
    chains = [Chain(rows, ops, layers, side_stream) for rows in (1, 3, 8, 9, 16, 48, 49, 384)]
    for chain in chains:
        chain.run()
        torch.cuda.synchronize()
        chain.capture()
    order = random.Random(0).choices(range(len(chains)), k=40)
    for replay, number in enumerate([*range(len(chains)), *order]):
        chain = chains[number]
        chain.x.copy_(draw(replay, chain.rows, 5120) * 0.1)
        expected = [tensor.clone() for tensor in chain.run()]
        for tensor in chain.found:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 255)
        assert chain.graph is not None
        chain.graph.replay()
        torch.cuda.synchronize()
        for index, (ours, theirs) in enumerate(zip(chain.found, expected, strict=True)):
            assert same_bits(ours, theirs), f"replay {replay} of {chain.rows} rows: result {index} differs"
        if replay < len(chains):
            twin = Chain(chain.rows, plain, layers, side_stream)
            twin.x.copy_(chain.x)
            streams, by_torch = chain.found[-4].double(), twin.run()[-4].double()
            error = ((streams - by_torch).norm() / by_torch.norm()).item()
            assert error < 1e-2, f"{chain.rows} rows: the streams are {error:g} off the reference's"


@pytest.mark.parametrize("rows", [1, 8, 384])
def test_back_to_back_launches(rows: int) -> None:
    """Launches that overlap their predecessor read no result before it is there: 64 boundaries, each on the last
    one's streams, give the bits that they give one at a time."""
    fused, mixes = FusedBoundary(5120, MAX_ROWS, FixedGroup(0, []), DEVICE), FusedCoefficients(5120, MAX_ROWS, DEVICE)
    mixer, norm = gpu_mixer(random_mixer(9, 5120)), (1 + 0.1 * draw(1, 5120)).bfloat16()
    mixes.prepare(mixer)
    start, x = draw(2, rows, 4, 5120).bfloat16(), draw(3, rows, 5120).bfloat16()

    def chain(wait: bool) -> list[Tensor]:
        streams, pending, found = start, x, []
        for _ in range(64):
            pre, post, comb = mixes(streams, mixer)
            if wait:
                torch.cuda.synchronize()
            streams, output, quant = fused.run(pending, False, streams, post, comb, (pre, norm, NORM_EPS), True)
            if wait:
                torch.cuda.synchronize()
            assert output is not None and quant is not None
            pending = output
            found += [output, quant.scales]
        return [*found, streams]

    expected = chain(True)
    for ours, theirs in zip(chain(False), expected, strict=True):
        assert same_bits(ours, theirs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(False)
    for _ in range(3):
        for tensor in captured:
            tensor.zero_()
        graph.replay()
        for ours, theirs in zip(captured, expected, strict=True):
            assert same_bits(ours, theirs)
