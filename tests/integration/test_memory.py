"""What the weights take: against the sizes of the release's own tensors."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specialized_decode.backbone.presets import CheckpointPlan
from specialized_decode.backbone.writer import flash_plan, plan_tensors, tiny_plan
from specialized_decode.integration.memory import (
    mixer_bytes,
    prepared_bytes,
    projection_bytes,
    shared_expert_bytes,
    weight_bytes,
)


def _text(plan: CheckpointPlan) -> Any:
    config: Any = plan.config
    return SimpleNamespace(**config["text_config"])


def _stored(plan: CheckpointPlan, *parts: str) -> int:
    """Bytes of the release's tensors whose names hold one of `parts`; the Engram tables are in host memory."""
    specs = plan_tensors(plan)
    return sum(
        spec.nbytes
        for name, spec in specs.items()
        if "engram.embed" not in name and (not parts or any(part in name for part in parts))
    )


@pytest.mark.parametrize("drafts", [0, 3])
def test_weights_are_a_little_less_than_what_is_stored(drafts: int) -> None:
    plan = flash_plan(drafts=drafts)
    stored = _stored(plan)
    assert 0.99 * stored < weight_bytes(_text(plan), 1, drafts) < stored


@pytest.mark.parametrize("plan", [flash_plan(), tiny_plan()], ids=["flash", "tiny"])
def test_prepared_weights_are_the_dense_ones(plan: CheckpointPlan) -> None:
    dense = (".wq_a.", ".wq_b.", ".wkv.", ".wo_a.", ".wo_b.", ".shared_experts.")
    stored = _stored(plan, *(f".attn{name}" for name in dense[:-1]), dense[-1], ".engram.wkv.", ".indexer.wq_b.")
    assert prepared_bytes(_text(plan), 1) == pytest.approx(stored, rel=1e-6)


def test_release_at_tp4() -> None:
    text = _text(flash_plan())
    assert 70e9 < weight_bytes(text, 4, 0) < 80e9
    assert prepared_bytes(text, 4) < 3e9


def test_every_rank_holds_the_first_projection() -> None:
    """wq_a, wkv and the indexers' queries are not split; the rest is, evenly."""
    text = _text(flash_plan())
    whole = (40 * (1280 + 512) * 5120 + 8 * 32 * 128 * 1280) * (1 + 1 / 1024)
    one, eight = prepared_bytes(text, 1), prepared_bytes(text, 8)
    assert 8 * (eight - whole) == pytest.approx(one - whole, rel=1e-6)


def test_mixers_of_the_boundary_kernels() -> None:
    """The same as the kernels' own count, which needs no GPU."""
    from specialized_decode.boundary.fused import bfloat16_pieces

    text = _text(tiny_plan())
    fn = torch.zeros(24, 4 * text.hidden_size)
    first = fn[:, : text.hidden_size].contiguous()
    kept = 2 * text.num_hidden_layers * bfloat16_pieces(fn).nbytes + first.nbytes + bfloat16_pieces(first).nbytes
    assert mixer_bytes(text) == kept


def test_projections_are_attentions_weights_once_more() -> None:
    """1.7 GB over 4 ranks, inside the 3 GB that prepared copies may take; the bytes that a layer itself counts."""
    from specialized_decode.attention.prepared import prepare_fp8

    text = _text(flash_plan())
    shapes = ((1792, 5120), (8192, 1280), (2048, 4096), (5120, 2048))
    indexers = 8 * 4096 * 1280
    expected = (40 * sum(n * k for n, k in shapes) + indexers) * (1 + 1 / 1024)
    assert projection_bytes(text, 4) == round(expected)
    n, k = shapes[2]
    copy = prepare_fp8(torch.zeros(n, k).to(torch.float8_e4m3fn), torch.zeros(n // 32, k // 32, dtype=torch.uint8))
    assert copy.words.nbytes + copy.scales.nbytes == n * k * (1 + 1 / 1024)


@pytest.mark.parametrize(
    ("switches", "dense", "shared", "projections", "mixers"),
    [
        ({}, False, True, True, True),
        ({"decode_prepared_weights": False}, False, False, False, True),
        ({"decode_kernels": False}, False, False, False, False),
        ({"decode_kernels": False, "decode_prepared_weights": False}, False, False, False, False),
        ({"decode_reference_ops": True, "decode_kernels": False}, True, False, False, False),
        ({"decode_kernels": ["boundary"]}, False, False, False, True),
        ({"decode_kernels": ["moe", "boundary"]}, False, True, False, True),
        ({"decode_kernels": ["attention"]}, False, False, True, False),
        ({"decode_reference_ops": True, "decode_kernels": True}, True, False, True, True),
    ],
)
def test_room_is_asked_for_what_is_kept(
    engine_config: Callable[..., Any],
    switches: dict[str, Any],
    dense: bool,
    shared: bool,
    projections: bool,
    mixers: bool,
) -> None:
    from specialized_decode.integration.facts import Deployment

    config = engine_config(additional_config={"decode_backend": "latency_specialized", **switches})
    text = config.model_config.hf_text_config
    expected = prepared_bytes(text, 1) * dense + mixer_bytes(text) * mixers + shared_expert_bytes(text, 1) * shared
    assert Deployment.gather(config).prepared == expected + projection_bytes(text, 1) * projections
