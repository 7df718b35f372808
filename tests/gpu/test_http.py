"""The soak's own logic: metrics that do not add up, memory that grows, answers that are short, processes that stay."""

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gpu.answers import Step
from tests.gpu.http_checks import STEPS, Memory, growth, memory_failures, metrics_failures
from tests.gpu.http_phases import free_port, idle_metrics, serve_command
from tests.gpu.http_traffic import Alone, Asked, Given, answer_failures, asked, spread, token_id
from tests.gpu.server import Metrics, Server, alive, app_bytes, descendants, form, own_bytes, shared_files, visible_gpus
from tests.gpu.worker_plugin import FORCED

STEP = Step(5, -1.0, {5: -1.0})


def given(kind: int, tokens: int, cancelled: bool = False) -> Given:
    request = Asked(kind, 20, tokens if cancelled else None)
    return Given(request, [STEP] * tokens, None if cancelled else "length")


ANSWERS = [given(0, 20), given(1, 20), given(3, 4, cancelled=True), given(4, 0, cancelled=True)]


def metrics(**changed: float) -> Metrics:
    values = {
        "ended": 2.0,
        "aborted": 2.0,
        "errors": 0.0,
        "generated": 50.0,
        "prompts": 428.0,
        "running": 0.0,
        "cache": 0.0,
        "executor": 30.0,
        "stock": 5.0,
    } | changed
    return Metrics.parse(f"""# HELP vllm:request_success_total Count.
vllm:request_success_total{{engine="0",finished_reason="length",model_name="a \\"b\\", c"}} {values["ended"]}
vllm:request_success_total{{engine="0",finished_reason="abort"}} {values["aborted"]}
vllm:request_success_total{{engine="0",finished_reason="error"}} {values["errors"]}
vllm:generation_tokens_total{{engine="0"}} {values["generated"]}
vllm:prompt_tokens_total {values["prompts"]}
vllm:num_requests_running{{engine="0"}} {values["running"]}
vllm:num_requests_waiting{{engine="0"}} 0.0
vllm:kv_cache_usage_perc{{engine="0"}} {values["cache"]}
{STEPS}{{by="executor",reason=""}} {values["executor"]}
{STEPS}{{by="stock",reason="prefill"}} {values["stock"]}
""")


NOTHING = metrics(ended=0, aborted=0, generated=0, prompts=0, executor=0, stock=0)


def test_metrics_that_add_up() -> None:
    assert metrics_failures(NOTHING, metrics(), ANSWERS, executor=True) == []
    assert metrics().total(STEPS) == 35
    assert metrics().total("vllm:request_success_total", finished_reason="abort") == 2
    with pytest.raises(KeyError, match="found no vllm:nothing"):
        metrics().total("vllm:nothing")


@pytest.mark.parametrize(
    ("name", "value", "failure"),
    [
        ("ended", 1, "requests that ended by length: found 1, expected 2 to 4"),
        ("ended", 5, "requests that ended by length: found 5, expected 2 to 4"),
        ("errors", 1, "requests that ended otherwise: found 1, expected 0 to 0"),
        ("generated", 43, "generated tokens: found 43, expected 44 to 80"),
        ("generated", 81, "generated tokens: found 81, expected 44 to 80"),
        ("prompts", 427, "prompt tokens: found 427, expected 428 to 557"),
        ("running", 1, "vllm:num_requests_running: found 1 at the end, expected 0"),
        ("cache", 0.25, "vllm:kv_cache_usage_perc: found 0.25 at the end, expected 0"),
        ("executor", 300, "steps: found 305, expected 6 to 58"),
        ("executor", 4, "steps by the executor: found 4, expected 4 to 9"),
    ],
)
def test_metrics_that_do_not(name: str, value: float, failure: str) -> None:
    found = metrics_failures(NOTHING, metrics(**{name: value}), ANSWERS, executor=True)
    assert found == [failure]


def test_stock_has_no_step_counts() -> None:
    def without(one: Metrics) -> Metrics:
        return Metrics({key: value for key, value in one.values.items() if key[0] != STEPS})

    assert metrics_failures(without(NOTHING), without(metrics()), ANSWERS, executor=False) == []


def test_growth() -> None:
    warm = [0, 50, 90, 100, 101, 99, 100, 102, 100]
    assert growth(warm) == 0
    assert growth([10 * i for i in range(9)]) == 30
    with pytest.raises(ValueError, match="found 5 readings"):
        growth(warm[:5])
    assert memory_failures([Memory(one << 20, 7 << 30) for one in warm]) == []
    (failure,) = memory_failures([Memory(i << 25, 0) for i in range(9)])
    assert failure.startswith("host memory grew by 101 MB")
    (failure,) = memory_failures([Memory(0, i << 25) for i in range(9)])
    assert failure.startswith("GPU memory grew by 101 MB")


def test_requests_are_ragged_and_some_are_cancelled() -> None:
    requests = [asked(index) for index in range(300)]
    assert len({(one.kind, one.output_tokens) for one in requests}) == 16 * 11
    cancelled = [one for one in requests if one.cancel_after is not None]
    assert 40 < len(cancelled) < 46
    assert any(one.cancel_after == 0 for one in cancelled)
    assert all(one.cancel_after is not None and one.cancel_after < one.output_tokens for one in cancelled)
    assert Asked(3, 5).prompt == Asked(3, 7, 2).prompt
    assert len(Asked(3, 5).prompt) == 300


def test_answers_by_themselves() -> None:
    assert answer_failures(ANSWERS) == []
    assert answer_failures(ANSWERS[:2]) == ["no request was cancelled"]
    short = Given(Asked(0, 20), [STEP] * 19, "length")
    broken = Given(Asked(0, 20), error="APIError: gone")
    assert len(answer_failures([*ANSWERS, short])) == len(answer_failures([*ANSWERS, broken])) == 1
    assert answer_failures([*ANSWERS, broken])[0].endswith("APIError: gone")


def test_token_ids() -> None:
    assert token_id("token_id:129263") == 129263
    with pytest.raises(ValueError, match="found 'the', expected token_id:NUMBER"):
        token_id("the")


class Completions:
    """Gives the tokens asked for, each a little less likely than 6. It counts what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def create(self, prompt: list[int], max_tokens: int, extra_body: dict[str, Any], **options: Any) -> Any:
        forced = extra_body["vllm_xargs"][FORCED]
        assert max_tokens == len(forced)
        self.asked.append((len(prompt), max_tokens))
        logprobs = SimpleNamespace(
            tokens=[f"token_id:{token}" for token in forced],
            token_logprobs=[-1.0] * max_tokens,
            top_logprobs=[{"token_id:6": -0.99, f"token_id:{token}": -1.0} for token in forced],
        )
        return SimpleNamespace(choices=[SimpleNamespace(logprobs=logprobs)])


def test_the_engine_alone_is_made_to_give_the_answer() -> None:
    completions = Completions()
    engine = Alone(SimpleNamespace(completions=completions))
    five = Step(5, -1.02, {5: -1.02, 6: -1.03})
    for _ in range(2):
        found = engine.difference(Given(Asked(1, 4), [five] * 4))
        assert (found.steps, found.argmax_differs) == (4, 4)
        assert found.largest == pytest.approx(0.04) and found.gap == pytest.approx(0.01)
    assert engine.difference(Given(Asked(1, 4))).steps == 0
    # Once, after the prompt of 127 tokens.
    assert completions.asked == [(127, 4)]


def test_answers_are_spread() -> None:
    assert sorted(spread(100)) == list(range(100))
    for count in (4, 10, 50):
        first = sorted(spread(1000)[:count])
        assert max(b - a for a, b in itertools.pairwise(first)) < 3000 / count


def test_processes_and_their_memory() -> None:
    program = "import subprocess, sys, time; x = bytearray(1 << 26); x[::4096] = b'1' * len(x[::4096]);"
    program += (
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); print(flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    server = Server(process, 1, Path(os.devnull))
    found = server.processes()
    assert found[0] == process.pid and len(found) == 2
    assert set(found) < set(descendants(os.getpid()))
    assert own_bytes(found) > 1 << 26
    assert all(map(alive, found))
    server.kill()
    time.sleep(0.1)
    assert own_bytes(found) == 0
    assert not any(map(alive, found))


def test_a_process_that_nobody_waits_for_has_ended() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    until = time.monotonic() + 10
    while alive(process.pid) and time.monotonic() < until:
        time.sleep(0.02)
    assert Path(f"/proc/{process.pid}").exists() and not alive(process.pid)
    process.wait()


def test_gpu_memory_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = "77, 1024\n78, 512\n99, 4096\n"
    assert app_bytes(listed, [77, 78, 5]) == 1536 << 20
    # Hidden or unknown: then it is the GPUs' that is read.
    assert app_bytes(listed, [5]) is app_bytes("", [77]) is app_bytes("77, [N/A]\n78, 3\n", [77, 78]) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    assert visible_gpus() == ["--id=1,3"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_gpus() == []


def test_files_that_a_process_shares() -> None:
    """Open or mapped, still there or not."""
    program = """
import mmap, os, sys
kept = []
for name in ("open", "mapped", "gone"):
    file = open(f"/dev/shm/{sys.argv[1]}-{name}", "w+b")
    file.truncate(4096)
    kept.append(mmap.mmap(file.fileno(), 4096) if name == "mapped" else file)
    if name == "mapped":
        file.close()
os.unlink(f"/dev/shm/{sys.argv[1]}-gone")
print(flush=True)
sys.stdin.read()
"""
    name = f"specialized-decode-test-{os.getpid()}"
    process = subprocess.Popen(
        [sys.executable, "-c", program, name], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        assert shared_files([process.pid]) == {f"/dev/shm/{name}-open", f"/dev/shm/{name}-mapped"}
    finally:
        process.communicate("")
        for path in Path("/dev/shm").glob(f"{name}-*"):
            path.unlink()
    assert shared_files([process.pid]) == set()


def test_lines_of_two_runs_have_one_form() -> None:
    one, other = (
        "(APIServer pid=77) ERROR 11-30 12:00:00 [a.py:5] at 0x7f0a",
        "(APIServer pid=8) ERROR 12-01 1:2:3 [a.py:5] at 0x1",
    )
    assert form(one) == form(other) != form(one.replace("APIServer", "EngineCore"))


PROGRAM = """
import signal, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'vllm:num_requests_running 0.0\\n')
def end(*_):
    BODY
signal.signal(signal.SIGTERM, end)
print("ERROR before the end", flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.mark.parametrize(
    ("body", "failures"),
    [
        ("sys.exit(0)", ([], [])),
        ("sys.exit(3)", (["exit status 3, expected 0"], [])),
        ("print('ERROR: gone', flush=True); sys.exit(0)", ([], ["ERROR: gone"])),
        ("pass", (["still running after 2 s"], [])),
    ],
)
def test_a_server_starts_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, failures: tuple[list[str], list[str]]
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.replace("BODY", body))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    port = free_port()
    server = Server.start(["program", str(port)], port, tmp_path / "log", 20)
    assert idle_metrics(server).total("vllm:num_requests_running") == 0
    assert server.stop(2) == failures
    assert not Path(f"/proc/{server.process.pid}").exists()


def test_a_server_that_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the server ended with exit status 1"):
        Server.start(["no_such_module"], 1, tmp_path / "log", 20)


def test_the_command(tmp_path: Path) -> None:
    args: Any = SimpleNamespace(folder=tmp_path, ranks=2)
    assert not any(part.startswith("--additional") for part in serve_command(args, None, 8123))
    command = serve_command(args, {"decode_backend": "latency_specialized"}, 8123)
    assert command[command.index("--additional-config") + 1] == '{"decode_backend": "latency_specialized"}'
    assert command[command.index("--tensor-parallel-size") + 1] == "2"
