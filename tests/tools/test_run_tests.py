"""The totals of ./test."""

import json
from pathlib import Path
from typing import Any

from tools.run_tests import Totals, add_bazel_events, bazel_outputs

REPORT = """\
<testsuites><testsuite>
<testcase name="a"/>
<testcase name="b"><failure>no</failure></testcase>
<testcase name="c"><error>no</error></testcase>
<testcase name="d"><skipped/></testcase>
</testsuite></testsuites>
"""


def result(label: str, report: Path | None) -> str:
    outputs = [{"name": "test.log", "uri": "file:///log"}]
    if report is not None:
        outputs.append({"name": "test.xml", "uri": report.as_uri()})
    return json.dumps({"id": {"testResult": {"label": label}}, "testResult": {"testActionOutput": outputs}})


def summary(label: str, status: str | None) -> str:
    event: dict[str, Any] = {"id": {"testSummary": {"label": label}}}
    if status is not None:
        event["testSummary"] = {"overallStatus": status}
    return json.dumps(event)


def test_counts_cases(tmp_path: Path) -> None:
    report = tmp_path / "a folder" / "test.xml"
    report.parent.mkdir()
    report.write_text(REPORT)
    totals = Totals()
    totals.add("mypy", True)
    add_bazel_events(totals, [result("//tests/x:t", report), summary("//tests/x:t", "FAILED")])
    assert str(totals) == "2 passed, 2 failed, 1 skipped"
    assert totals.failures == ["//tests/x:t b", "//tests/x:t c"]


def test_cases_of_a_repeated_target_count_once(tmp_path: Path) -> None:
    report = tmp_path / "test.xml"
    report.write_text("<testsuite><testcase name='a'/></testsuite>")
    totals = Totals()
    add_bazel_events(totals, [result("//t", None), result("//t", report), summary("//t", "FLAKY")])
    assert str(totals) == "1 passed, 0 failed, 0 skipped"


def test_target_without_report_fails() -> None:
    """A target that ran out of time, one that was not built and one that was aborted."""
    totals = Totals()
    lines = [
        result("//a", None),
        summary("//a", "TIMEOUT"),
        summary("//b", "FAILED_TO_BUILD"),
        summary("//c", None),
    ]
    add_bazel_events(totals, lines)
    assert totals.failures == ["//a (TIMEOUT)", "//b (FAILED_TO_BUILD)", "//c (NO_STATUS)"]


def test_failure_that_the_report_does_not_show(tmp_path: Path) -> None:
    """A process that dies after its report was written."""
    report = tmp_path / "test.xml"
    report.write_text("<testsuite><testcase name='a'/></testsuite>")
    totals = Totals()
    add_bazel_events(totals, [result("//t", report), summary("//t", "FAILED")])
    assert str(totals) == "1 passed, 1 failed, 0 skipped"


def test_outputs_of_a_build() -> None:
    files = [{"name": "x.whl", "uri": "file:///out/x%20y.whl"}]
    lines = [json.dumps({"id": {}, "namedSetOfFiles": {"files": files}}), json.dumps({"id": {}})]
    assert list(bazel_outputs(lines)) == [Path("/out/x y.whl")]
