"""How far stock's and the executor's logits of the long script are from the plain model's, in one process on one GPU.

`python -m tests.gpu.plain_phases tp2-plain --folder FOLDER --out OUT --store STORE`; started by vllm_two_gpus.py.

The plain model (backbone/) is the reference: weights dequantized exactly, products summed in float32, and BF16 only
where the model itself has it, between operations and in the formats of its caches. It runs each request's prompt and
stock's tokens in one causal pass. Stock is no reference for the executor: it quantizes activations, and a kernel that
does not differs from it by what that costs. The plain model rounds too; how far that takes it from itself is measured
by a second pass in pieces, whose products are summed in another order.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specialized_decode.backbone.engine import LocalEngine
from specialized_decode.backbone.model import load_model
from specialized_decode.backbone.tokenizer import TRAINED_IDS
from tests.gpu import ranks as ranks_module
from tests.gpu.compare import Difference, combined, difference, failures_if_unsound
from tests.gpu.engine import Outputs
from tests.gpu.outputs import load_outputs
from tests.gpu.report import Report, Run
from tests.gpu.scenarios import Request, prompt
from tests.gpu.two_gpu_phases import EXECUTOR_OUTPUTS, STEPS, STOCK_OUTPUTS

# Of stock's error against the plain model, what the executor's may be.
MOST_ERROR = 1.1
# Tokens of a piece in the second pass.
PIECE = 96
# Of the logits' own size, what stock's error must stay below: that of unrelated logits is 1.4 times their size, and
# tells that the plain model read other tokens or weights.
LEAST_RELATED = 0.7


@dataclass(frozen=True)
class Forced:
    """A request's prompt, stock's tokens after it, and how many of those both sides have logits of."""

    name: str
    prompt: list[int]
    tokens: list[int]
    rows: int


def forced_requests(script: Sequence[Request], stock: Outputs, executor: Outputs) -> list[Forced]:
    """What both sides computed of a script. Raises ValueError where they are not the same requests."""
    if stock.logits.keys() != executor.logits.keys():
        raise ValueError(f"requests: found {sorted(executor.logits)}, expected stock's {sorted(stock.logits)}")
    found = []
    for place, request in enumerate(script):
        rows = min(len(side.logits[request.name]) for side in (stock, executor)) if request.name in stock.logits else 0
        if rows:
            # As run_traffic makes prompts.
            ids = prompt(request.prompt_tokens, 1000 + place)
            found.append(Forced(request.name, ids, stock.tokens[request.name][:rows], rows))
    return found


class Plain:
    """The plain model of a folder for one request at a time of up to `longest` tokens."""

    def __init__(self, folder: Path, device: torch.device, longest: int) -> None:
        # Sums of BF16 products in float32 to their end.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        model = load_model(folder, device, longest, longest)
        self.engine = LocalEngine(model, 1, longest, longest)

    def logits(self, request: Forced, piece: int | None = None) -> Tensor:
        """[rows, TRAINED_IDS] float32 on the CPU: of the prompt's last token and of all forced ones but the last.

        piece: tokens at a time; all at once by default.
        """
        text = [*request.prompt, *request.tokens[:-1]]
        opened = self.engine.caches.open(text)
        hidden = []
        try:
            while count := min(piece or len(text), len(text) - opened.computed):
                output = self.engine.forward(self.engine.caches.batch([opened], [count]))
                hidden.append(output if isinstance(output, Tensor) else output[0])
                opened.computed += count
        finally:
            self.engine.caches.close(opened)
        rows = torch.cat(hidden)[len(request.prompt) - 1 :]
        return self.engine.model.logits(rows)[:, :TRAINED_IDS].float().cpu()


def spread_of(logits: Iterable[Tensor]) -> float:
    """The root mean square of logits [rows, ids] about each row's mean."""
    parts = [(one.double() - one.double().mean(1, keepdim=True)).square().flatten() for one in logits]
    return float(torch.cat(parts).mean().sqrt())


def judge_plain(stock: Difference, executor: Difference, own: Difference, size: float) -> list[str]:
    """What is wrong with the executor's error against the plain model, given stock's, the plain model's own and the
    size of the logits."""
    failures = failures_if_unsound(executor)
    if not own.rms < stock.rms:
        failures.append(
            f"the plain model is {own.rms:.4g} (rms) from itself, expected less than stock's {stock.rms:.4g}"
        )
    if not stock.rms < LEAST_RELATED * size:
        failures.append(
            f"stock's logits are {stock.rms:.4g} (rms) from the plain model's, expected less than {LEAST_RELATED} "
            f"times their own size, {size:.4g}: these are not the same model and tokens"
        )
    if not executor.rms <= MOST_ERROR * stock.rms:
        failures.append(
            f"the executor's logits are {executor.rms:.4g} (rms) from the plain model's, expected at most {MOST_ERROR} "
            f"times stock's {stock.rms:.4g}"
        )
    return failures


def described_error(who: str, found: Difference) -> str:
    return (
        f"{who} rms {found.rms:.4g}, largest {found.largest:.4g}, argmax in {found.argmax_differs} over gaps up to "
        f"{found.gap:.4g}"
    )


def check_plain(plain: Plain, requests: Sequence[Forced], stock: Outputs, executor: Outputs) -> Report:
    """Runs the plain model over every request, and holds both sides against it."""
    errors: dict[str, list[Difference]] = {"stock": [], "executor": [], "own": []}
    sizes, rows = 0.0, 0
    for request in requests:
        expected = plain.logits(request)
        for name, side in (("stock", stock), ("executor", executor)):
            errors[name].append(difference(expected, side.logits[request.name][: request.rows]))
        errors["own"].append(difference(expected, plain.logits(request, PIECE)))
        sizes, rows = sizes + spread_of([expected]) ** 2 * request.rows, rows + request.rows
    size = (sizes / max(1, rows)) ** 0.5
    of_stock, of_executor, own = (combined(parts) for parts in errors.values())
    ratio = of_executor.rms / of_stock.rms if of_stock.rms else float("nan")
    line = (
        f"{rows} rows of {len(requests)} requests, logits of size {size:.4g}; from the plain model: "
        f"{described_error('stock', of_stock)}; {described_error('executor', of_executor)}; "
        f"{ratio:.3f} times stock's error; the plain model from itself rms {own.rms:.4g}"
    )
    failures = judge_plain(of_stock, of_executor, own, size)
    if not rows:
        failures.append("no rows of logits were compared")
    records = {"stock": of_stock.record(), "executor": of_executor.record(), "own": own.record()}
    data = {"size": size, "ratio": ratio, **records}
    return Report(line, failures, data)


def run_plain(run: Run) -> None:
    """Both phases."""
    args, made = run.args, list[Plain]()
    ((stock,), (executor,)) = (load_outputs(args.store / name).outputs for name in (STOCK_OUTPUTS, EXECUTOR_OUTPUTS))
    requests = forced_requests(ranks_module.long_script(STEPS), stock, executor)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def load() -> Report:
        longest = max(len(one.prompt) + one.rows for one in requests)
        made.append(Plain(args.folder, device, longest))
        return Report(f"{len(requests)} requests of up to {longest} tokens, on {device.type}")

    if run.phase("load", 180, load):
        run.phase("plain", 240, lambda: check_plain(made[0], requests, stock, executor))


def main(argv: Sequence[str]) -> int:
    """Command line; the exit status is 0 when every phase passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=["tp2-plain"])
    parser.add_argument("--folder", type=Path, required=True, help="the model folder")
    parser.add_argument("--out", type=Path, required=True, help="where events and records go")
    parser.add_argument("--store", type=Path, required=True, help="where tp2-stock and tp2-executor left their logits")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    run = Run(args)
    run_plain(run)
    return 0 if run.records and all(record["ok"] for record in run.records) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
