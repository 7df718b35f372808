"""Each gate of a step, at its edges."""

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest

from specialized_decode.runtime import FUSED_MHC_MAX_ROWS, DecodeStep, SpecializedDecode, step_gates
from specialized_decode.runtime.tuning import GATES, GateRows

# A gate of the step and what closes it: a field of the GPU family's table, or the host's threshold.
LIMITS = {
    "side_stream": "mhc_overlap",
    "low_batch": "low_batch",
    "overlap_inputs": "multi_stream_threshold",
    "overlap_candidates": "overlap",
    "engram_prefetch": "engram_prefetch",
}
OPEN = {field.name: FUSED_MHC_MAX_ROWS for field in dataclasses.fields(GateRows)}


def executor(threshold: int = FUSED_MHC_MAX_ROWS, **gates: int) -> SpecializedDecode:
    """What step_gates reads of an executor; gates that are not given stay open."""
    made = SimpleNamespace(
        gates=GateRows(**(OPEN | gates)), host=SimpleNamespace(multi_stream_threshold=threshold), config=None
    )
    return cast(SpecializedDecode, made)


def gates_of(step: DecodeStep) -> dict[str, bool]:
    return {gate: getattr(step, gate) for gate in LIMITS}


@pytest.mark.parametrize("limit", [0, 1, 2, 8, 48, 383, 384, 1024])
@pytest.mark.parametrize("gate", LIMITS)
def test_edges(gate: str, limit: int) -> None:
    """Open up to and with its limit, closed from one row more on, and no other gate moves with it."""
    field = LIMITS[gate]
    limits: dict[str, Any] = {"threshold" if field == "multi_stream_threshold" else field: limit}
    for rows in (limit - 1, limit, limit + 1):
        if not 0 < rows <= FUSED_MHC_MAX_ROWS:
            continue
        step = step_gates(rows, executor(**limits))
        assert gates_of(step) == dict.fromkeys(LIMITS, True) | {gate: rows <= limit}
        assert step.rows == rows


@pytest.mark.parametrize("rows", [1, 8, 9, 48, 49, 383, 384])
def test_a_closed_gate_stays_closed(rows: int) -> None:
    nothing = executor(0, **dict.fromkeys(OPEN, 0))
    assert gates_of(step_gates(rows, nothing)) == dict.fromkeys(LIMITS, False)


@pytest.mark.parametrize("rows", [-1, 0, FUSED_MHC_MAX_ROWS + 1, 1 << 20])
def test_out_of_range(rows: int) -> None:
    with pytest.raises(ValueError, match=f"found {rows} rows, expected 1 to 384"):
        step_gates(rows, executor())


def test_the_step_names_its_executor() -> None:
    made = executor()
    assert step_gates(1, made).executor is made


def test_the_step_hands_the_layers_to_its_executor() -> None:
    ran: list[tuple[Any, ...]] = []
    made = executor()

    def run(*arguments: Any) -> str:
        ran.append(arguments)
        return "output"

    cast(Any, made).run = run
    step = step_gates(3, made)
    assert cast(Any, step).run("x", "positions", "ids", "hashes", "mask") == "output"
    assert ran == [(step, "x", "positions", "ids", "hashes", "mask")]


def test_equal_row_counts_give_equal_steps() -> None:
    made = executor()
    assert step_gates(5, made) == step_gates(5, made)
    assert step_gates(5, made) != step_gates(6, made)


@pytest.mark.parametrize("family", GATES)
def test_every_family_has_sane_limits(family: str) -> None:
    """Limits that a step can meet."""
    for name, rows in vars(GATES[family]).items():
        assert 0 <= rows <= FUSED_MHC_MAX_ROWS, name


def test_families() -> None:
    assert set(GATES) == {"cpu", "hopper", "blackwell"}
    assert FUSED_MHC_MAX_ROWS == 384
