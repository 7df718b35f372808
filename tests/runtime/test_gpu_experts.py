"""The local host with the MoE kernels on a GPU, at the widths of a rank at TP 4: memory, values, captured graphs."""

import gc
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from specialized_decode.backbone import moe as backbone
from specialized_decode.backbone.model import load_model
from specialized_decode.backbone.moe import MoE
from specialized_decode.backbone.presets import flash_plan
from specialized_decode.backbone.writer import write_checkpoint
from specialized_decode.boundary import UnfinalizedRows
from specialized_decode.boundary import reference as boundary_reference
from specialized_decode.moe import build_routed_expert_gemms
from specialized_decode.runtime import KERNELS, DecodeConfig, SpecializedDecode, hold_experts
from tests.helpers.runtime_model import Pair, assert_close
from tests.helpers.step_gates import Gates

LAYERS, EXPERTS, WIDTH, HIDDEN = 4, 64, 576, 5120
# The limit for all layers together, and what an allocator may round up in their tensors.
LIMIT = 64 << 20
FAMILY = frozenset({"moe"})
# Bytes of all layers' routed experts as loaded, and as held: half a byte a code, a byte for 32.
LOADED = LAYERS * EXPERTS * 3 * WIDTH * HIDDEN * 17 // 32
HELD = LAYERS * EXPERTS * ((1280 * HIDDEN + HIDDEN * 640) * 17 // 32 + 2 * 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind of layer; embedding and head are whole, 2.6 GB."""
    plan = flash_plan(layers=LAYERS, experts=EXPERTS, shard_tp=4)
    return write_checkpoint(plan, tmp_path_factory.mktemp("flash") / "tp4", workers=8)


@pytest.fixture(scope="module", params=[False, True], ids=["kept dequantized", "dequantized as used"])
def pair(folder: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """kept: the plain layers hold the experts in bfloat16 besides, as they do with so few."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param:
            patch.setattr(backbone, "_KEEP_BYTES", {"cuda": 0})
        pair = Pair(folder, device="cuda", max_rows=16, max_context=512, max_tokens=512, kernels=FAMILY)
    pair.backbone.set_aux_layers((1,))
    yield pair
    torch.cuda.synchronize()


def allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def last_experts(layers: list[MoE]) -> list[torch.Tensor]:
    """Every layer's last two, dequantized."""
    return [part.clone() for ffn in layers for part in ffn.experts.dequantized(EXPERTS - 2, EXPERTS)]


@pytest.mark.parametrize("kept", [True, False])
def test_memory(folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kept: bool) -> None:
    """Experts are there once: packing adds its padding alone, and building keeps what the log says, which is nothing.
    What packing takes besides is bounded by a layer and a piece."""
    if not kept:
        monkeypatch.setattr(backbone, "_KEEP_BYTES", {"cuda": 0})
    assert min(LOADED, HELD) > 4 * LIMIT, "a copy could hide in the limit"
    model = load_model(folder, torch.device("cuda"), 64, 128)
    layers = [layer.ffn for layer in model.model.layers]
    some = last_experts(layers)
    loaded = allocated()
    torch.cuda.reset_peak_memory_stats()
    with caplog.at_level(logging.INFO):
        hold_experts(model.model, DecodeConfig(kernels=KERNELS))
    held = allocated()
    assert abs(held - loaded - (HELD - LOADED)) < LIMIT
    peak = torch.cuda.max_memory_allocated() - max(held, loaded)
    # Dequantizing, for the plain layers, takes more, here as at loading.
    assert kept or peak < HELD / LAYERS + (2 << 30), f"packing took {peak / 1e9:.2f} GB besides"
    assert [ffn.experts.layout for ffn in layers] == ["HUMMING"] * LAYERS
    assert [ffn.experts.kept for ffn in layers] == [kept] * LAYERS
    # Made-up weights' scales need no requantizing.
    assert all(torch.equal(*pair) for pair in zip(last_experts(layers), some, strict=True))
    said = f"{LAYERS} of {LAYERS} layers held in the kernels' form alone: {HELD / 1e6:.1f} MB, before "
    assert said + f"{LOADED / 1e6:.1f} MB" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO):
        gemms = build_routed_expert_gemms(layers)
    announced = re.search(r"(\d+) layers on kernels .* keep (\d+) bytes", caplog.text)
    assert announced is not None and int(announced[1]) == LAYERS
    assert f"{LAYERS} of {LAYERS} layers on the low-batch path" in caplog.text
    grown = allocated() - held
    assert int(announced[2]) < LIMIT and grown <= int(announced[2]), f"{grown} bytes more than before the build"
    assert all(gemm is not None and gemm.fused is not None for gemm in gemms)


def test_without_the_family_nothing_is_packed(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load_model(folder, torch.device("cuda"), 64, 128)
    before = allocated()
    with caplog.at_level(logging.INFO):
        hold_experts(model.model, DecodeConfig(kernels=KERNELS - FAMILY))
    assert allocated() == before and "Routed experts" not in caplog.text
    assert [layer.ffn.experts.layout for layer in model.model.layers] == ["checkpoint"] * LAYERS


def test_layers_are_on_kernels(pair: Pair) -> None:
    for plan in pair.executor.layers:
        gemm = plan.moe.gemm
        assert gemm is not None and gemm.fused is not None and plan.moe.max_rows == 8
        assert gemm.fused.w13.weight is plan.layer.ffn.experts.w13
        assert [plan.moe.takes_low_batch(Gates(rows)) for rows in (1, 8, 9)] == [True, True, False]


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_a_layer_against_the_plain_one(pair: Pair, rows: int) -> None:
    """The same input: nothing is magnified. Experts are chosen from the same logits but for the order of sums."""
    for plan in pair.executor.layers:
        generator = torch.Generator("cuda").manual_seed(17 * plan.layer_id + rows)
        x = torch.randn(rows, HIDDEN, generator=generator, device="cuda").bfloat16()
        ids = torch.arange(rows, device="cuda")
        ids[rows // 2] = 129264
        with torch.no_grad():
            output = plan.moe.run(x, ids, Gates(rows))
            assert isinstance(output, UnfinalizedRows)
            found = boundary_reference.finalize(output).double()
            expected = pair.backbone.layers[plan.layer_id].ffn(x, ids).double()
        errors = (found - expected).norm(dim=1) / expected.norm(dim=1)
        assert (errors < 2e-2).all(), f"layer {plan.layer_id}: {errors.tolist()}, expected below 0.02"


@pytest.mark.parametrize(("live", "padding"), [(1, 0), (3, 1), (8, 0), (9, 0)])
def test_replays_against_the_plain_model(pair: Pair, live: int, padding: int) -> None:
    """Teacher-forced, with inputs that change from replay to replay; nine rows take the plain MoE."""
    captured = pair.capture(live + padding)
    requests = pair.open([1 + 37 * index for index in range(live)])
    try:
        for _ in range(3):
            plain, executed = pair.both(captured, pair.batch([*requests, *[None] * padding]))
            assert_close(plain, executed, live)
            pair.advance(requests, image_share=0.05)
    finally:
        pair.close(requests)


def test_a_replay_is_repeatable(pair: Pair) -> None:
    captured = pair.capture(8)
    requests = pair.open([5, 30, 64, 100, 129, 180, 250, 300])
    batch = pair.batch(requests)
    before = pair.snapshot()
    first = pair.replayed(captured, batch)
    for _ in range(5):
        pair.restore(before)
        assert torch.equal(pair.replayed(captured, batch).logits, first.logits)
    pair.close(requests)


def test_greedy_tokens_with_all_kernels(pair: Pair) -> None:
    """What `decode` runs: every step by the executor."""
    model = pair.model
    model.executor = SpecializedDecode.for_target(pair.backbone, DecodeConfig(kernels=KERNELS), model.lm_head)
    try:
        pair.engine.capture([4])
        generation = pair.engine.generate([pair.token_ids(length) for length in (1, 40, 130, 7)], 12)
    finally:
        model.executor = None
        pair.engine.graphs.clear()
    assert generation.executor_steps == 11 and [len(tokens) for tokens in generation.tokens] == [12] * 4
