"""Kernels for small steps beside a host engine's own ops for the others: the executor's plan, and its values."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specialized_decode.attention import AttentionStep, StockAttention, index_tuning, mla_tuning, projection_tuning
from specialized_decode.boundary import Boundaries, BoundaryAllReduce
from specialized_decode.boundary import reference as boundary_reference
from specialized_decode.runtime import KERNELS, DecodeConfig, SpecializedDecode, UnsupportedTarget
from specialized_decode.runtime import executor as module
from specialized_decode.runtime.tuning import GATES
from tests.helpers.runtime_model import FEW_LAYERS, Pair, assert_same
from tests.runtime.conftest import Folder

NAMES = ("host", "config", "layers", "norm", "attention_class", "aux_layers", "mtp_hidden_buffer")


class PlainOps:
    """See StockOps: the plain model's layers, which count their calls."""

    def __init__(self, pair: Pair) -> None:
        self.pair, self.calls = pair, list[tuple[int, int]]()
        backbone = pair.backbone
        device = torch.device("cpu")
        all_reduce = BoundaryAllReduce(backbone.config.hidden_size, 384, backbone.host.tp_group, device)
        stream = backbone.host.emulated_stream("stock mhc")
        self.boundaries = Boundaries(all_reduce, stream, backbone.config.hc_mult, None)
        self.boundaries.coefficients.prepare_first(backbone.layers[0].attn_mixer)
        for layer in backbone.layers:
            self.boundaries.coefficients.prepare(layer.attn_mixer)
            self.boundaries.coefficients.prepare(layer.ffn_mixer)

    def attention(self, layer_id: int, x: Tensor, positions: Tensor) -> Tensor:
        self.calls.append((layer_id, x.shape[0]))
        return self.pair.backbone.layers[layer_id].attn(positions, x)

    def engram(self, layer_id: int, residual: Tensor, keep: Tensor) -> Tensor:
        engram = self.pair.backbone.layers[layer_id].engram
        assert engram is not None
        return engram(residual, keep)

    def finish(self, residual: Tensor, pre: Tensor) -> Tensor:
        config = self.pair.backbone.config
        collapsed = boundary_reference.collapse(residual, pre)
        return boundary_reference.rms_norm(collapsed, self.pair.backbone.norm, config.rms_norm_eps)

    def join(self) -> None:
        """Nothing is forked."""


def build(pair: Pair, config: DecodeConfig, **changes: Any) -> tuple[PlainOps, SpecializedDecode]:
    ops = PlainOps(pair)
    names = {name: getattr(pair.backbone, name) for name in NAMES}
    target: Any = SimpleNamespace(**(names | {"stock": ops} | changes))
    return ops, SpecializedDecode.for_target(target, config, pair.model.lm_head)


@pytest.fixture(scope="module")
def pair(folder: Folder) -> Pair:
    return Pair(folder(FEW_LAYERS), max_rows=12, max_context=128, max_tokens=128)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that has the kernels; here the step's reference ops take their place."""
    for name in ("mla_unsupported", "projections_unsupported", "index_unsupported"):
        monkeypatch.setattr(module, name, lambda attn, device: None)
    monkeypatch.setattr(SpecializedDecode, "_sparse_mla_kernels", lambda executor, layers: None)
    monkeypatch.setattr(SpecializedDecode, "_projection_kernels", lambda executor, layers: None)


@pytest.mark.usefixtures("served")
def test_small_steps_run_on_kernels_and_larger_ones_on_the_host(pair: Pair) -> None:
    """Layers 1 to 3 write records or select, and layer 0 reads its window alone. In turn, over the same caches, steps
    of 8 rows, which are ours, and of 9, the host's: each leaves what the plain layers leave, bit for bit."""
    ops, pair.executor = build(pair, DecodeConfig(kernels=frozenset({"attention"})))
    assert [type(plan.attention) for plan in pair.executor.layers] == [AttentionStep] * 4
    requests = pair.open((1, 33, 90, 110, 5, 60, 70, 80, 17))
    captures = {}
    for rows in (1, 8, 9):
        ops.calls.clear()
        captures[rows] = pair.capture(rows)
        # The run before a capture is the host's own, without the executor.
        assert ops.calls == ([(layer, rows) for layer in range(4)] if rows > 8 else [])
    for rows in (8, 9, 1, 9, 8):
        assert_same(*pair.both(captures[rows], pair.batch(requests[:rows])), rows=rows)
        pair.advance(requests[:rows])
    pair.close(requests)


@pytest.mark.usefixtures("served")
def test_drafts_of_one_request_run_on_kernels(pair: Pair) -> None:
    """Six rows of a request, some taken back; those of two requests are too many."""
    ops, pair.executor = build(pair, DecodeConfig(kernels=frozenset({"attention"})))
    requests = pair.open((33, 97), new=6)
    for live, ours in ((1, True), (2, False), (1, True)):
        ops.calls.clear()
        captured = pair.capture(live, 6)
        assert (ops.calls == []) == ours
        for accepted in (1, 4):
            assert_same(*pair.both(captured, pair.batch(requests[:live], 6)), rows=6 * live)
            pair.advance(requests[:live], accepted, 6)
    pair.close(requests)


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("name", ["mla_unsupported", "projections_unsupported", "index_unsupported"])
def test_a_layer_that_no_kernel_serves_leaves_all_to_the_host(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Who selects and who reads the selection are of a kind."""
    monkeypatch.setattr(module, name, lambda attn, device: "found odd" if attn.layer_id == 2 else None)
    with caplog.at_level("INFO"):
        ops, pair.executor = build(pair, DecodeConfig(kernels=frozenset({"attention"})))
    assert {type(plan.attention) for plan in pair.executor.layers} == {StockAttention}
    assert "Attention runs on the host's ops: found odd" in caplog.text
    captured = pair.capture(2)
    requests = pair.open((33, 90))
    assert [call for call in ops.calls if call[1] == 2][-4:] == [(layer, 2) for layer in range(4)]
    assert_same(*pair.both(captured, pair.batch(requests)), rows=2)
    pair.close(requests)


@pytest.mark.usefixtures("served")
def test_index_kernels_are_asked_for_selecting_layers_alone(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(module, "index_unsupported", lambda attn, device: asked.append(attn.layer_id))
    build(pair, DecodeConfig(kernels=frozenset({"attention"})))
    assert asked == [1, 2, 3]


def test_kernels_take_all_rows_of_low_batch_steps() -> None:
    """Else those of more rows would run on reference ops."""
    most = max(gates.low_batch for gates in GATES.values())
    assert most <= min(index_tuning.MAX_ROWS, projection_tuning.MAX_ROWS, mla_tuning.MLA_MAX_ROWS)


def test_where_kernels_do_not_serve_all_is_the_hosts(pair: Pair) -> None:
    _, executor = build(pair, DecodeConfig(kernels=KERNELS))
    assert {type(plan.attention) for plan in executor.layers} == {StockAttention}
    assert executor.boundaries is executor.target.stock.boundaries  # type: ignore[union-attr]
    assert all(plan.moe.gemm is None for plan in executor.layers)


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("changes", [{"attention_class": "flashinfer_sparse"}, {"kernels": frozenset({"boundary"})}])
def test_other_records_and_other_kernels(pair: Pair, changes: dict[str, Any]) -> None:
    config = DecodeConfig(kernels=changes.pop("kernels", KERNELS))
    _, executor = build(pair, config, **changes)
    assert {type(plan.attention) for plan in executor.layers} == {StockAttention}


def test_an_unknown_family_is_refused(pair: Pair) -> None:
    with pytest.raises(UnsupportedTarget, match="kernels: found mhc, expected attention, boundary, moe"):
        build(pair, DecodeConfig(kernels=frozenset({"mhc", "moe"})))
