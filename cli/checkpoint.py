"""`make-checkpoint`: a model folder in the release's format, with random weights."""

import os
from pathlib import Path

import click

from specialized_decode.backbone.writer import (
    CheckpointPlan,
    flash_plan,
    tiny_plan,
    write_checkpoint,
    write_configuration,
)
from specialized_decode.cli.progress import progress_bar


@click.command("make-checkpoint")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--preset",
    type=click.Choice(["tiny", "flash"]),
    default="tiny",
    show_default=True,
    help="tiny: every feature at small widths, 80 MB. flash: V4.1-Flash's widths.",
)
@click.option("--layers", type=click.IntRange(min=4), help="flash: layers; 40 is the release's plan.  [default: 4]")
@click.option("--experts", type=click.IntRange(min=6), help="flash: routed experts of a layer.  [default: 384]")
@click.option(
    "--shard-tp",
    type=click.Choice(["1", "2", "4", "8"]),
    help="flash: the widths of one rank of this tensor-parallel size.  [default: 1]",
)
@click.option("--drafts", type=click.Choice(["0", "3"]), default="0", show_default=True, help="DSpark draft layers.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same bytes.")
@click.option("--no-weights", is_flag=True, help="Only config.json and tokenizer, for vLLM's load format `dummy`.")
@click.option("--workers", type=click.IntRange(min=1), help="Processes that write shards.  [default: one a CPU]")
@click.option("--replace", is_flag=True, help="Replace what is in FOLDER, once the new one is complete.")
def make_checkpoint(
    folder: Path,
    preset: str,
    layers: int | None,
    experts: int | None,
    shard_tp: str | None,
    drafts: str,
    seed: int,
    no_weights: bool,
    workers: int | None,
    replace: bool,
) -> None:
    """Writes FOLDER: config.json, tokenizer and safetensors shards of a DeepSeek-V4.1 model with random weights.

    The folder appears whole or not at all.
    """
    plan = _plan(preset, layers, experts, shard_tp, int(drafts), seed)
    if no_weights:
        write_configuration(plan, folder, replace)
    else:
        with progress_bar(f"writing {folder}", "B", scale=True) as progress:
            write_checkpoint(plan, folder, progress, replace, workers or os.cpu_count() or 1)
    size = sum(file.stat().st_size for file in folder.iterdir())
    text = plan.config["text_config"]
    click.echo(
        f"{folder}: {text['num_hidden_layers']} layers, {text['n_routed_experts']} experts, "
        f"hidden size {text['hidden_size']}, {size / 1e9:.2f} GB"
    )


def _plan(
    preset: str, layers: int | None, experts: int | None, shard_tp: str | None, drafts: int, seed: int
) -> CheckpointPlan:
    if preset == "tiny":
        for flag, value in (("--layers", layers), ("--experts", experts), ("--shard-tp", shard_tp)):
            if value is not None:
                raise click.UsageError(
                    f"{flag}: found {value} with --preset tiny, expected it with --preset flash only"
                )
        return tiny_plan(seed, drafts)
    return flash_plan(layers=layers or 4, experts=experts or 384, shard_tp=int(shard_tp or 1), seed=seed, drafts=drafts)
