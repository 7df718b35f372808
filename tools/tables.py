"""The tables of README.md and docs/*.md, made from benchmarks/results/*.json.

`python -m tools.tables` rewrites what stands between `<!-- table: NAME -->` and `<!-- end -->` from NAME.json, and the
table `requirements` from the rows of integration/config.py; with --check it changes nothing and exits with 1 where a
page is stale. benchmarks/results.py defines the files' form, benchmarks/boundary.py, benchmarks/vllm_step.py and
benchmarks/attention_vllm.py those of their own. `<!-- table: NAME, once measured -->` stays empty while there is no
NAME.json.
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).absolute().parent.parent
RESULTS = Path("benchmarks", "results")

_BLOCK = re.compile(
    r"(<!-- table: (?P<name>[\w-]+)(?P<open>, once measured)? -->\n)(?P<table>.*?)(?P<end><!-- end -->)", re.DOTALL
)
# The one table that is not made from a result.
_REQUIREMENTS = "requirements"
_MARKER = re.compile(r"<!-- (?:table:|end -->)")

# Heading of a column and its text for one run of one result.
_COLUMNS: tuple[tuple[str, Callable[[dict[str, Any], dict[str, Any]], str]], ...] = (
    ("rows", lambda result, run: str(run["rows"])),
    ("context", lambda result, run: ", ".join(str(length) for length in _distinct(run["context"]))),
    ("plain, ms a step", lambda result, run: _times(run["plain_ms"])),
    ("executor, ms a step", lambda result, run: _times(run["executor_ms"])),
    ("executor, steps/s", lambda result, run: f"{1e3 / run['executor_ms']['median']:.1f}"),
    ("identical tokens", lambda result, run: f"{run['identical_tokens']} of {run['tokens']}"),
)


class TableError(ValueError):
    """A page or a result that no table can be made of; the message names it."""


def requirements_table() -> str:
    """The Markdown of the deployment check: a row a requirement."""
    from specialized_decode.integration.config import REQUIREMENTS

    lines = [["requirement", "expected", "why", "how to satisfy it"], ["---"] * 4]
    lines += [[row.name, row.expected, row.why, row.remedy] for row in REQUIREMENTS]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def pages(root: Path) -> list[Path]:
    """The pages that may hold tables."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def table(result: dict[str, Any]) -> str:
    """The Markdown of one result: a row a run, and below it what ran on what."""
    if result.get("kind") == "boundary":
        return _boundary_table(result)
    if result.get("kind") == "vllm_step":
        return _vllm_table(result)
    if result.get("kind") in ("attention_step", "attention_mla"):
        return _attention_table(result)
    if result.get("kind") == "attention_vllm":
        return _attention_vllm_table(result)
    if result.get("kind") == "moe":
        return _moe_table(result)
    rows = [[text(result, run) for _, text in _COLUMNS] for run in result["runs"]]
    lines = [[heading for heading, _ in _COLUMNS], ["---"] * len(_COLUMNS), *rows]
    steps = ", ".join(str(count) for count in _distinct([run["steps"] for run in result["runs"]]))
    where = [result["device"], f"torch {result['torch']}"]
    if result["threads"] is not None:
        where.insert(1, f"{result['threads']} threads")
    if result["load"] is not None:
        where.append("load average {} before and {} after".format(*result["load"]))
    model = (
        f"{result['model']}: {result['layers']} layers, hidden size {result['hidden_size']}, {result['heads']} heads, "
        f"{result['experts']} experts of width {result['expert_width']}"
    )
    said = (
        f"Median (quartiles) of {steps} steps. Model {model}. {', '.join(where)}; "
        f"peak memory {result['peak_gb']:.2f} GB; commit {_short(result['commit'])}."
    )
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + f"\n\n{said}\n"


def _boundary_table(result: dict[str, Any]) -> str:
    """The Markdown of benchmarks/boundary.py's result, or of benchmarks/attention.py's: a table for each number of
    ranks, a column a row count."""
    unit = result.get("unit", "boundary")
    plural = {"boundary": "boundaries"}.get(unit, f"{unit}s")
    blocks = []
    for ranks in _distinct([run["ranks"] for run in result["runs"]]):
        runs = [run for run in result["runs"] if run["ranks"] == ranks]
        labels = list(dict.fromkeys(label for run in runs for label in run["us"]))
        lines = [[f"us a {unit}, {_ranks(ranks)}", *(f"{run['rows']} rows" for run in runs)]]
        lines.append(["---"] * len(lines[0]))
        for label in labels:
            lines.append([label, *(_times(run["us"][label]) if label in run["us"] else "" for run in runs)])
        for mode in dict.fromkeys(mode for run in runs for mode in run.get("step_cost_us", ())):
            costs = [run.get("step_cost_us", {}).get(mode) for run in runs]
            texts = ["" if cost is None else f"{cost:.1f}" for cost in costs]
            lines.append([f"coefficients {mode}: us more a step of 80 sublayers", *texts])
        paths = [run.get("critical_path_us") for run in runs]
        if any(path is not None for path in paths):
            texts = ["" if path is None else f"{path:.2f}" for path in paths]
            lines.append(["sublayer, coefficients none, less no boundary", *texts])
        first = runs[0]
        versions = [result["device"], f"torch {first['torch']}"] + ([f"vLLM {first['vllm']}"] if first["vllm"] else [])
        said = (
            f"Median (quartiles) of {first['replays']} replays of graphs of {result['chain']} {plural}, hidden size "
            f"{result['hidden_size']}. {', '.join(versions)}; commit {_short(first['commit'])}."
        )
        blocks.append("\n".join("| " + " | ".join(cells) + " |" for cells in lines) + f"\n\n{said}\n")
        if "timeline" in first:
            blocks.append(_timeline(first))
    return "\n".join(blocks)


def _timeline(run: dict[str, Any]) -> str:
    """The Markdown of the kernels around a few sublayers, in the order of their start."""
    lines = [[f"kernel, {run['rows']} rows", "start, us", "end, us"], ["---"] * 3]
    for kernel in run["timeline"]:
        name = re.split("[<(]", kernel["kernel"].removeprefix("void "))[0]
        lines.append([f"`{name}`", f"{kernel['start_us']:.2f}", f"{kernel['end_us']:.2f}"])
    commit = run.get("timeline_commit", run["commit"])
    of = "The same commit" if commit == run["commit"] else f"Commit {_short(commit)}"
    said = f"{of}: kernels of *sublayer, coefficients side* by a profiler, which slows them a little."
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + f"\n\n{said}\n"


def _vllm_table(result: dict[str, Any]) -> str:
    """The Markdown of benchmarks/vllm_step.py's result: whole steps and graphs alone, and how much faster they are."""
    clocks = {"step_ms": "ms a step", "graph_ms": "ms, graph alone"}
    headings = ["rows", "context"]
    for unit in clocks.values():
        headings += [f"vLLM, {unit}", f"executor, {unit}", "speed"]
    lines = [headings, ["---"] * len(headings)]
    for run in result["runs"]:
        cells = [str(run["rows"]), str(run["context"])]
        for clock in clocks:
            stock, executor = run["stock"][clock], run["executor"][clock]
            cells += [_times(stock), _times(executor), f"{stock['median'] / executor['median']:.2f}x"]
        lines.append(cells)
    start, memory = result["start_up_seconds"], result["other_gb"]
    steps = ", ".join(str(count) for count in _distinct([run["steps"] for run in result["runs"]]))
    said = (
        f"Median (quartiles) of {steps} steps, two engines one after another. {result['layers']} layers, "
        f"{result['heads']} heads, {result['experts']} experts of width {result['expert_width']}, made-up weights. "
        f"Start-up {start['stock']:.0f} s and {start['executor']:.0f} s, GPU memory beside the KV cache "
        f"{memory['stock']:.1f} GB and {memory['executor']:.1f} GB. {result['device']}, torch {result['torch']}, "
        f"vLLM {result['vllm']}; commit {_short(result['commit'])}."
    )
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + f"\n\n{said}\n"


def _attention_table(result: dict[str, Any]) -> str:
    """The Markdown of benchmarks/attention_step.py's and attention_mla.py's results: a column a row count."""
    runs = result["runs"]
    lines = [["us a layer", *(f"{run['rows']} rows" for run in runs)], ["---"] * (len(runs) + 1)]
    for label in dict.fromkeys(label for run in runs for label in run["us"]):
        lines.append([label, *(_times(run["us"][label]) if label in run["us"] else "" for run in runs)])
    heads = f", {result['heads']} heads" if "heads" in result else f", a rank of {result['ranks']}"
    said = (
        f"Median (quartiles) of {result['replays']} replays, context {result['context']}{heads}. {result['device']}, "
        f"torch {result['torch']}; commit {_short(result['commit'])}."
    )
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + f"\n\n{said}\n"


def _attention_vllm_table(result: dict[str, Any]) -> str:
    """The Markdown of benchmarks/attention_vllm.py's result: a row a kind of layer and batch shape, then the graph."""
    sides = {"stock": "vLLM", "executor": "executor", "step": "executor, as steps run"}
    headings = ["rows", "context", "us", *sides.values(), "vLLM / executor"]
    lines = [headings, ["---"] * len(headings)]
    for run in result["runs"]:
        parts = {f"a layer: {kind}": ("layer_us", kind) for kind in result["counts"]}
        parts |= {"the graph": ("graph_us", None), "the graph without attention": ("rest_us", None)}
        for label, (name, kind) in parts.items():
            times = [run[side][name] if kind is None else run[side][name][kind] for side in sides]
            speed = times[0]["median"] / times[1]["median"]
            lines.append([str(run["rows"]), str(run["context"]), label, *map(_times, times), f"{speed:.2f}"])
    counts = ", ".join(f"{count} {kind}" for kind, count in result["counts"].items())
    said = (
        f"Median (quartiles) of {result['replays']} replays of each graph, in turn, one engine. {result['layers']} "
        f"layers ({counts}), {result['heads']} heads, made-up weights. {result['device']}, torch {result['torch']}, "
        f"vLLM {result['vllm']}; commit {_short(result['commit'])}."
    )
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + f"\n\n{said}\n"


def _moe_table(result: dict[str, Any]) -> str:
    """The Markdown of benchmarks/moe.py's result: a row a run."""
    parts = list(dict.fromkeys(label for run in result["runs"] for label in run["us"]))
    lines = [["width", "routing", "rows", "experts", "MB", "of bandwidth", *(f"{part}, us" for part in parts)]]
    lines.append(["---"] * len(lines[0]))
    for run in result["runs"]:
        cells = [str(run["width"]), run["routing"], str(run["rows"]), f"{run['distinct_experts']:g}", f"{run['mb']:g}"]
        cells.append(f"{run['of_bandwidth']:.0%}")
        lines.append([*cells, *(_times(run["us"][part]) if part in run["us"] else "" for part in parts)])
    said = (
        f"Median (quartiles) of graph replays over {result['layers']} layers of {result['experts']} experts, "
        f"hidden size {result['hidden_size']}. {result['device']}, torch {result['torch']}; "
        f"commit {_short(result['commit'])}."
    )
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + f"\n\n{said}\n"


def _ranks(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def filled(text: str, page: str, results: Path) -> str:
    """A page's text with every table made anew. Raises TableError for a marker or a result that is not as expected."""

    def fill(match: re.Match[str]) -> str:
        if match["name"] == _REQUIREMENTS:
            return match[1] + requirements_table() + match["end"]
        path = results / f"{match['name']}.json"
        if match["open"] and not path.is_file():
            return match[1] + match["end"]
        return match[1] + table(load(path, page)) + match["end"]

    if len(_MARKER.findall(text)) != 2 * len(_BLOCK.findall(text)):
        raise TableError(
            f"{page}: found a table marker without its partner, expected <!-- table: NAME --> and <!-- end -->"
        )
    return _BLOCK.sub(fill, text)


def load(path: Path, page: str) -> dict[str, Any]:
    """A result. Raises TableError where it is missing, or lacks a key that the table shows."""
    if not path.is_file():
        raise TableError(f"{page}: found a table of {path.name}, expected that file in {RESULTS}")
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    try:
        table(result)
    except KeyError as error:
        raise TableError(f"{path.name}: found no {error}, expected the form of benchmarks/results.py") from None
    return result


def unshown(root: Path) -> list[str]:
    """Results that no page shows."""
    shown = {match["name"] for page in pages(root) for match in _BLOCK.finditer(page.read_text(encoding="utf-8"))}
    return sorted(path.name for path in (root / RESULTS).glob("*.json") if path.stem not in shown)


def stale(root: Path) -> list[Path]:
    """Pages whose tables are not what the results say."""
    return [page for page in pages(root) if _filled(page, root) != page.read_text(encoding="utf-8")]


def _filled(page: Path, root: Path) -> str:
    return filled(page.read_text(encoding="utf-8"), page.relative_to(root).as_posix(), root / RESULTS)


def _distinct(values: list[int]) -> list[int]:
    return list(dict.fromkeys(values))


def _times(times: dict[str, float]) -> str:
    digits = 1 if times["median"] >= 20 else 2
    return f"{times['median']:.{digits}f} ({times['q1']:.{digits}f} to {times['q3']:.{digits}f})"


def _short(commit: str) -> str:
    name, dash, dirty = commit.partition("-")
    return name[:12] + (" with uncommitted changes" if dash and dirty == "dirty" else "")


def main(argv: list[str], root: Path = ROOT) -> int:
    """Command line: nothing, or --check."""
    if argv not in ([], ["--check"]):
        print("usage: python -m tools.tables [--check]", file=sys.stderr)
        return 2
    try:
        found = stale(root)
        for page in found:
            name = page.relative_to(root).as_posix()
            if argv:
                print(f"{name}: stale; run python -m tools.tables", file=sys.stderr)
            else:
                page.write_text(_filled(page, root), encoding="utf-8")
                print(f"{name}: rewritten")
        missing = unshown(root)
    except TableError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for name in missing:
        print(f"{RESULTS.as_posix()}/{name}: shown on no page", file=sys.stderr)
    return 1 if missing or (argv and found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
