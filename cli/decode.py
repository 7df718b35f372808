"""`decode`: greedy text from a model folder, by the plain layers and by the executor, side by side."""

import os
import resource
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import torch
from tokenizers import Tokenizer

from specialized_decode.backbone.config import ModelConfig
from specialized_decode.backbone.corpus import corpus
from specialized_decode.backbone.engine import Generation, LocalEngine
from specialized_decode.backbone.errors import PromptError
from specialized_decode.backbone.model import DeepseekV41, load_model
from specialized_decode.backbone.tokenizer import load_tokenizer
from specialized_decode.backbone.writer import is_current, tiny_plan, write_checkpoint
from specialized_decode.cli.progress import progress_bar
from specialized_decode.runtime import (
    FUSED_MHC_MAX_ROWS,
    DecodeConfig,
    SpecializedDecode,
    hold_experts,
    kernel_families,
)

# Prompts where none is given: pieces of the text that ships here, so ragged that the shortest stays inside the tiny
# preset's window and the longest goes past its top-k and its candidate restriction.
_PIECES = ((0, 90), (2000, 700), (5000, 1500))
_CHUNK_TOKENS = 512


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), required=False)
@click.option("--prompt", "prompts", multiple=True, help="Text to go on from; may be given several times.")
@click.option("--tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Tokens to generate.")
@click.option(
    "--rows",
    type=click.IntRange(1, FUSED_MHC_MAX_ROWS),
    help="Sequences at a time; prompts repeat to fill them.  [default: one per prompt]",
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option(
    "--context", type=click.IntRange(min=2), help="Longest sequence.  [default: what prompts and tokens need]"
)
@click.option(
    "--kernels/--no-kernels",
    default=True,
    show_default=True,
    help="Run the executor on its kernels, where they serve the GPU and the model.",
)
def decode(
    folder: Path | None,
    prompts: tuple[str, ...],
    tokens: int,
    rows: int | None,
    device: str,
    context: int | None,
    kernels: bool,
) -> None:
    """Generates greedily from FOLDER, first with the plain layers, then with the executor, and compares.

    Without FOLDER it decodes the tiny random model, which it writes to the user's cache folder on first use. On cuda
    the executor's steps are captured CUDA graphs, replayed; on cpu capture and replay are emulated. Kernels
    round otherwise than the plain layers do, and random weights leave the best tokens close together: with them the
    two texts part sooner or later.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise click.ClickException(
            "--device cuda: found no CUDA device, expected one; `specialized-decode doctor` says more"
        )
    folder = folder or _tiny_folder()
    # First, so that a folder that is no model is called that.
    ModelConfig.from_folder(folder)
    tokenizer = load_tokenizer(folder)
    texts = _fill(prompts or _default_prompts(), rows)
    encoded = [tokenizer.encode(_unicode(index, text)).ids for index, text in enumerate(texts)]
    for index, (text, ids) in enumerate(zip(texts, encoded, strict=True)):
        if not ids:
            raise PromptError(f"prompt {index}: found {text!r}, which is no tokens, expected at least one")
    needed = max(len(ids) for ids in encoded) + tokens
    if context is not None and context < needed:
        raise PromptError(f"--context: found {context}, expected at least {needed}: the longest prompt and --tokens")
    context = context or needed
    chunk = max(_CHUNK_TOKENS, len(texts))
    with progress_bar(f"loading {folder}", "layer") as progress:
        model = load_model(folder, torch.device(device), chunk, context, progress)
    _describe(folder, model, encoded)
    config = DecodeConfig(kernels=kernel_families(kernels))
    # Ahead of the plain layers, so that both sides compute from the same weights.
    hold_experts(model.model, config)
    _compare(model, tokenizer, encoded, tokens, context, chunk, config)


def _compare(
    model: DeepseekV41,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    tokens: int,
    context: int,
    chunk: int,
    config: DecodeConfig,
) -> None:
    engine = LocalEngine(model, len(prompts), context, chunk)
    with progress_bar("plain layers", "token") as progress:
        plain = engine.generate(prompts, tokens, lambda step: progress(step, tokens, ""))
    model.executor = SpecializedDecode.for_target(model.model, config, model.lm_head)
    engine.capture([len(prompts)])
    with progress_bar("executor", "token") as progress:
        executor = engine.generate(prompts, tokens, lambda step: progress(step, tokens, ""))
    same = 0
    for index, (prompt, a, b) in enumerate(zip(prompts, plain.tokens, executor.tokens, strict=True)):
        same += sum(x == y for x, y in zip(a, b, strict=True))
        click.echo(f"\n[{index + 1}] {len(prompt)} tokens, ... {_shown(tokenizer.decode(prompt[-12:]))}")
        click.echo(f"    plain    {_shown(tokenizer.decode(a))}")
        click.echo(f"    executor {_shown(tokenizer.decode(b))}")
    total = len(prompts) * tokens
    click.echo(f"\nidentical tokens   {same} of {total}")
    _steps("plain layers", plain)
    _steps("executor", executor)
    click.echo(f"peak memory        {_peak_memory(model.device)}")


def _steps(name: str, generation: Generation) -> None:
    plain = generation.plain_steps
    count = generation.executor_steps + plain.total()
    reasons = "".join(f", {n} on the plain layers: {why}" for why, n in plain.items())
    times = generation.decode_seconds
    median = (
        f"{statistics.median(times) * 1e3:.2f} ms a decode step (median of {len(times)})" if times else "no decode step"
    )
    click.echo(f"{name:<18} {count} steps, {generation.executor_steps} by the executor{reasons}; {median}")


def _describe(folder: Path, model: DeepseekV41, prompts: Sequence[Sequence[int]]) -> None:
    c = model.config
    where = (
        f"cpu, {torch.get_num_threads()} threads"
        if model.device.type == "cpu"
        else torch.cuda.get_device_name(model.device)
    )
    click.echo(
        f"model   {folder}: {c.num_hidden_layers} layers, hidden size {c.hidden_size}, {c.n_routed_experts} experts"
    )
    click.echo(f"device  {where}, torch {torch.__version__}")
    lengths = ", ".join(str(len(ids)) for ids in prompts[:8]) + (", ..." if len(prompts) > 8 else "")
    click.echo(f"rows    {len(prompts)}, prompts of {lengths} tokens")


def _tiny_folder() -> Path:
    """The tiny model in the user's cache folder, written when it is not there or not current."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder, plan = cache / "specialized-decode" / "tiny", tiny_plan()
    if not is_current(folder, plan):
        click.echo(f"writing the tiny model to {folder}", err=True)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise click.ClickException(
                f"{folder.parent}: cannot be made ({error.strerror}); set XDG_CACHE_HOME"
            ) from None
        with progress_bar(f"writing {folder}", "B", scale=True) as progress:
            write_checkpoint(plan, folder, progress, replace=True)
    return folder


def _default_prompts() -> tuple[str, ...]:
    text = corpus()
    return tuple(text[start : start + length] for start, length in _PIECES)


def _fill(prompts: Sequence[str], rows: int | None) -> list[str]:
    """The prompts, repeated in turn to `rows`."""
    if rows is not None and rows < len(prompts):
        raise PromptError(f"--rows: found {rows}, expected at least {len(prompts)}, one for each prompt")
    return [prompts[i % len(prompts)] for i in range(rows or len(prompts))]


def _unicode(index: int, text: str) -> str:
    """A prompt as it is. Raises PromptError where the shell handed over bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PromptError(f"prompt {index}: found bytes that are not UTF-8, expected text") from None
    return text


def _shown(text: str) -> str:
    """Text on one line, cut where it gets long."""
    line = " ".join(text.split())
    return repr(line if len(line) <= 160 else line[:157] + "...")


def _peak_memory(device: torch.device) -> str:
    # ru_maxrss is in KiB on Linux, in bytes on macOS.
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    shown = f"{host / 1e9:.2f} GB of host memory"
    return (
        shown if device.type == "cpu" else f"{torch.cuda.max_memory_allocated(device) / 1e9:.2f} GB on the GPU, {shown}"
    )
