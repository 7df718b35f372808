"""From the record of tests/gpu/vllm_one_gpu.py to a result and its table."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.attention_vllm import PHASES, SIDES, convert, main
from tests.gpu import attention_phases
from tools import tables

COUNTS = {"reader": 30, "consumer": 4, "source": 4, "window": 2}
# The whole graph, then without one kind more each.
TIMES = {
    "vLLM": (6600.0, 4200.0, 3700.0, 3300.0, 3200.0),
    "executor": (3200.0, 2300.0, 2140.0, 1980.0, 1930.0),
    "executor's step": (3600.0, 2850.0, 2730.0, 2610.0, 2570.0),
}


def results(**changes: Any) -> dict[str, Any]:
    """As the job's phases leave them: their own functions make the record."""
    sides = {
        side: attention_phases.side_record([[time] * 4 for time in times], COUNTS) for side, times in TIMES.items()
    }
    engine = attention_phases.spread([3605.0] * 4)
    runs = [{"rows": r, "context": c, "sides": sides, "engine_us": engine} for r, c in attention_phases.SHAPES]
    data = {phase: {} for phase in PHASES} | {
        "start": {"device": "a GPU", "torch": "2.11.0", "vllm": "0.33.0"},
        "attention": {"layers": COUNTS, "replays": 100, "runs": runs},
    }
    records = [{"engine": "attention", "phase": phase, "ok": True, "data": data[phase]} for phase in PHASES]
    return {"commit": "0123456789abcdef", "records": records, **changes}


def test_sides_are_those_of_the_job() -> None:
    assert tuple(SIDES.values()) == attention_phases.SIDES


def test_result_and_table(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps(results()))
    arguments = [str(tmp_path / "results.json"), "--name", "attention_vllm_x", "--out", str(tmp_path)]
    run = CliRunner().invoke(main, arguments)
    assert (run.exit_code, run.stdout.splitlines()[0]) == (0, "1 rows, context 300, reader: 80.0 us, 30.0 us")
    result = tables.load(tmp_path / "attention_vllm_x.json", "page")
    assert (result["heads"], result["layers"], result["runs"][0]["engine_us"]["median"]) == (16, 40, 3605.0)
    lines = tables.table(result).splitlines()
    assert lines[0] == "| rows | context | us | vLLM | executor | executor, as steps run | vLLM / executor |"
    assert lines[2] == (
        "| 1 | 300 | a layer: reader | 80.0 (80.0 to 80.0) | 30.0 (30.0 to 30.0) | 25.0 (25.0 to 25.0) | 2.67 |"
    )
    assert lines[-3] == (
        "| 16 | 8192 | the graph without attention | 3200.0 (3200.0 to 3200.0) | 1930.0 (1930.0 to 1930.0) "
        "| 2570.0 (2570.0 to 2570.0) | 1.66 |"
    )
    assert len(lines) == 2 + len(attention_phases.SHAPES) * 6 + 2
    assert "40 layers (30 reader, 4 consumer, 4 source, 2 window), 16 heads" in lines[-1]


@pytest.mark.parametrize("phase", PHASES)
def test_what_did_not_pass_gives_no_result(tmp_path: Path, phase: str) -> None:
    whole = results()["records"]
    failed = [record | {"ok": record["phase"] != phase} for record in whole]
    absent = [record for record in whole if record["phase"] != phase]
    for given in (failed, absent):
        with pytest.raises(ValueError, match=f"attention: found no {phase} that passed"):
            convert(results(records=given), "x", 40, 384, 4)
    (tmp_path / "results.json").write_text(json.dumps(results(records=absent)))
    run = CliRunner().invoke(main, [str(tmp_path / "results.json"), "--name", "x", "--out", str(tmp_path)])
    assert run.exit_code == 1
    assert not (tmp_path / "x.json").exists()
