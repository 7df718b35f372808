"""The boundary over real peers: `torchrun --nproc-per-node 2 tests/boundary/peers.py CASE`.

Cases: values, graphs, soak [N], aborted, stalled [SECONDS], killed, freed. Every rank runs the same case; a rank that
finds something wrong raises.
"""

import gc
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parent.parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor

from specialized_decode.boundary import BoundaryAllReduce, Pending, QuantizedInput, UnfinalizedRows, reference
from specialized_decode.boundary.mailbox import DEADLINE_SECONDS, PeerLost, PeerTimeout

HIDDEN, MAX_ROWS, TOP_K, EPS = 5120, 384, 6, 1e-20
ROWS = (*range(1, 17), 47, 48, 49, 383, 384)
KINDS = ("tensor", "unfinalized", "published")
FORMS = ("full", "residual", "quantize")
# Before anything of CUDA: no multicast, and no watchdog of NCCL's that ends a process after a CUDA error.
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
# bfloat16 bits. Gentle: both zeros and subnormals. Harsh: infinities, NaN of both signs, and the mailbox's EMPTY.
GENTLE = (0x8000, 0x0000, 0x0001, 0x8001, 0x007F, 0x807F)
HARSH = (0x7F80, 0xFF80, 0x7FC0, 0xFFC0, 0x7F81, 0xFFFF, 0xFFFF)


class NcclGroup:
    """All processes of the default NCCL group."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.process_group: dist.ProcessGroup | None = dist.group.WORLD

    def all_gather(self, tensor: Tensor) -> Tensor:
        parts = tensor.new_empty(self.size, *tensor.shape)
        dist.all_gather_into_tensor(parts, tensor.contiguous())
        return parts

    def min(self, value: int) -> int:
        smallest = torch.tensor([value], device="cuda")
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        return int(smallest)


def start() -> NcclGroup:
    """Joins the group, on the GPU of this process's rank."""
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", timeout=timedelta(seconds=120), device_id=device)
    return NcclGroup()


def fused(group: NcclGroup, deadline: float = DEADLINE_SECONDS) -> BoundaryAllReduce:
    """The boundary on the kernels."""
    # Imported here: it needs Triton.
    from specialized_decode.boundary.fused import FusedBoundary

    device = torch.device("cuda", torch.cuda.current_device())
    kernels = FusedBoundary(HIDDEN, MAX_ROWS, group, device, deadline)
    return BoundaryAllReduce(HIDDEN, MAX_ROWS, group, device, kernels)


def plain(group: NcclGroup) -> BoundaryAllReduce:
    """The boundary on the reference ops, over NCCL."""
    return BoundaryAllReduce(HIDDEN, MAX_ROWS, group, torch.device("cuda", torch.cuda.current_device()))


def synchronize(ours: BoundaryAllReduce) -> None:
    """Waits for the GPU. Raises PeerTimeout where a boundary gave up on a peer."""
    ours.synchronize()
    torch.cuda.synchronize()


# --- inputs -----------------------------------------------------------------------------------------------------


def _randn(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)


def _rand(seed: int, *shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


@dataclass(frozen=True)
class Mixes:
    """What a boundary reads beside its contribution; alike on all ranks. comb's columns sum to 1."""

    residual: Tensor
    post: Tensor
    comb: Tensor
    pre: Tensor
    norm: Tensor

    @classmethod
    def random(cls, rows: int, seed: int) -> "Mixes":
        comb = _rand(seed + 1, rows, 4, 4)
        comb = comb / comb.sum(1, keepdim=True)
        residual, norm = _randn(seed, rows, 4, HIDDEN), _randn(seed + 4, HIDDEN)
        return cls(residual, _rand(seed + 2, rows, 4), comb, _rand(seed + 3, rows, 4), norm)


def _special(tensor: Tensor, shift: int, rank: int) -> None:
    """Puts unusual values into [rows, HIDDEN]: a row in three gets gentle ones, one harsh ones, one none."""
    for row in range(tensor.shape[0]):
        kind = (row + shift) % 3
        if kind:
            bits = GENTLE if kind == 1 else HARSH
            words = torch.tensor([word - (word >> 15 << 16) for word in bits], dtype=torch.int16, device="cuda")
            at = torch.arange(len(bits), device="cuda") * 731 + row * 13 + rank * 1462
            tensor.view(torch.int16)[row, at % HIDDEN] = words


def harsh_rows(rows: int, shift: int) -> Tensor:
    """Which rows `_special` gives infinities or NaN to."""
    return (torch.arange(rows, device="cuda") + shift) % 3 == 2


def contribution(rank: int, rows: int, kind: str, seed: int, shift: int | None) -> Pending:
    """What a rank adds. shift: where unusual values go; None for none."""
    seed = seed * 64 + rank * 17
    if kind == "unfinalized":
        parts = UnfinalizedRows(
            _randn(seed, rows, TOP_K, HIDDEN), _rand(seed, rows, TOP_K), _randn(seed + 9, rows, HIDDEN)
        )
        if shift is not None:
            _special(parts.shared, shift, rank)
        return parts
    output = _randn(seed, rows, HIDDEN)
    if shift is not None:
        _special(output, shift, rank)
    return output


def hand_over(boundary: BoundaryAllReduce, kind: str, output: Pending) -> Pending:
    """The contribution as a boundary takes it: published first, where that is its kind."""
    if kind != "published":
        return output
    assert isinstance(output, Tensor)
    target = boundary.publish_target(output.shape[0])
    target.copy_(output)
    boundary.mark_published(target)
    return target


# --- comparisons ------------------------------------------------------------------------------------------------


def require(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(f"rank {dist.get_rank()}: {what}")


def same_bits(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def same_on_all_ranks(group: NcclGroup, tensor: Tensor, what: str) -> None:
    parts = group.all_gather(tensor.contiguous().view(torch.uint8))
    for rank in range(1, group.size):
        require(torch.equal(parts[rank], parts[0]), f"{what}: rank {rank} has other bits than rank 0")


def _double(output: Pending) -> Tensor:
    if isinstance(output, UnfinalizedRows):
        return (output.rows.double() * output.weights.double().unsqueeze(2)).sum(1) + output.shared.double()
    return output.double()


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm().clamp_min(1e-300))


def _check_close(found: Tensor, expected: Tensor, exact: Tensor, rows: Tensor, what: str) -> None:
    """found and expected: an op's and the reference's values of `exact`. rows: those that are compared as numbers;
    of the others infinities and NaN must agree."""
    require(torch.equal(found.isnan(), expected.isnan()), f"{what}: NaN elsewhere than in the reference")
    require(torch.equal(found.isposinf(), expected.isposinf()), f"{what}: inf elsewhere than in the reference")
    require(torch.equal(found.isneginf(), expected.isneginf()), f"{what}: -inf elsewhere than in the reference")
    if rows.any():
        ours, theirs = _error(found[rows], exact[rows]), _error(expected[rows], exact[rows])
        require(ours <= 1.1 * theirs + 1e-12, f"{what}: error {ours:.3e}, the reference's {theirs:.3e}")


def _check_quant(quant: QuantizedInput, x: Tensor, rows: Tensor, what: str) -> int:
    """Returns how many scales are another than the smallest that fits."""
    if not rows.any():
        return 0
    blocks = x[rows].double().unflatten(1, (-1, 32))
    scales = quant.scales[rows].int() - 127
    smallest = torch.frexp(blocks.abs().amax(2).clamp_min(2.0**-126) / 448.0)
    expected = torch.where(smallest.mantissa == 0.5, smallest.exponent - 1, smallest.exponent).clamp(-127, 127)
    off = scales - expected
    require(bool((off.abs() <= 1).all()), f"{what}: a scale is off by {int(off.abs().max())} powers of two")
    step = torch.exp2(scales.double()).unsqueeze(2)
    back = quant.values.double()[rows].unflatten(1, (-1, 32)) * step
    bound = torch.maximum(blocks.abs() * 2.0**-4, step * 2.0**-10) * 1.001 + (off < 0).unsqueeze(2) * 64 * step
    require(bool(((back - blocks).abs() <= bound).all()), f"{what}: MXFP8 values off")
    return int((off != 0).sum())


# --- values -----------------------------------------------------------------------------------------------------


def values(group: NcclGroup) -> str:
    """Every row count, kind of contribution and form against the reference over NCCL and against float64."""
    ours, theirs, checked, scales_off = fused(group), plain(group), 0, 0
    for rows in ROWS:
        for kind in KINDS:
            for shift in (None, 0, 1, 2):
                ours.reset()
                for number, form in enumerate(FORMS):
                    seed = 1000 * rows + 10 * KINDS.index(kind) + number
                    what = f"rows {rows}, {kind}, {form}, shift {shift}"
                    scales_off += _check_values(group, ours, theirs, rows, kind, form, seed, shift, what)
                    checked += 1
                ours.end_step()
    return f"values: {checked} boundaries right, {scales_off} MXFP8 scales not the smallest"


def _check_values(
    group: NcclGroup,
    ours: BoundaryAllReduce,
    theirs: BoundaryAllReduce,
    rows: int,
    kind: str,
    form: str,
    seed: int,
    shift: int | None,
    what: str,
) -> int:
    mixes, outputs = Mixes.random(rows, seed), [contribution(r, rows, kind, seed, shift) for r in range(group.size)]
    arguments = (mixes.residual, mixes.post, mixes.comb)
    own = outputs[group.rank]
    found_x, quant = None, None
    # The inputs are there long before; read ahead of the contribution or behind it, they are the same.
    settled = rows % 2 == 0
    if form == "residual":
        found = ours.residual_only(hand_over(ours, kind, own), *arguments, settled=settled)
    else:
        collapse = mixes.pre, mixes.norm, EPS
        full = ours.full(hand_over(ours, kind, own), *arguments, *collapse, form == "quantize", settled=settled)
        found, found_x, quant = full
    synchronize(ours)
    expected = theirs.residual_only(own, *arguments)
    total = torch.stack([_double(output) for output in outputs]).sum(0)
    exact = torch.einsum("tij,tih->tjh", mixes.comb.double(), mixes.residual.double())
    exact = exact + mixes.post.double().unsqueeze(2) * total.unsqueeze(1)
    gentle = torch.ones(rows, dtype=torch.bool, device="cuda") if shift is None else ~harsh_rows(rows, shift)
    same_on_all_ranks(group, found, what)
    _check_close(found, expected, exact, gentle, f"{what}: streams")
    if found_x is None:
        return 0
    same_on_all_ranks(group, found_x, f"{what}: input")
    expected_x = reference.rms_norm(reference.collapse(found, mixes.pre), mixes.norm, EPS)
    flat = (found.double() * mixes.pre.double().unsqueeze(2)).sum(1)
    exact_x = flat * (flat.square().mean(1, keepdim=True) + EPS).rsqrt() * mixes.norm.double()
    _check_close(found_x, expected_x, exact_x, gentle, f"{what}: input")
    require((quant is not None) == (form == "quantize"), f"{what}: MXFP8 where it was not asked for, or none")
    if quant is None:
        return 0
    same_on_all_ranks(group, quant.values.view(torch.uint8), f"{what}: MXFP8 values")
    same_on_all_ranks(group, quant.scales, f"{what}: MXFP8 scales")
    return _check_quant(quant, found_x, gentle, what)


# --- steps and graphs -------------------------------------------------------------------------------------------


@dataclass
class Chain:
    """A step's boundaries on the same rows: each adds an own output and half the input that the one before gave."""

    kinds: list[str]
    mixes: Mixes
    outputs: Tensor
    # Called before each boundary of a run.
    before: Callable[[], None] = lambda: None

    def run(self, boundary: BoundaryAllReduce, after: Callable[[], None] = lambda: None) -> tuple[Tensor, Tensor]:
        """The last boundary's streams and input. after: called after each boundary."""
        mixes, streams, x = self.mixes, self.mixes.residual, self.outputs[-1]
        for kind, output in zip(self.kinds, self.outputs, strict=True):
            self.before()
            if kind == "published":
                pending = boundary.publish_target(output.shape[0])
                torch.add(output, x, alpha=0.5, out=pending)
                boundary.mark_published(pending)
            else:
                pending = torch.add(output, x, alpha=0.5)
            collapse = mixes.pre, mixes.norm, EPS
            # The addition is a whole dependency, so the boundary before it has ended.
            streams, x, _ = boundary.full(pending, streams, mixes.post, mixes.comb, *collapse, False, settled=True)
            after()
        return streams, x


def random_chain(group: NcclGroup, rows: int, boundaries: int, seed: int) -> Chain:
    """Alike on all ranks but for the outputs."""
    rng = random.Random(seed)
    kinds = [rng.choice(("tensor", "published")) for _ in range(boundaries)]
    outputs = _randn(seed * 64 + group.rank, boundaries, rows, HIDDEN)
    return Chain(kinds, Mixes.random(rows, seed), outputs)


def check_chain(group: NcclGroup, found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], what: str) -> None:
    """Against the reference's run of the chain, which rounds elsewhere: 3 % of the norm of every row."""
    for name, mine, theirs in zip(("streams", "input"), found, expected, strict=True):
        same_on_all_ranks(group, mine, f"{what}: {name}")
        mine, theirs = mine.flatten(1).double(), theirs.flatten(1).double()
        error = float(((mine - theirs).norm(dim=1) / theirs.norm(dim=1)).max())
        require(error < 0.03, f"{what}: {name} are {error:.3g} of their norm away from the reference")


def step(ours: BoundaryAllReduce, chain: Chain) -> tuple[Tensor, Tensor]:
    ours.reset()
    found = chain.run(ours)
    ours.end_step()
    return found


def capture(run: Callable[[], tuple[Tensor, Tensor]]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor]]:
    """A graph of `run`, which has run before, and what it leaves. NCCL's watchdog may go on meanwhile."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = run()
    return graph, found


def graphs(group: NcclGroup) -> str:
    """Graphs of different steps, replayed in a random order with other inputs each time."""
    ours, theirs, rng = fused(group), plain(group), random.Random(1)
    shapes = ((1, 1), (1, 2), (4, 3), (8, 4), (8, 5), (48, 7), (49, 2), (384, 3), (16, 20))
    captured = []
    for number, (rows, boundaries) in enumerate(shapes):
        chain = random_chain(group, rows, boundaries, 100 + number)
        # Compiles what the capture launches.
        step(ours, chain)
        synchronize(ours)
        captured.append((chain, *capture(lambda chain=chain: step(ours, chain))))  # type: ignore[misc]
    replays = 150
    for replay in range(replays):
        number = rng.randrange(len(captured))
        chain, graph, found = captured[number]
        chain.outputs.copy_(_randn(replay * 64 + group.rank + 7, *chain.outputs.shape))
        chain.mixes.residual.copy_(_randn(replay + 7, *chain.mixes.residual.shape))
        for tensor in found:
            tensor.fill_(float("nan"))
        if rng.random() < 0.3:
            # Two in a row: the second starts while the other rank may still be in the first.
            graph.replay()
        graph.replay()
        synchronize(ours)
        check_chain(group, found, chain.run(theirs), f"replay {replay} of graph {number}")
        if replay % 10 == 0:
            check_chain(group, step(ours, chain), chain.run(theirs), f"eager step after replay {replay}")
    return f"graphs: {replays} replays of {len(captured)} graphs right"


# --- soak -------------------------------------------------------------------------------------------------------

SOAK_GRAPHS = 16
SOAK_DELAY_CYCLES = 90_000  # about 50 us


def soak(group: NcclGroup, boundaries: int = 1_000_000) -> str:
    """Boundaries in graphs with random delays on each rank. What a graph leaves is compared bit by bit, inside it,
    with a run in lockstep, which is compared with the reference."""
    ours, theirs = fused(group), plain(group)
    rng, own = random.Random(2), random.Random(1000 + group.rank)
    mismatches = torch.zeros((), dtype=torch.int64, device="cuda")

    def lockstep() -> None:
        synchronize(ours)
        dist.barrier()

    def delay() -> None:
        if own.random() < 0.05:
            torch.cuda._sleep(own.randrange(SOAK_DELAY_CYCLES))

    captured: list[tuple[torch.cuda.CUDAGraph, int]] = []
    keep = []
    for number in range(SOAK_GRAPHS):
        chains: list[Chain] = []
        count = left = rng.randint(50, 200)
        while left:
            length = min(left, rng.randint(5, 40))
            rows = rng.choice((*range(1, 17), *range(1, 9), 47, 48, 49, 384))
            chains.append(random_chain(group, rows, length, 1000 * (number + 1) + len(chains)))
            left -= length
        expected = []
        ours.reset()
        for chain in chains:
            found = chain.run(ours, lockstep)
            check_chain(group, found, chain.run(theirs), f"soak: graph {number}")
            expected.append(found)
            chain.before = delay
        ours.end_step()

        def run(chains: list[Chain] = chains, expected: list[tuple[Tensor, Tensor]] = expected) -> None:
            ours.reset()
            for chain, right in zip(chains, expected, strict=True):
                for mine, other in zip(chain.run(ours), right, strict=True):
                    mismatches.add_((mine.view(torch.int16) != other.view(torch.int16)).any())
                    mine.fill_(float("nan"))
            ours.end_step()

        run()
        lockstep()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run()
        captured.append((graph, count))
        keep.append((chains, expected))
    lockstep()
    begin, done, replays = time.monotonic(), 0, 0
    while done < boundaries:
        graph, count = captured[rng.randrange(len(captured))]
        graph.replay()
        done, replays = done + count, replays + 1
        if own.random() < 0.02:
            time.sleep(own.random() * 2e-3)
        if replays % 20 == 0:
            synchronize(ours)
    synchronize(ours)
    seconds = time.monotonic() - begin
    found_wrong = int(mismatches)
    require(found_wrong == 0, f"soak: {done} boundaries, {found_wrong} mismatches, {seconds:.1f} seconds")
    return f"soak: {done} boundaries, {found_wrong} mismatches, {seconds:.1f} seconds"


# --- failures ---------------------------------------------------------------------------------------------------


class Aborted(Exception):
    """What the aborted steps raise."""


def aborted(group: NcclGroup) -> str:
    """Steps that end in the middle, on all ranks; the next step is right."""
    ours, theirs, cases = fused(group, 5.0), plain(group), 0

    def after(what: str, rows: int, seed: int) -> None:
        chain = random_chain(group, rows, 4, seed)
        found = step(ours, chain)
        synchronize(ours)
        check_chain(group, found, chain.run(theirs), f"the step after {what}")

    # A publish that no boundary takes, as the step's first, second, third and fourth.
    for rows in (1, 48, 384):
        for boundaries in range(5):
            chain = random_chain(group, rows, boundaries + 1, 50 + boundaries)
            try:
                ours.reset()
                Chain(chain.kinds[:-1], chain.mixes, chain.outputs[:-1]).run(ours) if boundaries else None
                hand_over(ours, "published", chain.outputs[-1])
                raise Aborted
            except Aborted:
                after(f"a publish without its reduce, {boundaries} boundaries in, {rows} rows", rows, 60 + boundaries)
            cases += 1
    # Between two boundaries, published or not, many times, so that one rank is still in its last boundary.
    for rows in (1, 384):
        for boundaries in range(1, 5):
            for kinds in (["tensor"] * boundaries, ["published"] * boundaries):
                chain = random_chain(group, rows, boundaries, 70 + boundaries)
                chain.kinds = kinds
                expected = chain.run(theirs)
                results = []
                for repeat in range(25):
                    try:
                        ours.reset()
                        if (repeat + group.rank) % 2:
                            torch.cuda._sleep(20_000)
                        results.append(chain.run(ours))
                        raise Aborted
                    except Aborted:
                        pass
                synchronize(ours)
                for found in results:
                    check_chain(group, found, expected, f"{boundaries} {kinds[0]} boundaries again and again")
                after(f"{boundaries} {kinds[0]} boundaries and no end, {rows} rows", rows, 80 + boundaries)
                cases += 1
    # In a capture: nothing of it has run.
    for rows in (1, 48):
        for last in ("tensor", "published"):
            chain = random_chain(group, rows, 3, 90)
            step(ours, chain)
            synchronize(ours)
            try:
                with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
                    ours.reset()
                    chain.run(ours)
                    hand_over(ours, last, chain.outputs[0])
                    raise Aborted
            except Aborted:
                pass
            torch.cuda.synchronize()
            after(f"an exception in a capture after a {last}", rows, 91)
            graph, found = capture(lambda chain=chain: step(ours, chain))  # type: ignore[misc]
            graph.replay()
            synchronize(ours)
            check_chain(group, found, chain.run(theirs), "the capture after an exception in a capture")
            cases += 1
    return f"aborted: {cases} aborted steps, each followed by a right one"


def _two_of_three(group: NcclGroup, deadline: float) -> tuple[BoundaryAllReduce, Chain]:
    """Two whole steps, and the first two boundaries of a third."""
    ours, chain = fused(group, deadline), random_chain(group, 4, 3, 5)
    for _ in range(2):
        step(ours, chain)
    synchronize(ours)
    dist.barrier()
    torch.cuda.synchronize()
    ours.reset()
    Chain(chain.kinds[:2], chain.mixes, chain.outputs[:2]).run(ours)
    return ours, chain


def _last_boundary(ours: BoundaryAllReduce, chain: Chain) -> None:
    mixes = chain.mixes
    ours.full(chain.outputs[2], mixes.residual, mixes.post, mixes.comb, mixes.pre, mixes.norm, EPS, False)
    synchronize(ours)


def stalled(group: NcclGroup, deadline: float = DEADLINE_SECONDS) -> str:
    """The last rank is alive and never comes to a step's last boundary; the first must say so."""
    ours, chain = _two_of_three(group, deadline)
    last = group.size - 1
    if group.rank == last:
        torch.cuda.synchronize()
        time.sleep(deadline + 5)
        return ""
    begin = time.monotonic()
    try:
        _last_boundary(ours, chain)
    except PeerTimeout as error:
        seconds = time.monotonic() - begin
        expected = f"rank {group.rank}: boundary {3 * len(chain.kinds) - 1}: row "
        require(str(error).startswith(expected), f"stalled: found {error}, expected {expected}...")
        require(f"of rank {last} did not come" in str(error), f"stalled: found {error}")
        require(deadline - 0.5 < seconds < deadline + 5, f"stalled: it took {seconds:.1f} s, deadline {deadline} s")
        return f"stalled: {seconds:.1f} s: PeerTimeout: {error}"
    raise AssertionError("stalled: found no error though a rank is not there")


def killed(group: NcclGroup) -> str:
    """The last rank is killed in the middle of a step; the first must say so."""
    ours, chain = _two_of_three(group, DEADLINE_SECONDS)
    last = group.size - 1
    if group.rank == last:
        torch.cuda.synchronize()
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        _last_boundary(ours, chain)
    except PeerLost as error:
        seconds = time.monotonic() - begin
        require(f"rank {last}" in str(error), f"killed: found {error}, expected rank {last} named")
        require(seconds < 15, f"killed: it took {seconds:.1f} s")
        return f"killed: {seconds:.1f} s: {type(error).__name__}: {error} (behind it: {error.__cause__})"
    raise AssertionError("killed: found no error though a rank is gone")


def freed(group: NcclGroup) -> str:
    """Executors come and go; their mailboxes' memory goes with them."""
    used = []
    for _ in range(12):
        ours, chain = fused(group), random_chain(group, 4, 3, 5)
        step(ours, chain)
        synchronize(ours)
        del ours, chain
        gc.collect()
        torch.cuda.empty_cache()
        dist.barrier()
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        used.append((total - free) >> 20)
    mailbox = 3 * group.size * MAX_ROWS * HIDDEN * 2 >> 20
    require(used[-1] - used[1] < mailbox, f"freed: found MiB in use {used}, expected no growth by {mailbox} each")
    return f"freed: {len(used)} executors built and freed, {used[1]} MiB in use after the second, {used[-1]} at the end"


def main(argv: list[str]) -> None:
    """Command line: a case and its number."""
    for name, value in ENVIRONMENT.items():
        os.environ[name] = value
    group = start()
    cases: dict[str, Callable[[], str]] = {
        "values": lambda: values(group),
        "graphs": lambda: graphs(group),
        "soak": lambda: soak(group, *map(int, argv[1:])),
        "aborted": lambda: aborted(group),
        "stalled": lambda: stalled(group, *map(float, argv[1:])),
        "killed": lambda: killed(group),
        "freed": lambda: freed(group),
    }
    try:
        said = cases[argv[0]]()
    except BaseException as error:
        print(f"rank {group.rank}: {argv[0]}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        traceback.print_exc()
        sys.stderr.flush()
        # Past destructors, which wait for a peer that waits for this rank.
        os._exit(1)
    if group.rank == 0:
        print(said, flush=True)
    if argv[0] in ("stalled", "killed"):
        # The other rank is gone, or waits for nobody.
        os._exit(0)
    dist.barrier()
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
