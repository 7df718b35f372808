"""Which layers the kernels serve, and how launches are cut."""

from typing import Any

import pytest
import torch

from specialized_decode.moe import RoutedExpertGemms, tuning
from specialized_decode.moe.expert_layout import round_up
from specialized_decode.moe.select import unfit, unsupported
from tests.helpers.held_moe import Linear, held_moe

WIDTHS = (2304, 1152, 576, 288)


def test_a_right_layer() -> None:
    assert unfit(held_moe(0, 16, 256, 64)) is None


def test_a_machine_without_a_gpu() -> None:
    ffn = held_moe(0, 16, 256, 64)
    assert unsupported(ffn) == "device: found cpu, expected cuda"
    assert RoutedExpertGemms.refusal(ffn) == "experts are in the form of HUMMING, expected the checkpoint's"


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("gate", Linear(torch.zeros(16, 256)), "gate: found torch.float32 [16, 256], expected bfloat16"),
        ("gate", Linear(torch.zeros(24, 256).bfloat16()), "gate: found torch.bfloat16 [24, 256], expected bfloat16"),
        ("topk", 9, "topk: found 9, expected at most 8"),
        ("limit", 256.0, "swiglu_limit: found 256.0, expected one whose square is below 65504"),
        ("limit", 0.0, "swiglu_limit: found 0.0"),
        ("shared_up", Linear(torch.zeros(128, 256).bfloat16()), "shared expert's up: found torch.bfloat16"),
        (
            "shared_up",
            Linear(torch.zeros(96, 256).to(torch.float8_e4m3fn), torch.zeros(4, 8, dtype=torch.uint8)),
            "shared expert's up: found [96, 256], expected [128, 256]",
        ),
        ("bias", torch.zeros(16, 2)[:, 0], "bias: found strides (2,), expected contiguous rows"),
    ],
)
def test_refusals(name: str, value: Any, reason: str) -> None:
    ffn = held_moe(0, 16, 256, 64)
    setattr(ffn, name, value)
    found = unfit(ffn)
    assert found is not None and found.startswith(reason)


def test_experts_in_another_form() -> None:
    ffn = held_moe(0, 16, 256, 64)
    ffn.experts.w13 = ffn.experts.w13[:, :-1]
    found = unfit(ffn)
    assert found is not None and found.startswith("w13_weight is int32 [16, 3, 2048], expected int32 [16, 4, 2048]")
    del ffn.experts.w2_scale_2
    assert unfit(ffn) == "routed experts: found no weight_scale_2"


def test_hidden_sizes_that_do_not_divide() -> None:
    # Six blocks for four warps.
    assert unfit(held_moe(0, 16, 192, 64)) == "hidden size: found 192, expected a multiple of 128"


@pytest.mark.parametrize("hidden", [256, 1280, 5120, 7168])
def test_the_gates_columns_are_covered(hidden: int) -> None:
    cut = tuning.front(hidden)
    assert cut is not None and cut.splits * cut.blocks * tuning.FRONT_WARPS * tuning.BLOCK == hidden
    assert 1 <= cut.blocks <= tuning.FRONT_BLOCKS


@pytest.mark.parametrize("rows", range(1, 9))
@pytest.mark.parametrize("hidden", [128, 256, 1280, 5120, 7168])
def test_the_first_gemms_columns_are_covered(hidden: int, rows: int) -> None:
    cut = tuning.up(hidden, rows)
    assert (
        cut is not None and hidden % (64 * cut.warps * cut.tiles) == 0 and hidden % (32 * cut.warps * cut.blocks) == 0
    )


@pytest.mark.parametrize("rows", range(1, 9))
@pytest.mark.parametrize("hidden", [128, 256, 5120])
@pytest.mark.parametrize("width", [*WIDTHS, 32, 96])
def test_the_second_gemms_outputs_and_columns_are_covered(width: int, hidden: int, rows: int) -> None:
    cut = tuning.down(hidden, width, rows)
    assert round_up(width, 64) // 64 % cut.tiles == 0 and width // 32 % cut.blocks == 0
    assert hidden % (16 * cut.warps * cut.repeat) == 0


def test_numbers_of_the_release() -> None:
    assert tuning.front(5120) == (5, 8)
    assert [tuning.up(5120, rows) for rows in (1, 4, 8)] == [(4, 4, 8), (2, 4, 8), (1, 4, 8)]
    assert [tuning.down(5120, width, 1) for width in WIDTHS] == [(4, 3, 6, 1), (4, 3, 6, 1), (4, 9, 9, 1), (4, 5, 9, 1)]
    assert [tuning.down(5120, width, 8) for width in WIDTHS] == [(4, 3, 3, 1)] * 3 + [(4, 5, 3, 1)]
    assert tuning.activation_scale(10.0) == 512.0


@pytest.mark.parametrize("limit", [0.5, 1.0, 7.0, 10.0, 255.0])
def test_activations_stay_within_float16(limit: float) -> None:
    assert 65504 / 2 <= tuning.activation_scale(limit) * limit**2 < 65504
