"""The command that makes a benchmark's result of what a script of tests/gpu left."""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from benchmarks.results import FOLDER


def conversion(convert: Callable[..., Any], lines: Callable[[Any], Iterable[str]], example: str) -> click.Command:
    """A command that writes what `convert(results, name, layers, experts, shard_tp)` makes of a file, a dataclass,
    and prints its `lines`. convert: raises ValueError where something is missing; example: of a result's name."""

    @click.command()
    @click.argument("results", type=click.Path(exists=True, dir_okay=False, path_type=Path))
    @click.option("--name", required=True, help=f"Name of the result: {example}, say.")
    @click.option("--layers", default=40, show_default=True)
    @click.option("--experts", default=384, show_default=True)
    @click.option("--shard-tp", default=4, show_default=True)
    @click.option("--out", type=click.Path(path_type=Path), default=FOLDER, help="Folder the result is written to.")
    def main(results: Path, name: str, layers: int, experts: int, shard_tp: int, out: Path) -> None:
        """Makes a result of RESULTS, the results.json of tests/gpu/vllm_one_gpu.py."""
        try:
            result = convert(json.loads(results.read_text(encoding="utf-8")), name, layers, experts, shard_tp)
        except ValueError as error:
            raise click.ClickException(str(error)) from None
        for line in lines(result):
            click.echo(line)
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.json").write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")

    return main
