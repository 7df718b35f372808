"""The deployment check without an engine: what `specialized-decode doctor` prints."""

import contextlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from specialized_decode.integration.config import Row, evaluate
from specialized_decode.integration.facts import Deployment, Device, Facts, Software

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def deployment_rows(tp: int, folder: Path | None, flags: Sequence[str]) -> list[Row]:
    """Every row on this machine's first `tp` GPUs.

    folder: the model that vLLM is to serve; without one, or without vLLM, the rows that need vLLM's configuration are
    left out. flags: as given to `vllm serve`. What vLLM refuses by itself is a row, too.
    """
    software = Software.gather()
    if folder is None or software.vllm is None:
        return evaluate(Facts(software, _device(tp, 1), tp, None))
    try:
        config = engine_config(folder, tp, flags)
        size, nodes = config.parallel_config.tensor_parallel_size, config.parallel_config.nnodes
        deployment = Deployment.gather(config)
    except Exception as error:  # whatever vLLM does not accept, in its own words
        refused = Row(
            "vLLM configuration",
            False,
            str(error) or type(error).__name__,
            "a model and flags that vLLM serves on this machine",
            "see what vLLM says",
        )
        return [*evaluate(Facts(software, _device(tp, 1), tp, None)), refused]
    return evaluate(Facts(software, _device(size, nodes), size, deployment))


def engine_config(folder: Path, tp: int, flags: Sequence[str]) -> "VllmConfig":
    """vLLM's configuration for serving `folder`. Raises what vLLM raises, and ValueError for flags it does not know."""
    # Read when vLLM is imported: the report is all that goes to the standard output.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            arguments = parser.parse_args(["--model", str(folder), "--tensor-parallel-size", str(tp), *flags])
    except SystemExit as exit:
        lines = said.getvalue().strip().splitlines()
        raise ValueError(lines[-1] if lines else "vLLM's parser ended") from exit
    return AsyncEngineArgs.from_cli_args(arguments).create_engine_config()


def _device(size: int, nodes: int) -> Device:
    return Device.gather(size, nodes, ranks=range(max(1, min(size, torch.cuda.device_count()))))
