"""Shows on two GPUs what the executor does with two tensor-parallel ranks inside vLLM.

`python -m tests.gpu.vllm_two_gpus --out OUT`, as tests/gpu/vllm_one_gpu.py: jobs with phases, resumed where a call
stopped. Stock and the executor play 1000 steps alike, and the plain model judges both; a rank lacks a requirement, is
killed, and is stopped; OpenAI clients come to a server for minutes; and on one of the GPUs, DSpark's drafts and
requests with an image.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.gpu.vllm_one_gpu import LAYERS, ROOT, SHARD_TP, Job, checked, command_line, run_jobs
from tests.gpu.worker_plugin import LACKING, NAME, REPEATABLE, STALLING, write_metadata

WORK, MODELS = Path("/tmp/specialized-decode/run2"), Path("/tmp/specialized-decode/models")
# No multicast: peers store into each other's memory.
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    # FlashInfer's needs multicast, and is compiled from sources that the bundle leaves out.
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    # Workers must not inherit what the scheduler's process has done, and need their names from the start.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


def jobs(args: argparse.Namespace) -> list[Job]:
    """All jobs, the most important first."""
    folder = args.models / f"flash-tp{args.shard_tp}-{LAYERS}-{args.experts}"
    drafts = args.models / f"flash-drafts-{LAYERS}-{args.experts}"

    def make(folder: Path, shard_tp: int, *more: str) -> tuple[str, ...]:
        preset = ("--preset", "flash", "--layers", str(LAYERS), "--experts", str(args.experts))
        widths = ("--shard-tp", str(shard_tp), "--replace")
        return ("specialized_decode.cli.main", "make-checkpoint", str(folder), *preset, *widths, *more)

    path = os.pathsep.join(filter(None, [str(ROOT), str(args.work / "plugin"), os.environ.get("PYTHONPATH", "")]))
    both = f"specialized_decode,{NAME}"

    # As it is served: the scheduler in a process of its own.
    served = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}

    def engine(
        name: str, option: dict[str, bool], seconds: float, more: dict[str, str], files: tuple[Path, ...] = ()
    ) -> Job:
        paths = ("--folder", str(folder), "--out", str(args.work), "--store", str(args.store))
        given = json.dumps(json.loads(args.executor_option) | option)
        command = ("tests.gpu.two_gpu_phases", name, *paths, "--executor-option", given, "--expect", args.expect)
        plugins = NAME if name == "tp2-stock" else both
        environment = ENVIRONMENT | {"PYTHONPATH": path, "VLLM_PLUGINS": plugins} | more
        return Job(name, command, seconds, ("checkpoint",), files, environment)

    def server(name: str, minutes: float, files: tuple[Path, ...] = ()) -> Job:
        paths = ("--folder", str(folder), "--out", str(args.work), "--store", str(args.store))
        given = ("--ranks", str(args.ranks), "--minutes", f"{minutes:g}", "--executor-option", args.executor_option)
        environment = ENVIRONMENT | {"PYTHONPATH": path, "VLLM_PLUGINS": NAME if name == "http-stock" else both}
        command = ("tests.gpu.http_phases", name, *paths, *given)
        return Job(name, command, 60 * minutes + 210, ("checkpoint",), files, environment | served)

    def plain(name: str) -> Job:
        """The plain model, without vLLM."""
        paths = ("--folder", str(folder), "--out", str(args.work), "--store", str(args.store))
        files = (args.store / "tp2.pt", args.store / "tp2-executor.pt")
        return Job(name, ("tests.gpu.plain_phases", name, *paths), 90, ("checkpoint",), files)

    def one_gpu(module: str, name: str, folder: Path, needs: str, stored: str) -> Job:
        """In one process, on one GPU, as vllm_one_gpu.py's engines."""
        stock = name.endswith("-stock")
        paths = ("--folder", str(folder), "--out", str(args.work), "--store", str(args.store))
        given = ("--executor-option", args.executor_option, "--expect", args.expect)
        files = () if stock else (args.store / stored,)
        environment = {"VLLM_PLUGINS": ""} if stock else {}
        return Job(name, (f"tests.gpu.{module}", name, *paths, *given), 180, (needs,), files, environment)

    return [
        Job("checkpoint", make(folder, args.shard_tp), 120, phased=False, makes=folder),
        engine("tp2-stock", {}, 180, {REPEATABLE: "1"}),
        engine("tp2-executor", {}, 180, {REPEATABLE: "1"}, (args.store / "tp2.pt",)),
        plain("tp2-plain"),
        engine("lacking", {}, 90, served | {LACKING: "1"}),
        engine("killed", {"decode_kernels": True}, 120, served | {STALLING: "1"}),
        engine("stopped", {"decode_kernels": True}, 120, served | {STALLING: "1"}),
        server("http-stock", min(1, args.minutes)),
        server("http-executor", args.minutes, (args.store / "http.json",)),
        Job("checkpoint-drafts", make(drafts, SHARD_TP, "--drafts", "3"), 120, phased=False, makes=drafts),
        one_gpu("drafts_phases", "drafts-stock", drafts, "checkpoint-drafts", "drafts.pt"),
        one_gpu("drafts_phases", "drafts-executor", drafts, "checkpoint-drafts", "drafts.pt"),
        # vLLM's vision wrapper leaves the drafts' weights out.
        one_gpu("vision_phases", "vision-stock", drafts, "checkpoint-drafts", "vision.pt"),
        one_gpu("vision_phases", "vision-executor", drafts, "checkpoint-drafts", "vision.pt"),
    ]


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = command_line(str(__doc__), WORK, MODELS)
    parser.add_argument("--shard-tp", type=int, default=2, help="the folder's widths are 1/N of the release's")
    parser.add_argument("--minutes", type=float, default=5, help="how long clients come over HTTP (default: 5)")
    parser.add_argument("--ranks", type=int, default=2, help="GPUs of the HTTP server (default: 2)")
    return checked(parser, argv, jobs)


def main(argv: Sequence[str]) -> int:
    """Runs the jobs asked for, prints the summary and writes the results."""
    args = arguments(argv)
    write_metadata(args.work / "plugin")
    return run_jobs(args, [job for job in jobs(args) if not args.jobs or job.name in args.jobs.split(",")])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
