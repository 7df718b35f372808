"""What must hold after a soak: the server's metrics add up with what its clients saw, and its memory does not grow."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tests.gpu.http_traffic import CLIENTS, PROMPTS, Given
from tests.gpu.scenarios import PREFILL_CHUNK
from tests.gpu.server import Metrics

STEPS = "specialized_decode:steps_total"
# Of a soak's steps, those that the executor must have run; the others prefill.
LEAST_SHARE = 0.5
# What the host's processes may grow by within a soak, and the GPU: allocators keep what was freed.
HOST_GROWTH, GPU_GROWTH = 64 << 20, 16 << 20


@dataclass(frozen=True)
class Memory:
    """Bytes at one time: the server's own host memory, and what is used of the GPUs, as GpuMemory can tell."""

    host: int
    gpu: int


def metrics_failures(before: Metrics, after: Metrics, answers: Sequence[Given], executor: bool) -> list[str]:
    """What does not add up. before, after: with no request running; answers: all requests between them."""
    asked = [given.asked for given in answers]
    whole = sum(given.reason is not None for given in answers)
    seen, most = sum(len(given.steps) for given in answers), sum(one.output_tokens for one in asked)
    most -= sum(given.asked.output_tokens - len(given.steps) for given in answers if given.reason is not None)

    def grown(name: str, **labels: str) -> float:
        return after.total(name, **labels) - before.total(name, **labels)

    def within(what: str, value: float, least: float, largest: float) -> list[str]:
        return (
            [] if least <= value <= largest else [f"{what}: found {value:.0f}, expected {least:.0f} to {largest:.0f}"]
        )

    # A client that goes away has not seen all that was computed for it, and may go when the last token is under way.
    ended = grown("vllm:request_success_total", finished_reason="length")
    failures = within("requests that ended by length", ended, whole, len(answers))
    others = grown("vllm:request_success_total") - ended - grown("vllm:request_success_total", finished_reason="abort")
    failures += within("requests that ended otherwise", others, 0, 0)
    generated = grown("vllm:generation_tokens_total")
    failures += within("generated tokens", generated, seen, most)
    prompts = [PROMPTS[given.asked.kind] for given in answers]
    answered = sum(length for length, given in zip(prompts, answers, strict=True) if given.steps)
    failures += within("prompt tokens", grown("vllm:prompt_tokens_total"), answered, sum(prompts))
    for gauge in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        if left := after.total(gauge):
            failures.append(f"{gauge}: found {left:g} at the end, expected 0")
    if executor:
        # A step gives each of at most so many requests a token, or prefills a chunk; one may be under way at an abort.
        chunks = sum(-(-length // PREFILL_CHUNK) for length in prompts)
        steps, ours = grown(STEPS), grown(STEPS, by="executor")
        failures += within("steps", steps, generated / CLIENTS, generated + chunks + len(answers))
        failures += within("steps by the executor", ours, LEAST_SHARE * steps, steps)
    return failures


def growth(values: Sequence[int]) -> float:
    """By how much the last third lies above the middle one, each by its median; the first third warms up."""
    if len(values) < 6:
        raise ValueError(f"memory: found {len(values)} readings, expected at least 6")
    third = len(values) // 3
    return statistics.median(values[-third:]) - statistics.median(values[third:-third])


def memory_failures(readings: Sequence[Memory]) -> list[str]:
    """Which memory grew while the server served."""
    host, gpu = growth([one.host for one in readings]), growth([one.gpu for one in readings])
    return [
        f"{what} memory grew by {value / 1e6:.0f} MB, expected at most {most / 1e6:.0f} MB"
        for what, value, most in (("host", host, HOST_GROWTH), ("GPU", gpu, GPU_GROWTH))
        if value > most
    ]
