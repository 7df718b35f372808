"""A vLLM plugin of the tests: it reaches every process of an engine, worker processes too.

`write_metadata` makes it visible as `specialized_decode_tests`; what it does is asked for by environment variables.
"""

import functools
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

from tests.gpu.evidence import tell_on_signal

NAME = "specialized_decode_tests"
REPEATABLE, LACKING = "SPECIALIZED_DECODE_TESTS_REPEATABLE", "SPECIALIZED_DECODE_TESTS_LACKING_RANK"
STALLING = "SPECIALIZED_DECODE_TESTS_STALLING_RANK"
# In a completion request's vllm_xargs: the output tokens to force, which vLLM takes from requests in its process alone.
FORCED = "forced"
# A setting of Humming's that the deployment check refuses: a rank that has it lacks a requirement.
REFUSED_SETTING = "VLLM_HUMMING_USE_F16_ACCUM"
TEXT_MODEL = "vllm.models.deepseek_v41.nvidia.model:DeepseekV41LLMForCausalLM"


def write_metadata(folder: Path) -> None:
    """Writes a distribution's metadata with the entry point; `folder` then goes on PYTHONPATH."""
    info = folder / f"{NAME}-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 0\n", encoding="utf-8")
    entry = f"[vllm.general_plugins]\n{NAME} = {__name__}:register\n"
    (info / "entry_points.txt").write_text(entry, encoding="utf-8")


def worker_rank() -> int | None:
    """The rank of the vLLM worker process that this is, by the name that vLLM gives it; None in other processes."""
    name = multiprocessing.current_process().name
    return int(name.removeprefix("VllmWorker-")) if name.startswith("VllmWorker-") else None


def register() -> None:
    """The entry point: serves the text model alone, and does what is asked for in worker processes."""
    from vllm.model_executor.models.registry import ModelRegistry

    tell_on_signal()
    ModelRegistry.register_model("DeepseekV41ForCausalLM", TEXT_MODEL)
    take_forced_tokens()
    rank = worker_rank()
    if rank is None:
        return
    if os.environ.get(LACKING):
        time_check(rank)
    if os.environ.get(LACKING) == str(rank):
        os.environ[REFUSED_SETTING] = "1"
    if os.environ.get(STALLING) == str(rank):
        from tests.gpu.stall import stall_steps

        stall_steps()
    if os.environ.get(REPEATABLE) == "1":
        from tests.gpu.repeatable import make_repeatable

        make_repeatable()


def take_forced_tokens() -> None:
    """Lets requests over HTTP name the tokens that they are to get; the server needs --enable-trace-replay."""
    from vllm import SamplingParams

    build = SamplingParams.from_optional

    @functools.wraps(build)
    def from_optional(*args: Any, **kwargs: Any) -> SamplingParams:
        params = build(*args, **kwargs)
        tokens = (params.extra_args or {}).get(FORCED)
        if tokens is not None:
            params.trace_decode_token_ids = list(tokens)
        return params

    SamplingParams.from_optional = staticmethod(from_optional)


def time_check(rank: int) -> None:
    """Prints, from here on, how long this rank's deployment check took until it raised; it is one of all ranks."""
    from specialized_decode.integration import config

    check = config.deployment_config

    @functools.wraps(check)
    def deployment_config(vllm_config: Any) -> Any:
        start = time.monotonic()
        try:
            return check(vllm_config)
        except Exception:
            print(f"rank {rank}: refused after {time.monotonic() - start:.3f} s", flush=True)
            raise

    config.deployment_config = deployment_config
