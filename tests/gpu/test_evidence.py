"""What a failed phase's log says, by the forms that vLLM's processes give their lines."""

import re
import subprocess
import sys

from tests.gpu import vllm_one_gpu
from tests.gpu.evidence import WIDTH, ask_where, causes, raised, shortened, standing

# Two workers' tracebacks, mixed, one with a message of two lines and a cause; and the main process's own.
LOG = """(Worker_TP1 pid=7) ERROR 11-30 12:09:27 [multiproc_executor.py:1189] Traceback (most recent call last):
(Worker_TP0 pid=8) ERROR 11-30 12:09:27 [multiproc_executor.py:1189] Traceback (most recent call last):
(Worker_TP1 pid=7) ERROR 11-30 12:09:27 [multiproc_executor.py:1189]   File "/site/vllm/a.py", line 12, in run
(Worker_TP0 pid=8) ERROR 11-30 12:09:27 [multiproc_executor.py:1189]   File "/site/vllm/b.py", line 34, in step
(Worker_TP1 pid=7) ERROR 11-30 12:09:27 [multiproc_executor.py:1189]     go()
(Worker_TP1 pid=7) ERROR 11-30 12:09:27 [multiproc_executor.py:1189] ValueError: first
(Worker_TP1 pid=7) ERROR 11-30 12:09:27 [multiproc_executor.py:1189]   second line
(Worker_TP0 pid=8) ERROR 11-30 12:09:27 [multiproc_executor.py:1189] KeyError: 'x'
(Worker_TP1 pid=7) ERROR 11-30 12:09:27 [multiproc_executor.py:1189]
(Worker_TP1 pid=7) ERROR 11-30 12:09:27 [multiproc_executor.py:1189] The above exception was the direct cause of
(Worker_TP1 pid=7) INFO 11-30 12:09:28 [a.py:1] Traceback is a word
Capturing:   0%|          | 0/2\rCapturing: 100%|##| 2/2
Traceback (most recent call last):
  File "/repo/tests/gpu/report.py", line 43, in phase
    report = work()
RuntimeError: Worker failed with error 'first'
after it
"""


def test_exceptions_of_all_processes() -> None:
    found = raised(LOG)
    assert [(one.process, one.place) for one in found] == [
        ("Worker_TP1", "a.py:12 run"),
        ("Worker_TP0", "b.py:34 step"),
        ("", "report.py:43 phase"),
    ]
    assert [one.line() for one in found] == [
        "Worker_TP1: ValueError: first second line (a.py:12 run)",
        "Worker_TP0: KeyError: 'x' (b.py:34 step)",
        "RuntimeError: Worker failed with error 'first' (report.py:43 phase)",
    ]
    assert found[0].text.startswith("Traceback") and found[0].text.endswith("ValueError: first\n  second line")


def test_each_message_once_and_the_first_ones() -> None:
    assert [one.process for one in causes([LOG, LOG], 2)] == ["Worker_TP1", "Worker_TP0"]
    assert len(causes([LOG, LOG], 9)) == 3
    assert causes(["nothing here", ""]) == []


def test_a_traceback_without_its_end() -> None:
    (one,) = raised('Traceback (most recent call last):\n  File "a.py", line 1, in b\n')
    assert one.place == "a.py:1 b"


def test_long_messages_keep_both_ends() -> None:
    text = "begin " + "x" * 1000 + " end"
    assert shortened("a\n  b") == "a b"
    assert len(shortened(text)) == WIDTH and shortened(text).startswith("begin") and shortened(text).endswith(" end")
    long = f"Traceback (most recent call last):\n{'  line' * 5000}\nValueError: {text}"
    (one,) = raised(long)
    assert len(one.line()) == WIDTH and len(one.text) < 7000 and one.text.endswith(" end")


def test_where_a_process_stands() -> None:
    """Its main thread waits outside Python, and another one runs."""
    program = """
import threading, time
from tests.gpu.evidence import tell_on_signal
tell_on_signal()
threading.Thread(target=time.sleep, args=(1.5,)).start()
def inner():
    print(flush=True)
    threading.Lock().acquire() and time.sleep(1.5)
inner()
"""
    command = [sys.executable, "-c", program]
    pipe, root = subprocess.PIPE, vllm_one_gpu.ROOT
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=root)
    assert process.stdout is not None
    process.stdout.readline()
    ask_where([process.pid])
    _, log = process.communicate()
    assert process.returncode == 0
    (place,) = standing(f"before\n{log}after")
    assert re.fullmatch(r"stands in <string>:[78] inner, from <string>:9 <module>", place)
    assert standing(log + log) == standing(log) and standing(LOG) == []
