"""What one server runs and its clients do; started by vllm_two_gpus.py.

`python -m tests.gpu.http_phases http-stock|http-executor --folder FOLDER --out OUT ...`
"""

import argparse
import asyncio
import json
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu import scenarios
from tests.gpu.answers import Noise, judge
from tests.gpu.compare import Difference, combined
from tests.gpu.engine import SHARED_GPU
from tests.gpu.executor_phases import executor_option
from tests.gpu.http_checks import STEPS, Memory, memory_failures, metrics_failures
from tests.gpu.http_traffic import (
    MODEL,
    OUTPUTS,
    PROMPTS,
    Alone,
    Asked,
    Given,
    answer_failures,
    ask,
    soak,
    spread,
)
from tests.gpu.outputs import described
from tests.gpu.report import Report, Run
from tests.gpu.server import GpuMemory, Metrics, Server, form, own_bytes, shared_files

# The first start on a host compiles, and another engine beside it too.
START_SECONDS, STOP_SECONDS = 600.0, 40.0
# What the first requests load and compile is no growth of memory, which is read every so often after them.
WARM_SECONDS, READING_SECONDS = 10.0, 3.0
# For how long answers are held against the engine alone, and how many there must be at least.
ALONE_SECONDS, LEAST_ALONE = 60.0, 30
GPU_LEFT = 64 << 20


def free_port() -> int:
    """A port that no other server has, so that several can run at once."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def serve_command(args: argparse.Namespace, executor: dict[str, Any] | None, port: int) -> list[str]:
    """The server's command, as an operator gives it, with small graphs and memory."""
    graphs = {
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": list(scenarios.GRAPH_SIZES),
        "mode": 0,
    }
    longest = -(-(max(PROMPTS) + max(OUTPUTS)) // 1024) * 1024
    options: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": port,
        "served-model-name": MODEL,
        "tensor-parallel-size": args.ranks,
        "kv-cache-dtype": "fp8",
        "max-model-len": longest,
        "max-num-seqs": scenarios.MAX_ROWS,
        "max-num-batched-tokens": scenarios.PREFILL_CHUNK,
        **{name.replace("_", "-"): value for name, value in SHARED_GPU.items()},
        "compilation-config": json.dumps(graphs),
        "kernel-config": json.dumps({"enable_jit_warmup": False, "enable_flashinfer_autotune": False}),
    }
    if executor is not None:
        options["additional-config"] = json.dumps(executor)
    given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    # Trace replay: answers are asked for again, token by token.
    switches = ["--no-enable-prefix-caching", "--enable-trace-replay"]
    return ["vllm.entrypoints.cli.main", "serve", str(args.folder), *switches, *given]


@dataclass
class Soak:
    """One server, and what its clients got."""

    args: argparse.Namespace
    executor: dict[str, Any] | None
    server: Server | None = None
    answers: list[Given] = field(default_factory=list)
    gpu: GpuMemory = field(default_factory=lambda: GpuMemory(own=False))
    gpu_before: int = 0
    started: float = 0.0

    @property
    def store(self) -> Path:
        return Path(self.args.store) / "http.json"

    def running(self) -> Server:
        assert self.server is not None
        return self.server

    def start(self) -> Report:
        """Starts the server."""
        began, self.started, self.gpu_before = time.monotonic(), time.time(), self.gpu.read([])
        log, port = Path(self.args.out) / f"{self.args.engine}.server.log", free_port()
        command = serve_command(self.args, self.executor, port)
        self.server = Server.start(command, port, log, START_SECONDS)
        seconds = time.monotonic() - began
        self.gpu = GpuMemory.of(self.server.processes())
        line = f"healthy after {seconds:.1f} s; GPU memory is read of {self.gpu.scope}"
        return Report(line, data={"seconds": round(seconds, 1), "command": command, "gpu": self.gpu.scope})

    def soak(self) -> Report:
        """Clients come and go; metrics and memory afterwards."""
        server = self.running()
        asyncio.run(self._clients(WARM_SECONDS, []))
        before, readings = idle_metrics(server), list[Memory]()
        self.answers = asyncio.run(self._clients(60 * self.args.minutes, readings))
        after = idle_metrics(server)
        failures = answer_failures(self.answers) + memory_failures(readings)
        failures += metrics_failures(before, after, self.answers, self.executor is not None)
        cancelled = sum(given.asked.cancel_after is not None for given in self.answers)
        tokens = sum(len(given.steps) for given in self.answers)
        host, gpu = ([getattr(one, name) for one in readings] for name in ("host", "gpu"))
        data = {"requests": len(self.answers), "cancelled": cancelled, "tokens": tokens, "host": host, "gpu": gpu}
        if self.executor is not None:
            data["steps"] = {by: after.total(STEPS, by=by) - before.total(STEPS, by=by) for by in ("executor", "stock")}
        line = f"{len(self.answers)} requests, {cancelled} cancelled, {tokens} tokens; steps {data.get('steps')}"
        return Report(line, failures, data)

    async def _clients(self, seconds: float, readings: list[Memory]) -> list[Given]:
        """Runs clients, reads memory beside them, and ends with one request after all the others."""
        from openai import AsyncOpenAI

        server = self.running()
        processes = server.processes()
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            serving = asyncio.create_task(soak(client, seconds))
            while not serving.done():
                readings.append(await asyncio.to_thread(self._memory, processes))
                await asyncio.wait([serving], timeout=READING_SECONDS)
            # vLLM tells of its state in steps alone: one more after the last client that went away.
            return [*await serving, await ask(client, Asked(0, 2))]

    def _memory(self, processes: Sequence[int]) -> Memory:
        return Memory(own_bytes(processes), self.gpu.read(processes))

    def alone(self) -> Report:
        """Answers against the engine with one request at a time, within what other batches do to stock.

        All of them, or as many as fit into ALONE_SECONDS, spread over the soak.
        """
        from openai import OpenAI

        held, names, until = list[Difference](), list[str](), time.monotonic() + ALONE_SECONDS
        given = [one for one in self.answers if one.steps]
        with OpenAI(base_url=f"{self.running().url}/v1", api_key="none", max_retries=0) as client:
            engine = Alone(client)
            for index in spread(len(given)):
                if time.monotonic() > until:
                    break
                held.append(engine.difference(given[index]))
                names.append(str(given[index].asked))
        found, failures = Noise.of(held), list[str]()
        if self.executor is None:
            self._store({"noise": found.total.record(), "farthest": found.farthest})
        else:
            stock = self._stored()
            if "noise" in stock:
                failures = judge(held, names, Noise(Difference(**stock["noise"]), stock["farthest"]))
            else:
                failures.append(f"{self.store}: found no noise of stock's, expected what its phase `alone` leaves")
        if len(held) < min(LEAST_ALONE, len(given)) or not held:
            failures.append(f"{len(held)} answers in {ALONE_SECONDS:.0f} s, expected at least {LEAST_ALONE}")
        line = (
            f"{len(held)} of {len(given)} answers held against the engine alone: {described([combined(held)])}; the "
            f"farthest long one {found.farthest:.4g} (rms)"
        )
        data = {"held": len(held), "total": found.total.record(), "farthest": found.farthest}
        return Report(line, failures, data)

    def stop(self) -> Report:
        """Ends the server as an operator does: nothing may be left of it, and its log tells of no more than stock's."""
        server = self.running()
        processes, began = server.processes(), time.monotonic()
        # By its own processes, and since it started: others may run on this host.
        files = [Path(path) for path in shared_files(processes)]
        failures, said = server.stop(STOP_SECONDS)
        seconds = time.monotonic() - began
        gpu = self.gpu.read(processes) - (0 if self.gpu.own else self.gpu_before)
        if gpu > GPU_LEFT:
            most = f"expected at most {GPU_LEFT / 1e6:.0f} (of {self.gpu.scope})"
            failures.append(f"{gpu / 1e6:.0f} MB of GPU memory are still used, {most}")
        left = [str(path) for path in files if path.exists() and path.stat().st_ctime >= self.started]
        if left:
            failures.append(f"left behind: {', '.join(sorted(left)[:5])}")
        known = set[str]()
        if self.executor is None:
            self._store({"said": sorted({form(line) for line in said})})
        else:
            known = set(self._stored().get("said", ()))
            failures += [f"log at the end: {line}" for line in said if form(line) not in known]
        line = f"ended after {seconds:.1f} s; {len(said)} lines of its log tell of something wrong"
        data = {"seconds": round(seconds, 1), "gpu": gpu, "said": said[:20]}
        return Report(line, failures, data)

    def _stored(self) -> dict[str, Any]:
        """What stock's server left."""
        return dict(json.loads(self.store.read_text(encoding="utf-8"))) if self.store.exists() else {}

    def _store(self, more: dict[str, Any]) -> None:
        self.store.parent.mkdir(parents=True, exist_ok=True)
        self.store.write_text(json.dumps(self._stored() | more), encoding="utf-8")


def idle_metrics(server: Server, limit: float = 10.0) -> Metrics:
    """The metrics once no request runs, or after `limit` seconds: they follow the answers after a moment."""
    until, found = time.monotonic() + limit, server.metrics()
    while found.total("vllm:num_requests_running") and time.monotonic() < until:
        time.sleep(0.2)
        found = server.metrics()
    # Counters of the last step may be on their way when its answer is there.
    time.sleep(0.5)
    return server.metrics()


def run_server(run: Run, executor: dict[str, Any] | None) -> None:
    """All phases of one server; it never outlives them."""
    work = Soak(run.args, executor)
    try:
        if not run.phase("start", START_SECONDS + 20, work.start):
            return
        run.phase("soak", 60 * run.args.minutes + 90, work.soak)
        run.phase("alone", ALONE_SECONDS + 60, work.alone)
        run.phase("shutdown", STOP_SECONDS + 20, work.stop)
    finally:
        if work.server is not None and work.server.process.poll() is None:
            work.server.kill()


def main(argv: Sequence[str]) -> int:
    """Command line; the exit status is 0 when every phase passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=["http-stock", "http-executor"])
    parser.add_argument("--folder", type=Path, required=True, help="the model folder")
    parser.add_argument("--out", type=Path, required=True, help="where events, logs and records go")
    parser.add_argument("--store", type=Path, required=True, help="where stock's own error is kept")
    parser.add_argument("--ranks", type=int, default=2, help="GPUs to serve on (default: 2)")
    parser.add_argument("--minutes", type=float, default=5, help="how long clients come (default: 5)")
    parser.add_argument("--executor-option", default="{}", help="JSON, added to the executor's additional_config")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    # An end asked for from outside ends the server too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    run = Run(args)
    run_server(run, None if args.engine == "http-stock" else executor_option(args))
    return 0 if run.records and all(record["ok"] for record in run.records) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
