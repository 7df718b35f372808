"""V4.1-Flash's widths on one GPU: plain steps and the executor's captured graphs, interleaved.

`python -m benchmarks.decode_cuda FOLDER --name decode_h200` writes benchmarks/results/decode_h200.json. The executor
runs reference ops: the times say what a graph saves, not what kernels will.
"""

from pathlib import Path

import click
import torch

from benchmarks.decode_cpu import WARM_UP_STEPS, Decoding, timed_run
from benchmarks.results import FOLDER, Result, Run, commit
from specialized_decode.backbone.corpus import corpus
from specialized_decode.backbone.model import DeepseekV41, Executor, load_model
from specialized_decode.backbone.tokenizer import load_tokenizer
from specialized_decode.runtime import DecodeConfig, SpecializedDecode

# Prompt lengths of each batch shape: one row, a ragged batch at both sides of the low-batch gate, one row past the
# candidate restriction of 16,384 positions.
SHAPES = ((300,), (1, 127, 129, 512, 513, 1000, 2000, 3000), (300,) * 48, (20000,))


def measure(model: DeepseekV41, ids: list[int], lengths: tuple[int, ...], steps: int) -> Run:
    """Times one batch shape. ids: text to cut prompts from."""
    prompts = [(ids * (length // len(ids) + 2))[row * 7 : row * 7 + length] for row, length in enumerate(lengths)]
    context = max(lengths) + steps + WARM_UP_STEPS + 1

    def build() -> Executor:
        return SpecializedDecode.for_target(model.model, DecodeConfig(), model.lm_head)

    executor = Decoding.start(model, prompts, context, build)
    plain = Decoding.start(model, prompts, context, None)
    return timed_run(plain, executor, lengths, steps)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--name", required=True, help="Name of the result: decode_h200, say.")
@click.option("--steps", type=click.IntRange(min=2), default=20, show_default=True, help="Timed steps of each kind.")
@click.option("--commit", "given", help="The commit, where the checkout is a copy without its history.")
@click.option("--out", type=click.Path(path_type=Path), default=FOLDER, help="Folder that the result is written to.")
def main(folder: Path, name: str, steps: int, given: str | None, out: Path) -> None:
    """Times decode steps of the model in FOLDER on the current GPU."""
    ids = load_tokenizer(folder).encode(corpus()).ids
    longest = max(max(lengths) for lengths in SHAPES) + steps + WARM_UP_STEPS + 1
    model = load_model(folder, torch.device("cuda"), 512, longest)
    runs = []
    for lengths in SHAPES:
        run = measure(model, ids, lengths, steps)
        runs.append(run)
        click.echo(
            f"{run.rows:3d} rows, context to {max(run.context)}: plain {run.plain_ms.median:.2f} ms, executor "
            f"{run.executor_ms.median:.2f} ms, identical tokens {run.identical_tokens} of {run.tokens}"
        )
    config = model.config
    Result(
        benchmark=name,
        commit=given or commit(),
        model="flash",
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        heads=config.num_attention_heads,
        expert_width=config.moe_intermediate_size,
        experts=config.n_routed_experts,
        device=torch.cuda.get_device_name(),
        torch=torch.__version__,
        peak_gb=round(torch.cuda.max_memory_allocated() / 1e9, 3),
        runs=tuple(runs),
    ).write(out / f"{name}.json")


if __name__ == "__main__":
    main(prog_name="decode_cuda")
