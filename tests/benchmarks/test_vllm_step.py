"""From the record of tests/gpu/vllm_one_gpu.py to a result and its table."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.vllm_step import convert, main
from tools import tables


def records(engine: str, milliseconds: float) -> list[dict[str, Any]]:
    start = {"device": "a GPU", "torch": "2.11.0", "vllm": "0.33.0", "seconds": 61.4, "other_gb": 101.5}
    step = {"median": milliseconds, "q1": milliseconds - 0.1, "q3": milliseconds + 0.1}
    shape = {"step_ms": step, "graph_ms": {key: value / 2 for key, value in step.items()}, "steps": 240}
    phases = {"start": start, "times": {"1x300": shape, "8x300": shape}}
    return [{"engine": engine, "phase": phase, "ok": True, "data": data} for phase, data in phases.items()]


def results(**changes: Any) -> dict[str, Any]:
    whole = records("times-stock", 7.4) + records("times-executor", 3.7)
    return {"commit": "0123456789abcdef", "records": whole, **changes}


def test_result_and_table(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps(results()))
    run = CliRunner().invoke(main, [str(tmp_path / "results.json"), "--name", "vllm_step_x", "--out", str(tmp_path)])
    assert (run.exit_code, run.stdout.splitlines()[0]) == (0, "1 rows: 7.400 ms, 3.700 ms, 2.000x")
    result = tables.load(tmp_path / "vllm_step_x.json", "page")
    assert (result["heads"], result["expert_width"], result["layers"]) == (16, 576, 40)
    lines = tables.table(result).splitlines()
    assert lines[0] == (
        "| rows | context | vLLM, ms a step | executor, ms a step | speed "
        "| vLLM, ms, graph alone | executor, ms, graph alone | speed |"
    )
    assert lines[3] == (
        "| 8 | 300 | 7.40 (7.30 to 7.50) | 3.70 (3.60 to 3.80) | 2.00x "
        "| 3.70 (3.65 to 3.75) | 1.85 (1.80 to 1.90) | 2.00x |"
    )
    assert (
        "Start-up 61 s and 61 s, GPU memory beside the KV cache 101.5 GB and 101.5 GB. a GPU, torch 2.11.0, vLLM 0.33.0"
        in lines[5]
    )


@pytest.mark.parametrize(("engine", "phase"), [("times-stock", "start"), ("times-executor", "times")])
def test_what_did_not_pass_gives_no_result(tmp_path: Path, engine: str, phase: str) -> None:
    whole = results()["records"]
    failed = [
        {**record, "ok": False} if (record["engine"], record["phase"]) == (engine, phase) else record
        for record in whole
    ]
    absent = [record for record in whole if (record["engine"], record["phase"]) != (engine, phase)]
    for given in (failed, absent):
        with pytest.raises(ValueError, match=f"{engine}: found no {phase} that passed"):
            convert(results(records=given), "x", 40, 384, 4)
    (tmp_path / "results.json").write_text(json.dumps(results(records=absent)))
    run = CliRunner().invoke(main, [str(tmp_path / "results.json"), "--name", "x", "--out", str(tmp_path)])
    assert run.exit_code == 1
    assert not (tmp_path / "x.json").exists()
