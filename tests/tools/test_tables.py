"""The tables of the docs are what the benchmarks' results say."""

import json
from pathlib import Path
from typing import Any

import pytest

from tools import tables

TIMES = {"median": 40.04, "q1": 39.0, "q3": 41.0}
RUN = {
    "rows": 2,
    "context": [7, 7],
    "steps": 9,
    "plain_ms": {"median": 50.0, "q1": 49.0, "q3": 51.0},
    "executor_ms": TIMES,
    "identical_tokens": 5,
    "tokens": 6,
}
RESULT: dict[str, Any] = {
    "benchmark": "speed",
    "commit": "0123456789abcdef-dirty",
    "model": "tiny",
    "layers": 3,
    "hidden_size": 64,
    "heads": 2,
    "expert_width": 32,
    "experts": 4,
    "device": "a CPU",
    "torch": "2.11.0",
    "peak_gb": 0.5,
    "runs": [RUN],
    "threads": 2,
    "load": [0.1, 1.9],
}
TABLE = """\
| rows | context | plain, ms a step | executor, ms a step | executor, steps/s | identical tokens |
| --- | --- | --- | --- | --- | --- |
| 2 | 7 | 50.0 (49.0 to 51.0) | 40.0 (39.0 to 41.0) | 25.0 | 5 of 6 |

Median (quartiles) of 9 steps. Model tiny: 3 layers, hidden size 64, 2 heads, 4 experts of width 32. \
a CPU, 2 threads, torch 2.11.0, load average 0.1 before and 1.9 after; peak memory 0.50 GB; \
commit 0123456789ab with uncommitted changes.
"""
PAGE = "before\n<!-- table: speed -->\n<!-- end -->\nafter\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / tables.RESULTS).mkdir(parents=True)
    (tmp_path / tables.RESULTS / "speed.json").write_text(json.dumps(RESULT))
    (tmp_path / "README.md").write_text(PAGE)
    return tmp_path


def test_this_checkout_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert tables.main(["--check"]) == 0, capsys.readouterr().err


def test_this_checkout_has_tables() -> None:
    assert any("<!-- table: " in page.read_text(encoding="utf-8") for page in tables.pages(tables.ROOT))


def test_table_of_a_cpu() -> None:
    assert tables.table(RESULT) == TABLE


def test_table_of_a_gpu_has_neither_threads_nor_load() -> None:
    runs = [RUN | {"context": [100], "plain_ms": TIMES | {"median": 7.384}}, RUN | {"rows": 8, "context": [100, 200]}]
    result = RESULT | {"device": "a GPU", "threads": None, "load": None, "commit": "0123456789abcdef", "runs": runs}
    lines = tables.table(result).splitlines()
    assert lines[2].startswith("| 2 | 100 | 7.38 (")
    assert lines[3].startswith("| 8 | 100, 200 |")
    assert "a GPU, torch 2.11.0; peak" in lines[5]
    assert lines[5].endswith("commit 0123456789ab.")


def test_table_of_requirements(root: Path) -> None:
    from specialized_decode.integration.config import REQUIREMENTS

    page = "<!-- table: requirements -->\n<!-- end -->\n"
    (root / "docs" / "operators.md").write_text(page)
    (root / "README.md").write_text(PAGE)
    tables.main([], root)
    lines = (root / "docs" / "operators.md").read_text().splitlines()
    assert len(lines) == 2 + 2 + len(REQUIREMENTS)
    for line, row in zip(lines[3:-1], REQUIREMENTS, strict=True):
        assert line == f"| {row.name} | {row.expected} | {row.why} | {row.remedy} |"
    (root / "docs" / "operators.md").write_text("\n".join(lines).replace("PyTorch", "pytorch"))
    assert tables.main(["--check"], root) == 1


def test_stale_page_is_found_and_rewritten(root: Path) -> None:
    assert tables.main(["--check"], root) == 1
    assert (root / "README.md").read_text() == PAGE
    assert tables.main([], root) == 0
    assert (root / "README.md").read_text() == f"before\n<!-- table: speed -->\n{TABLE}<!-- end -->\nafter\n"
    assert tables.main(["--check"], root) == 0


def test_new_numbers_make_a_page_stale(root: Path) -> None:
    tables.main([], root)
    (root / tables.RESULTS / "speed.json").write_text(json.dumps(RESULT | {"peak_gb": 0.6}))
    assert tables.main(["--check"], root) == 1


def test_result_on_no_page(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables.main([], root)
    (root / tables.RESULTS / "other.json").write_text(json.dumps(RESULT))
    assert tables.main(["--check"], root) == 1
    assert "other.json: shown on no page" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("<!-- table: speed -->\n", "README.md: found a table marker without its partner"),
        ("<!-- end -->\n", "README.md: found a table marker without its partner"),
        ("<!-- table: speed -->\n<!-- table: speed -->\n<!-- end -->\n", "README.md: found a table marker"),
        ("<!-- table: none -->\n<!-- end -->\n", "README.md: found a table of none.json"),
    ],
)
def test_bad_page(root: Path, capsys: pytest.CaptureFixture[str], page: str, message: str) -> None:
    (root / "README.md").write_text(page)
    assert tables.main(["--check"], root) == 1
    assert message in capsys.readouterr().err


def test_result_without_a_key(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / tables.RESULTS / "speed.json").write_text(json.dumps({**RESULT, "runs": [{"rows": 1}]}))
    assert tables.main(["--check"], root) == 1
    assert "speed.json: found no 'context'" in capsys.readouterr().err


BOUNDARY_RUN: dict[str, Any] = {
    "rows": 1,
    "ranks": 1,
    "us": {"boundary": TIMES | {"median": 4.1, "q1": 4.0, "q3": 4.2}, "stock": TIMES},
    "step_cost_us": {"side": 12.34},
    "commit": "0123456789abcdef",
    "torch": "2.11.0",
    "vllm": "0.33.0",
    "replays": 30,
}
BOUNDARY = {"kind": "boundary", "device": "a GPU", "hidden_size": 64, "chain": 160}


def test_table_of_projections() -> None:
    run = {**BOUNDARY_RUN, "us": {"wq_b, kernel": TIMES}, "step_cost_us": {}, "vllm": None}
    assert tables.table({**BOUNDARY, "unit": "projection", "runs": [run]}) == (
        "| us a projection, 1 GPU | 1 rows |\n"
        "| --- | --- |\n"
        "| wq_b, kernel | 40.0 (39.0 to 41.0) |\n"
        "\n"
        "Median (quartiles) of 30 replays of graphs of 160 projections, hidden size 64. a GPU, torch 2.11.0; "
        "commit 0123456789ab.\n"
    )


def test_table_of_boundaries() -> None:
    others = {"rows": 8, "us": {"boundary": TIMES}, "step_cost_us": {}}
    two = {"ranks": 2, "vllm": None}
    runs = [BOUNDARY_RUN, {**BOUNDARY_RUN, **others}, {**BOUNDARY_RUN, **others, **two}]
    assert tables.table({**BOUNDARY, "runs": runs}) == (
        "| us a boundary, 1 GPU | 1 rows | 8 rows |\n"
        "| --- | --- | --- |\n"
        "| boundary | 4.10 (4.00 to 4.20) | 40.0 (39.0 to 41.0) |\n"
        "| stock | 40.0 (39.0 to 41.0) |  |\n"
        "| coefficients side: us more a step of 80 sublayers | 12.3 |  |\n"
        "\n"
        "Median (quartiles) of 30 replays of graphs of 160 boundaries, hidden size 64. a GPU, torch 2.11.0, "
        "vLLM 0.33.0; commit 0123456789ab.\n"
        "\n"
        "| us a boundary, 2 GPUs | 8 rows |\n"
        "| --- | --- |\n"
        "| boundary | 40.0 (39.0 to 41.0) |\n"
        "\n"
        "Median (quartiles) of 30 replays of graphs of 160 boundaries, hidden size 64. a GPU, torch 2.11.0; "
        "commit 0123456789ab.\n"
    )


@pytest.mark.parametrize(
    ("more", "of"), [({}, "The same commit"), ({"timeline_commit": "fedcba9876543210"}, "Commit fedcba987654")]
)
def test_timeline(more: dict[str, str], of: str) -> None:
    """Of the run's commit, or of its own."""
    kernels = [{"kernel": "void mix<4>(float*)", "stream": 7, "start_us": 0.0, "end_us": 3.14159}]
    assert tables.table({**BOUNDARY, "runs": [{**BOUNDARY_RUN, "timeline": kernels, **more}]}).endswith(
        "| kernel, 1 rows | start, us | end, us |\n"
        "| --- | --- | --- |\n"
        "| `mix` | 0.00 | 3.14 |\n"
        "\n"
        f"{of}: kernels of *sublayer, coefficients side* by a profiler, which slows them a little.\n"
    )


def test_table_that_waits_for_its_result(root: Path) -> None:
    page = "<!-- table: later, once measured -->\n<!-- end -->\n"
    (root / "README.md").write_text(page + PAGE)
    tables.main([], root)
    assert (root / "README.md").read_text().startswith(page)
    (root / tables.RESULTS / "later.json").write_text(json.dumps({**BOUNDARY, "runs": [BOUNDARY_RUN]}))
    assert tables.main(["--check"], root) == 1
    assert tables.main([], root) == 0
    assert "| us a boundary, 1 GPU | 1 rows |" in (root / "README.md").read_text()
    assert tables.main(["--check"], root) == 0


def test_attention_and_moe_tables() -> None:
    """A column a row count, and a row a run; what a run lacks stays empty."""
    step = {"kind": "attention_step", "commit": "0123456789abcdef", "device": "a GPU", "torch": "2.11", "ranks": 4}
    runs = [{"rows": 1, "us": {"kernels": TIMES}}, {"rows": 8, "us": {"kernels": TIMES, "reference ops": TIMES}}]
    found = tables.table(step | {"context": 8192, "replays": 30, "runs": runs})
    assert found.splitlines()[0] == "| us a layer | 1 rows | 8 rows |"
    assert found.splitlines()[3] == "| reference ops |  | 40.0 (39.0 to 41.0) |"
    assert "30 replays, context 8192, a rank of 4. a GPU, torch 2.11; commit 0123456789ab." in found
    run = {"width": 576, "rows": 4, "routing": "random", "distinct_experts": 23.2, "mb": 122.1, "of_bandwidth": 0.616}
    moe = {"kind": "moe", "commit": "0123456789abcdef", "device": "a GPU", "torch": "2.11", "layers": 8, "experts": 384}
    found = tables.table(moe | {"hidden_size": 5120, "runs": [run | {"us": {"kernels": TIMES, "stock": TIMES}}]})
    assert found.splitlines()[0] == "| width | routing | rows | experts | MB | of bandwidth | kernels, us | stock, us |"
    assert found.splitlines()[2].startswith("| 576 | random | 4 | 23.2 | 122.1 | 62% | 40.0 (39.0 to 41.0) |")
