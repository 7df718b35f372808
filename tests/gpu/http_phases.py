"""What one server runs and its clients do; started by vllm_two_gpus.py.

`python -m tests.gpu.http_phases http-stock|http-executor --folder FOLDER --out OUT ...`
"""

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu import scenarios
from tests.gpu.compare import NOISE_ROOM
from tests.gpu.executor_phases import executor_option
from tests.gpu.http_checks import STEPS, Memory, memory_failures, metrics_failures
from tests.gpu.http_traffic import MODEL, OUTPUTS, PROMPTS, Alone, Asked, Given, answer_failures, ask, soak
from tests.gpu.report import Report, Run
from tests.gpu.server import Metrics, Server, gpu_bytes, left_behind, own_bytes

PORT = 8123
START_SECONDS, STOP_SECONDS, READING_SECONDS = 420.0, 40.0, 3.0
GPU_LEFT = 64 << 20


def serve_command(args: argparse.Namespace, executor: dict[str, Any] | None) -> list[str]:
    """The server's command, as an operator gives it, with small graphs and memory."""
    graphs = {
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": list(scenarios.GRAPH_SIZES),
        "mode": 0,
    }
    longest = -(-(max(PROMPTS) + max(OUTPUTS)) // 1024) * 1024
    options: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": PORT,
        "served-model-name": MODEL,
        "tensor-parallel-size": args.ranks,
        "kv-cache-dtype": "fp8",
        "max-model-len": longest,
        "max-num-seqs": scenarios.MAX_ROWS,
        "max-num-batched-tokens": scenarios.PREFILL_CHUNK,
        "gpu-memory-utilization": 0.5,
        "compilation-config": json.dumps(graphs),
        "kernel-config": json.dumps({"enable_jit_warmup": False, "enable_flashinfer_autotune": False}),
    }
    if executor is not None:
        options["additional-config"] = json.dumps(executor)
    given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    return ["vllm.entrypoints.cli.main", "serve", str(args.folder), "--no-enable-prefix-caching", *given]


@dataclass
class Soak:
    """One server, and what its clients got."""

    args: argparse.Namespace
    executor: dict[str, Any] | None
    server: Server | None = None
    answers: list[Given] = field(default_factory=list)
    gpu_before: int = 0
    files_before: set[str] = field(default_factory=set)

    @property
    def store(self) -> Path:
        return Path(self.args.store) / "http.json"

    def running(self) -> Server:
        assert self.server is not None
        return self.server

    def start(self) -> Report:
        """Starts the server."""
        began, self.gpu_before, self.files_before = time.monotonic(), gpu_bytes(), left_behind()
        log = Path(self.args.out) / f"{self.args.engine}.server.log"
        command = serve_command(self.args, self.executor)
        self.server = Server.start(command, PORT, log, START_SECONDS)
        seconds = time.monotonic() - began
        return Report(f"healthy after {seconds:.1f} s", data={"seconds": round(seconds, 1), "command": command})

    def soak(self) -> Report:
        """Clients come and go; metrics and memory afterwards."""
        server = self.running()
        # What the first requests load and compile is no growth.
        asyncio.run(self._clients(10.0, []))
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
                readings.append(await asyncio.to_thread(lambda: Memory(own_bytes(processes), gpu_bytes())))
                await asyncio.wait([serving], timeout=READING_SECONDS)
            # vLLM tells of its state in steps alone: one more after the last client that went away.
            return [*await serving, await ask(client, Asked(0, 2))]

    def alone(self) -> Report:
        """Every answer against the engine with one request at a time, within what other batches do to stock."""
        from openai import OpenAI

        most, verdicts, failures = self._most(), [], list[str]()
        with OpenAI(base_url=f"{self.running().url}/v1", api_key="none", max_retries=0) as client:
            engine = Alone(client)
            for given in self.answers:
                verdict = engine.judge(given)
                verdicts.append(verdict)
                failures += [f"{given.asked}: {wrong}" for wrong in verdict.failures(most)]
        error = max((verdict.error for verdict in verdicts), default=0.0)
        parted = sum(bool(verdict.gaps) for verdict in verdicts)
        if self.executor is None:
            self.store.parent.mkdir(parents=True, exist_ok=True)
            self.store.write_text(json.dumps({"error": error}), encoding="utf-8")
        elif not verdicts:
            failures.append("no answers, expected some")
        line = (
            f"{len(verdicts)} answers, {parted} part from the engine alone at near ties; log-probabilities differ by "
            f"up to {error:.4g} (at most {most:.4g}); {len(engine.known)} requests alone"
        )
        return Report(line, failures, {"error": error, "most": most, "parted": parted, "alone": len(engine.known)})

    def _most(self) -> float:
        """The largest difference of a log-probability that passes; on stock it is what is measured."""
        if self.executor is None:
            return float("inf")
        return NOISE_ROOM * float(json.loads(self.store.read_text(encoding="utf-8"))["error"])

    def stop(self) -> Report:
        """Ends the server as an operator does: nothing may be left of it."""
        began, server = time.monotonic(), self.running()
        failures = server.stop(STOP_SECONDS)
        seconds, gpu, files = time.monotonic() - began, gpu_bytes() - self.gpu_before, left_behind() - self.files_before
        if gpu > GPU_LEFT:
            failures.append(f"{gpu / 1e6:.0f} MB of GPU memory are still used, expected at most {GPU_LEFT / 1e6:.0f}")
        if files:
            failures.append(f"left behind: {', '.join(sorted(files)[:5])}")
        return Report(f"ended after {seconds:.1f} s", failures, {"seconds": round(seconds, 1), "gpu": gpu})


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
        run.phase("alone", 240, work.alone)
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
