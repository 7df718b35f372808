"""Requests with an image through vLLM's vision wrapper, in one process on one GPU; started by vllm_two_gpus.py.

`python -m tests.gpu.vision_phases vision-stock|vision-executor --folder FOLDER --out OUT ...`
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from specialized_decode.backbone.config import IMAGE_TOKEN_ID
from tests.gpu.compare import combined, failures_if_close
from tests.gpu.engine import (
    SHARED_GPU,
    Engine,
    Outputs,
    Steps,
    parameters,
    run_in_turn,
    settled_counters,
    step_counters,
    take_logits,
    tokens_of,
    watch_captures,
    watch_steps,
)
from tests.gpu.executor_phases import check_captures, check_counters, executor_option, options
from tests.gpu.outputs import Recorded, compare, described, failures_beside, load_outputs, save_outputs
from tests.gpu.repeatable import make_repeatable
from tests.gpu.report import Report, Run
from tests.gpu.scenarios import prompt

GRAPH_SIZES = (1, 2, 4)
TOKENS = 64
# Tokens before and after the image, and the image's size in pixels: the first's image ends its prompt, so that its
# first decode steps look back into it; the last has none.
REQUESTS: tuple[tuple[int, int, tuple[int, int] | None], ...] = (
    (20, 0, (600, 500)),
    (1, 200, (1000, 300)),
    (150, 0, None),
)
ALL = range(len(REQUESTS))
# Decode steps of the batch with every request in it; prefills take their turns at the start.
LEAST_REPLAYS = TOKENS - 8
# Of the forced output tokens of the first request, those that are image tokens: decode routes them by their own bias.
FORCED_IMAGES = range(20, 30)


def picture(size: tuple[int, int], seed: int) -> Any:
    """An image of random pixels, the same on every host."""
    from PIL import Image

    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (size[1], size[0], 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def fill_tower(model: Any) -> int:
    """Gives what folders have no weights for, the vision tower and its delimiters, values by name; returns how many
    tensors. model: vLLM's vision wrapper."""
    count = 0
    for name, value in sorted(model.named_parameters()):
        if name.startswith("language_model."):
            continue
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        # Norms' weights pass values on; the others keep their scale over the width.
        noise = torch.randn(value.shape, generator=generator) * (value.shape[-1] ** -0.5 if value.dim() > 1 else 0.02)
        value.data.copy_(noise + 1 if "norm" in name and name.endswith("weight") else noise)
        count += 1
    return count


def inputs(index: int, image_seed: int) -> dict[str, Any]:
    """A request's prompt; vLLM puts the image's tokens where its placeholder is."""
    before, after, size = REQUESTS[index]
    ids = prompt(before + after, 900 + index)
    if size is None:
        return {"prompt_token_ids": ids}
    tokens = [*ids[:before], IMAGE_TOKEN_ID, *ids[before:]]
    return {"prompt_token_ids": tokens, "multi_modal_data": {"image": picture(size, image_seed + index)}}


def forced_tokens(tokens: Sequence[int], index: int) -> list[int]:
    """The output tokens to force: those that were chosen, in the first request some image tokens in their place."""
    return [IMAGE_TOKEN_ID if index == 0 and place in FORCED_IMAGES else token for place, token in enumerate(tokens)]


def run_images(
    engine: Engine, image_seed: int, which: Sequence[int], forced: dict[str, list[int]] | None = None
) -> Outputs:
    """Runs some of REQUESTS as a batch, whose rows come in turn, along `forced` tokens where given."""
    prompts = [inputs(index, image_seed) for index in which]
    # How long a prompt is with its image is vLLM's to say.
    probes = engine.llm.generate(prompts, parameters("", 1, 1, None, record=False), use_tqdm=False)
    requests = []
    for index, given, probe in zip(which, prompts, probes, strict=True):
        own = forced[str(index)] if forced else None
        sampling = parameters(str(index), len(probe.prompt_token_ids), TOKENS, own, record=True)
        requests.append((str(index), given, sampling))
    tokens = tokens_of(run_in_turn(engine, requests))
    return Outputs(tokens, take_logits(engine, tokens))


def unmoved(first: Outputs, other: Outputs) -> list[str]:
    """What is wrong with runs whose images differ: a request with an image whose first logits are the same."""
    failures = []
    for row, (_, _, size) in enumerate(REQUESTS):
        same = torch.equal(first.logits[str(row)][0], other.logits[str(row)][0])
        if size is not None and same:
            failures.append(f"request {row}: another image changes nothing")
    return failures


def record_images(engine: Engine, store: Path) -> Report:
    """Runs the batch freely; then along its tokens with image tokens among them: twice, each alone, and with other
    images."""
    free = run_images(engine, 1, ALL)
    forced = {row: forced_tokens(tokens, int(row)) for row, tokens in free.tokens.items()}
    first, again = run_images(engine, 1, ALL, forced), run_images(engine, 1, ALL, forced)
    alone = [compare(first, run_images(engine, 1, [index], forced))[str(index)] for index in ALL]
    repeats = compare(first, again)
    save_outputs(store / "vision.pt", Recorded([first], [repeats], combined(alone)))
    failures = unmoved(first, run_images(engine, 50, ALL, forced))
    if not any(not one.differing for one in repeats.values()):
        failures.append("stock repeats itself in no request")
    return Report(f"again: {described(list(repeats.values()))}; alone: {described(alone)}", failures)


def check_images(engine: Engine, args: argparse.Namespace, steps: Steps, store: Path) -> Report:
    """The same tokens on the executor: its logits, and that it ran the decode steps."""
    recorded = load_outputs(store / "vision.pt")
    (stock,), (repeats,) = recorded.outputs, recorded.repeats
    before, counters = steps.copy(), step_counters()
    found = compare(stock, run_images(engine, 1, ALL, stock.tokens))
    counted = steps.since(before)
    failures = check_counters(settled_counters(engine, counted.total, counters), counted)
    replays = sum(counted.replays.values())
    if replays < LEAST_REPLAYS:
        failures.append(f"{replays} graph replays, expected at least {LEAST_REPLAYS}")
    if found.keys() != repeats.keys():
        failures.append(f"requests: found {sorted(found)}, expected {sorted(repeats)}")
    if args.expect == "identical":
        failures += failures_beside(repeats, found)
    else:
        failures += failures_if_close(combined(found.values()), recorded.noise)
    line = f"{counted.total} steps, {replays} of them replays; {described(list(found.values()))}"
    return Report(line, failures, {"total": combined(found.values()).record()})


def settings(args: argparse.Namespace, executor: dict[str, Any] | None) -> dict[str, Any]:
    """LLM's options; the tower's attention by PyTorch, since small bundles have no FlashAttention."""
    images = {"limit_mm_per_prompt": {"image": 1}, "mm_encoder_attn_backend": "TORCH_SDPA"}
    return options(args, executor, max_model_len=2048, max_num_seqs=max(GRAPH_SIZES), **SHARED_GPU, **images)


def main(argv: Sequence[str]) -> int:
    """Command line; the exit status is 0 when every phase passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=["vision-stock", "vision-executor"])
    parser.add_argument("--folder", type=Path, required=True, help="the model folder")
    parser.add_argument("--out", type=Path, required=True, help="where events and records go")
    parser.add_argument("--store", type=Path, required=True, help="where stock's tokens and logits are kept")
    parser.add_argument("--expect", choices=["identical", "close"], default="identical")
    parser.add_argument("--executor-option", default="{}", help="JSON, added to the executor's additional_config")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    run, engines = Run(args), list[Engine]()
    executor = None if args.engine == "vision-stock" else executor_option(args)
    make_repeatable()
    steps, captured = watch_steps(), watch_captures() if executor is not None else None

    def start() -> Report:
        engines.append(Engine.build(args.folder, GRAPH_SIZES, **settings(args, executor)))
        filled = fill_tower(engines[0].runner.model)
        failures = [] if filled else ["found no vision tower"]
        if captured is not None:
            failures += check_captures(list(captured), GRAPH_SIZES)
        return Report(f"started in {engines[0].seconds:.1f} s; {filled} tensors of the tower filled", failures)

    if run.phase("start", 420, start):
        (engine,) = engines
        if executor is None:
            run.phase("images", 120, lambda: record_images(engine, args.store))
        else:
            run.phase("images", 120, lambda: check_images(engine, args, steps, args.store))
    return 0 if run.records and all(record["ok"] for record in run.records) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
