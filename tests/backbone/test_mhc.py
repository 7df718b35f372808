"""mHC against scalar loops in float64, and the order in which a model uses its mixes."""

import math
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from specialized_decode.backbone.attention import Attention
from specialized_decode.backbone.context import ForwardContext
from specialized_decode.backbone.mhc import Coefficients, Mixer, collapse, post_mix
from specialized_decode.backbone.model import DecoderLayer, Model
from specialized_decode.backbone.moe import MoE
from tests.helpers.exact_formats import bf16
from tests.helpers.small_config import small_config

HIDDEN, STREAMS = 64, 4


def _mixer(seed: int, hidden: int = HIDDEN, streams: int = STREAMS, iters: int = 20, hc_eps: float = 1e-6) -> Mixer:
    generator = torch.Generator().manual_seed(seed)
    rows = (2 + streams) * streams
    fn = torch.randn(rows, streams * hidden, generator=generator) * (streams * hidden) ** -0.5
    base, scale = torch.randn(rows, generator=generator), torch.tensor([0.7, 1.3, 2.1])
    return Mixer(fn, base, scale, 1e-20, hc_eps, iters)


def _residual(tokens: int, seed: int = 0, streams: int = STREAMS) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, streams, HIDDEN, generator=generator).to(torch.bfloat16)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def _coefficients(residual: np.ndarray, mixer: Mixer) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One token's mixes, number by number: residual [n, hidden]."""
    n = residual.shape[0]
    x, fn = residual.ravel(), mixer.fn.double().numpy()
    base, scale = mixer.base.double().numpy(), mixer.scale.double().numpy()
    rms = np.sqrt((x**2).mean() + mixer.rms_eps)
    mixes = [sum(fn[row] * x) / rms for row in range(fn.shape[0])]
    pre = np.array([_sigmoid(mixes[i] * scale[0] + base[i]) + mixer.hc_eps for i in range(n)])
    post = np.array([2 * _sigmoid(mixes[n + i] * scale[1] + base[n + i]) for i in range(n)])
    comb = np.empty((n, n))
    for i in range(n):
        logits = [mixes[2 * n + i * n + j] * scale[2] + base[2 * n + i * n + j] for j in range(n)]
        for j in range(n):
            comb[i, j] = np.exp(logits[j]) / sum(np.exp(v) for v in logits) + mixer.hc_eps
    return pre, post, _sinkhorn(comb, mixer.sinkhorn_iters, mixer.hc_eps)


def _sinkhorn(comb: np.ndarray, iters: int, eps: float) -> np.ndarray:
    """Rows come normalized out of the softmax, so the first pass is over columns only."""
    n = len(comb)
    comb = comb.copy()
    for iteration in range(iters):
        if iteration:
            for i in range(n):
                total = sum(comb[i, j] for j in range(n)) + eps
                for j in range(n):
                    comb[i, j] /= total
        for j in range(n):
            total = sum(comb[i, j] for i in range(n)) + eps
            for i in range(n):
                comb[i, j] /= total
    return comb


@pytest.mark.parametrize("streams", [2, 4])
@pytest.mark.parametrize("iters", [1, 2, 20])
def test_coefficients(streams: int, iters: int) -> None:
    mixer, residual = _mixer(1, streams=streams, iters=iters), _residual(5, streams=streams)
    found = mixer(residual)
    assert found.pre.dtype == found.post.dtype == found.comb.dtype == torch.float32
    for token in range(5):
        expected = _coefficients(residual[token].double().numpy(), mixer)
        for part, value in zip(found, expected, strict=True):
            np.testing.assert_allclose(part[token].numpy(), value, rtol=2e-5, atol=1e-6)


def test_epsilons_are_where_the_formula_has_them() -> None:
    """With an epsilon as large as 0.1, a missing or misplaced one shows."""
    mixer, residual = _mixer(2, hc_eps=0.1, iters=3), _residual(2)
    found = mixer(residual)
    for token in range(2):
        expected = _coefficients(residual[token].double().numpy(), mixer)
        for part, value in zip(found, expected, strict=True):
            np.testing.assert_allclose(part[token].numpy(), value, rtol=2e-5)


def test_coefficients_ignore_the_size_of_the_streams() -> None:
    mixer, residual = _mixer(3), _residual(3)
    for part, other in zip(mixer(residual), mixer(residual * 1024), strict=True):
        torch.testing.assert_close(part, other, rtol=1e-5, atol=1e-6)


def test_coefficients_of_silent_streams_are_the_base() -> None:
    mixer = _mixer(4)
    found = mixer(torch.zeros(1, STREAMS, HIDDEN, dtype=torch.bfloat16))
    base = [_sigmoid(value) for value in mixer.base.tolist()]
    assert found.pre[0].tolist() == pytest.approx([value + 1e-6 for value in base[:4]], rel=1e-6)
    assert found.post[0].tolist() == pytest.approx([2 * value for value in base[4:8]], rel=1e-6)


def test_sinkhorn_is_doubly_stochastic() -> None:
    found = _mixer(5)(_residual(64)).comb.double()
    assert (found > 0).all()
    np.testing.assert_allclose(found.sum(1).numpy(), 1.0, atol=1e-5)
    # Columns come last, so rows are near one, not at it.
    np.testing.assert_allclose(found.sum(2).numpy(), 1.0, atol=0.02)


def test_post_mix_reads_comb_by_source_then_target() -> None:
    generator = torch.Generator().manual_seed(6)
    residual, output = _residual(3), torch.randn(3, HIDDEN, generator=generator).to(torch.bfloat16)
    mix = Coefficients(
        torch.rand(3, 4, generator=generator),
        torch.rand(3, 4, generator=generator),
        torch.rand(3, 4, 4, generator=generator),
    )
    found = post_mix(output, residual, mix)
    assert found.dtype == torch.bfloat16 and found.shape == residual.shape
    r, o = residual.double().numpy(), output.double().numpy()
    post, comb = mix.post.double().numpy(), mix.comb.double().numpy()
    for token in range(3):
        for target in range(4):
            expected = post[token, target] * o[token]
            for source in range(4):
                expected = expected + comb[token, source, target] * r[token, source]
            np.testing.assert_allclose(found[token, target].double().numpy(), expected, rtol=2**-8, atol=2**-9)


def test_post_mix_moves_one_stream() -> None:
    """comb[2, 1] alone: stream 1 becomes stream 2, exactly, and all others fall silent."""
    residual, output = _residual(2), torch.ones(2, HIDDEN, dtype=torch.bfloat16)
    comb = torch.zeros(2, 4, 4)
    comb[:, 2, 1] = 1.0
    found = post_mix(output, residual, Coefficients(torch.zeros(2, 4), torch.zeros(2, 4), comb))
    assert torch.equal(found[:, 1], residual[:, 2])
    assert not found[:, [0, 2, 3]].any()


def test_collapse() -> None:
    residual = _residual(3)
    pre = torch.rand(3, 4, generator=torch.Generator().manual_seed(7))
    found = collapse(residual, pre)
    assert found.dtype == torch.bfloat16
    for token in range(3):
        expected = sum(float(pre[token, i]) * residual[token, i].double().numpy() for i in range(4))
        np.testing.assert_allclose(found[token].double().numpy(), expected, rtol=2**-8, atol=2**-9)
    one_hot = torch.tensor([[1.0, 0, 0, 0]]).repeat(3, 1)
    assert torch.equal(collapse(residual, one_hot), residual[:, 0])


class _Sublayer:
    """Stands in for attention and MoE: notes its input, and answers with a multiple of it."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.seen: list[Tensor] = []

    def __call__(self, first: Tensor, second: Tensor) -> Tensor:
        x = first if first.is_floating_point() else second
        self.seen.append(x)
        return x * self.factor


class _Engram:
    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor]] = []

    def __call__(self, residual: Tensor, keep: Tensor) -> Tensor:
        self.seen.append((residual, keep))
        return residual + keep.to(torch.bfloat16)[:, None, None]


def _layer(number: int, engram: _Engram | None, seed: int) -> DecoderLayer:
    generator = torch.Generator().manual_seed(seed)
    norms = [torch.rand(HIDDEN, generator=generator).to(torch.bfloat16) + 0.5 for _ in range(2)]
    return DecoderLayer(
        number,
        cast(Attention, _Sublayer(0.5)),
        cast(MoE, _Sublayer(-0.75)),
        cast(Any, engram),
        _mixer(seed + 10),
        _mixer(seed + 20),
        norms[0],
        norms[1],
        1e-20,
    )


def _norm(x: np.ndarray, weight: Tensor) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-20) * weight.double().numpy()


def _model(engram: _Engram) -> Model:
    config = small_config(num_hidden_layers=3)
    layers = [_layer(0, engram, 0), _layer(1, engram, 1), _layer(2, None, 2)]
    norm = torch.rand(HIDDEN, generator=torch.Generator().manual_seed(9)).to(torch.bfloat16) + 0.5
    return Model(config, ForwardContext(), torch.zeros(1, HIDDEN), layers, norm)


def _lagged(
    model: Model, x: np.ndarray, keep: np.ndarray | None
) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
    """The streams entering each layer and leaving the last, every sublayer's input, and the output, token by token."""
    entering, inputs, hidden = [], [], []
    for token, row in enumerate(x):
        streams, pre, steps, seen = np.stack([row] * 4), np.array([1.0, 0, 0, 0]), [], []
        for number, layer in enumerate(model.layers):
            steps.append(streams)
            if layer.engram is not None and number > 0 and keep is not None:
                streams = bf16(streams + float(keep[token]))
            for mixer, norm, factor in (
                (layer.attn_mixer, layer.attn_norm, 0.5),
                (layer.ffn_mixer, layer.ffn_norm, -0.75),
            ):
                # The input is collapsed with the previous sublayer's pre-mix; this one's are for the next.
                next_pre, post, comb = _coefficients(streams, mixer)
                seen.append(bf16(_norm(bf16(pre @ streams), norm)))
                streams = bf16(comb.T @ streams + post[:, None] * bf16(seen[-1] * factor))
                pre = next_pre
        entering.append(np.stack([*steps, streams]))
        inputs.append(np.stack(seen))
        hidden.append(bf16(_norm(bf16(pre @ streams), model.norm)))
    return list(np.stack(entering, 1)), list(np.stack(inputs, 1)), np.stack(hidden)


def _close(found: Tensor, expected: np.ndarray) -> None:
    """Roundings to bfloat16 that fall differently add up over the layers."""
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("with_engram", [True, False])
def test_lagged_order_of_a_model(with_engram: bool) -> None:
    """Which pre-mix, which streams and which injection reach which sublayer, over three layers."""
    engram = _Engram()
    model = _model(engram)
    model.set_aux_layers((3, 1))
    model.keep_mtp_hidden(6)
    assert model.mtp_hidden_buffer is not None
    x = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(8)).to(torch.bfloat16)
    positions, keep = torch.arange(4), torch.tensor([True, False, True, True])
    hashes = torch.zeros(4, 1, 6, dtype=torch.int64) if with_engram else None
    output = model.run_layers(x, positions, positions, hashes, keep if with_engram else None)
    assert isinstance(output, tuple)
    entering, inputs, hidden = _lagged(model, x.double().numpy(), keep.numpy() if with_engram else None)
    for number, layer in enumerate(model.layers):
        for offset, sublayer in enumerate((layer.attn, layer.ffn)):
            (seen,) = cast(_Sublayer, sublayer).seen
            _close(seen, inputs[2 * number + offset])
    _close(output[0], hidden)
    # Aux hidden states come in the order asked for, and are taken before an injection.
    assert len(output[1]) == 2
    _close(output[1][0], entering[3].mean(1))
    _close(output[1][1], entering[1].mean(1))
    _close(model.mtp_hidden_buffer[:4], entering[3].reshape(4, -1))
    assert not model.mtp_hidden_buffer[4:].any()
    # Layer 0 has the module too, and never uses it.
    assert len(engram.seen) == with_engram
    if with_engram:
        _close(engram.seen[0][0], entering[1])


def test_the_first_sublayer_reads_stream_zero_exactly() -> None:
    model = _model(_Engram())
    x = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(8)).to(torch.bfloat16)
    model.run_layers(x, torch.arange(2), torch.arange(2), None, None)
    (seen,) = cast(_Sublayer, model.layers[0].attn).seen
    expected = bf16(_norm(x.double().numpy(), model.layers[0].attn_norm).astype(np.float32))
    np.testing.assert_allclose(seen.double().numpy(), expected, rtol=2**-7)


@pytest.mark.parametrize("bad", [0, 4, -1])
def test_aux_layers_out_of_range(bad: int) -> None:
    with pytest.raises(ValueError, match=f"found {bad}, expected 1 to 3"):
        _model(_Engram()).set_aux_layers((1, bad))
