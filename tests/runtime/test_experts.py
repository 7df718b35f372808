"""The executor over a backbone whose routed experts are held in the form that the MoE kernels read."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specialized_decode.boundary.kernels import fragments as shared
from specialized_decode.moe import RoutedExpertGemms, hold_experts, select
from specialized_decode.moe import fused as launcher
from specialized_decode.moe.kernels import experts, fragments, front, route
from specialized_decode.runtime import KERNELS, DecodeConfig, SpecializedDecode, step_gates
from specialized_decode.runtime import experts as module
from specialized_decode.runtime import hold_experts as hold_backbones_experts
from tests.helpers.emulated_kernels import emulate
from tests.helpers.runtime_model import FEW_LAYERS, Layers, Pair, Seen, assert_close, assert_same
from tests.runtime.conftest import Folder

# Widths that the kernels can run: a hidden size of 128 at least.
WIDTHS: dict[str, Any] = {"hidden_size": 128, "moe_intermediate_size": 64, "n_routed_experts": 16}
CONTEXTS = (1, 33, 90, 110)


def packed_pair(monkeypatch: pytest.MonkeyPatch, folder: Path, **sizes: Any) -> Pair:
    """A model whose experts are held in Humming's form, and the executor over it, on a CPU."""
    pair = Pair(folder, **sizes)
    with monkeypatch.context() as patch:
        patch.setattr(select, "unsuited", select.misfit)
        hold_experts([layer.ffn for layer in pair.backbone.layers])
    assert [layer.ffn.experts.layout for layer in pair.backbone.layers] == ["HUMMING"] * len(pair.backbone.layers)
    pair.executor = SpecializedDecode.for_target(pair.backbone, DecodeConfig(), pair.model.lm_head)
    return pair


def test_plain_layers_and_executor_compute_from_what_is_held(monkeypatch: pytest.MonkeyPatch, folder: Folder) -> None:
    """To the bit alike, prefills included, and alike to a model that holds the checkpoint's form: these scales need no
    requantizing. Without kernels every layer's MoE is the plain one."""
    sizes: dict[str, Any] = {"max_rows": 4, "max_context": 128, "max_tokens": 128}
    written = folder(FEW_LAYERS, **WIDTHS)
    found = []
    for pair in (packed_pair(monkeypatch, written, **sizes), Pair(written, **sizes)):
        pair.backbone.set_aux_layers((1, 2, 4))
        requests = pair.open(CONTEXTS)
        for rows in (4, 3):
            plain, executed = pair.both(pair.capture(rows), pair.batch(requests[:rows]))
            assert_same(plain, executed, rows=rows)
            found.append(executed)
            pair.advance(requests[:rows])
        gemms = [plan.moe.gemm for plan in pair.executor.layers]
        assert [gemm is None for gemm in gemms] == [pair.backbone.layers[0].ffn.experts.layout == "HUMMING"] * 4
    for ours, theirs in zip(found[:2], found[2:], strict=True):
        assert_same(theirs, ours)


class Eager:
    """An executor that is granted its steps outside of captures, where a kernel's emulation may read its tensors."""

    def __init__(self, executor: SpecializedDecode) -> None:
        self.executor = executor

    def plan(self, positions: Tensor, intermediate_tensors: object | None) -> Any:
        return step_gates(positions.shape[0], self.executor)

    def refusal(self, positions: Tensor, intermediate_tensors: object | None) -> None:
        return None

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.executor.compute_logits(hidden)


def stepped(pair: Pair, batch: Any) -> Seen:
    """`batch` through the executor, not captured."""
    pair.model.executor = Eager(pair.executor)
    try:
        pair._poison()
        return pair._seen(batch, pair.engine.forward(batch))
    finally:
        pair.model.executor = None


def test_on_emulated_kernels(monkeypatch: pytest.MonkeyPatch, folder: Folder) -> None:
    """Every layer's MoE on the kernels, which read the backbone's own tensors, against the plain layers."""
    kernels = emulate(monkeypatch, launcher, (shared, fragments, front, route, experts))
    layers = Layers((0, 1, 1), (1,), (1, 2), 1)
    pair = packed_pair(monkeypatch, folder(layers, **WIDTHS), max_rows=4, max_context=128, max_tokens=128)
    pair.backbone.set_aux_layers((1,))
    monkeypatch.setattr(RoutedExpertGemms, "refusal", staticmethod(lambda ffn, kernels=True: select.unfit(ffn)))
    # Each row count's launches are compiled on a GPU; here they would only take time.
    monkeypatch.setattr(launcher.FusedMoE, "warm_up", lambda moe: None)
    config = DecodeConfig(kernels=frozenset({"moe"}))
    pair.executor = SpecializedDecode.for_target(pair.backbone, config, pair.model.lm_head)
    for plan in pair.executor.layers:
        assert plan.moe.gemm is not None and plan.moe.gemm.fused is not None
        assert plan.moe.gemm.fused.w2.weight is plan.layer.ffn.experts.w2
    requests = pair.open((5, 60, 100), image_share=0.1)
    for _ in range(2):
        batch = pair.batch(requests)
        before = pair.snapshot()
        plain = pair.plain(batch)
        pair.restore(before)
        for kernel in kernels.values():
            kernel.launches.clear()
        assert_close(plain, stepped(pair, batch), 3)
        assert [len(kernel.launches) for kernel in kernels.values()] == [3] * 4
        pair.advance(requests)


@pytest.mark.parametrize("kernels", [KERNELS, frozenset({"moe"}), KERNELS - {"moe"}, frozenset()])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_experts_are_packed_where_the_family_runs(
    monkeypatch: pytest.MonkeyPatch, device: str, kernels: frozenset[str]
) -> None:
    """Asked for, and on a GPU; otherwise nothing is touched."""
    asked: list[Any] = []
    monkeypatch.setattr(module.moe, "hold_experts", asked.append)
    layers = [SimpleNamespace(ffn=object()) for _ in range(2)]
    target: Any = SimpleNamespace(norm=SimpleNamespace(device=torch.device(device)), layers=layers)
    hold_backbones_experts(target, DecodeConfig(kernels=kernels))
    wanted = device == "cuda" and "moe" in kernels
    assert asked == ([[layer.ffn for layer in layers]] if wanted else [])


def test_a_cpu_keeps_the_checkpoints_form(folder: Folder) -> None:
    """As `decode` asks by default: all kernels, none of which serve here."""
    pair = Pair(folder(Layers((0,))), max_rows=2, max_context=64, max_tokens=64, kernels=KERNELS)
    assert pair.backbone.layers[0].ffn.experts.layout == "checkpoint"
    assert pair.executor.layers[0].moe.gemm is not None
