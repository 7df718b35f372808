"""The MoE kernels, run on the CPU by tests.helpers.emulated_kernels, against float64."""

import math

import pytest
import torch
from torch import Tensor

from specialized_decode.boundary import UnfinalizedRows
from specialized_decode.moe import fused as launcher
from specialized_decode.moe import reference
from specialized_decode.moe.fused import FusedMoE, Routing
from specialized_decode.moe.kernels import experts, fragments, front, route
from specialized_decode.moe.select import unfit
from tests.helpers.emulated_kernels import Emulated, emulate
from tests.helpers.held_moe import TOPK, HeldMoE, exact_logits, exact_rows, exact_shared, held_moe, inputs

HIDDEN, EXPERTS = 256, 32
# As TP 8's, which ends within a tile of 64 columns; a whole number of tiles; more than one chunk of them.
WIDTHS = (96, 64, 640)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Emulated]:
    torch.set_num_threads(1)
    found = emulate(monkeypatch, launcher, (fragments, front, route, experts))
    assert found.keys() == {"front_kernel", "route_kernel", "up_kernel", "down_kernel"}
    # Fresh tensors hold NaN.
    torch.use_deterministic_algorithms(True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    return found


@pytest.fixture(autouse=True)
def deterministic_no_more() -> object:
    yield
    torch.use_deterministic_algorithms(False)


def run(ffn: HeldMoE, x: Tensor, ids: Tensor) -> tuple[Routing, UnfinalizedRows]:
    assert unfit(ffn) is None
    moe = FusedMoE(ffn)
    routing = moe.route(x, ids)
    assert not moe._arrived.any()
    return routing, moe.down(routing, moe.up(routing))


def assert_rounded(found: Tensor, exact: Tensor) -> None:
    """bfloat16 of what float16 rounds in between: no error far above bfloat16's own."""
    best = exact.bfloat16().double()
    assert found.dtype == torch.bfloat16 and found.shape == exact.shape
    ours, least = (found.double() - exact).norm(), (best - exact).norm()
    assert ours <= 1.1 * least, f"found an error of {ours:g}, a rounding of the exact value has {least:g}"


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("width", WIDTHS)
def test_values(width: int, rows: int) -> None:
    ffn = held_moe(width + rows, EXPERTS, HIDDEN, width)
    x, ids = inputs(rows, rows, HIDDEN)
    routing, out = run(ffn, x, ids)
    chosen, weights = reference.select_experts(
        exact_logits(ffn, x).float(), ffn.bias, ffn.image_bias, ids, TOPK, ffn.scaling
    )
    assert torch.equal(routing.ids.long(), chosen)
    torch.testing.assert_close(out.weights, weights, rtol=1e-5, atol=1e-6)
    assert_rounded(out.rows, exact_rows(ffn, x, chosen))
    assert_rounded(out.shared, exact_shared(ffn, x))
