"""What a failed phase leaves in its log: the exceptions of all its processes, and where those stand that hang."""

import contextlib
import faulthandler
import os
import re
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

# How vLLM's processes begin their lines: `(Worker_TP1 pid=77) ERROR 11-30 12:09:27 [file.py:1189] `.
PREFIX = re.compile(r"^(?:\((?P<process>\S+) pid=\d+\) ?)?(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?)?")
PLACE = re.compile(r'^\s+File "(?:.*/)?([^"/]+)", line (\d+), in (\S+)')
BEGIN = "Traceback (most recent call last):"
# Of one message, and of one traceback's text: its start tells who called, its end what went wrong.
WIDTH, LONGEST = 300, 6000


@dataclass(frozen=True)
class Raised:
    """An exception in a log. process: its name, "" where lines have none; said: type and message; text: all of it."""

    process: str
    said: str
    place: str
    text: str

    def line(self) -> str:
        """What people read, in at most WIDTH characters."""
        who = f"{self.process}: " if self.process else ""
        where = f" ({self.place})" if self.place else ""
        return f"{who}{shortened(self.said, WIDTH - len(who) - len(where))}{where}"


def shortened(text: str, most: int = WIDTH) -> str:
    """The text on one line, its middle left out where it is longer than `most` characters."""
    text = " ".join(text.split())
    if len(text) <= most:
        return text
    tail = max(0, (most - 5) // 3)
    return f"{text[: most - 5 - tail]} ... {text[len(text) - tail :]}"


def _lines(log: str) -> Iterator[tuple[str, str, str]]:
    """The process, how its line begins, and the rest of each line."""
    for line in log.replace("\r", "\n").split("\n"):
        found = PREFIX.match(line)
        assert found is not None
        yield found["process"] or "", found.group(), line[found.end() :]


def raised(log: str) -> list[Raised]:
    """The tracebacks in a log, in the order of their beginnings; the lines of several processes may be mixed."""
    found: list[list[str]] = []
    owners: list[str] = []
    current: dict[str, tuple[list[str], str | None]] = {}
    for process, prefix, line in _lines(log):
        lines, ended = current.get(process, ([], None))
        if line.strip() == BEGIN:
            current[process] = [line], None
            found.append(current[process][0])
            owners.append(process)
        elif not lines:
            continue
        elif ended is None:
            lines.append(line)
            # The first line that is not indented says what was raised; empty ones come between.
            if line.strip() and not line[0].isspace():
                current[process] = lines, prefix
        elif prefix and prefix == ended and line.strip():
            # A message of several lines, which a logger gives all the same beginning.
            lines[-1] += f"\n{line}"
        else:
            del current[process]
    return [_raised(owner, lines) for owner, lines in zip(owners, found, strict=True)]


def _raised(process: str, lines: list[str]) -> Raised:
    places = [place for line in lines if (place := PLACE.match(line))]
    where = "{}:{} {}".format(*places[-1].groups()) if places else ""
    text = "\n".join(lines)
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 3]}\n...\n{text[len(text) - 2 * LONGEST // 3 :]}"
    return Raised(process, lines[-1].strip(), where, text)


def causes(logs: Iterable[str], most: int = 4) -> list[Raised]:
    """The first exceptions of the logs, each message once."""
    known: dict[tuple[str, str], Raised] = {}
    for log in logs:
        for one in raised(log):
            known.setdefault((one.process, one.said), one)
    return list(known.values())[:most]


# How Python tells of its main thread when it is asked by signal, the innermost call first.
STANDS, CALL = re.compile(r"^Current thread 0x"), re.compile(r'^  File "(?:.*/)?([^"/]+)", line (\d+) in (\S+)')
CALLS = 4


def tell_on_signal() -> None:
    """Makes this process write where it stands to its log on SIGUSR1, also while it waits outside Python."""
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)


def ask_where(processes: Iterable[int]) -> None:
    """Asks processes where they stand; one that does not know the question ends."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGUSR1)


def standing(log: str) -> list[str]:
    """Where the processes that were asked stand, the innermost calls first, each place once."""
    places: list[list[str]] = []
    inside = False
    for line in log.split("\n"):
        if STANDS.match(line):
            places.append([])
            inside = True
        elif inside and (call := CALL.match(line)) and len(places[-1]) < CALLS:
            places[-1].append("{}:{} {}".format(*call.groups()))
        elif not line.startswith("  "):
            inside = False
    return list(dict.fromkeys(f"stands in {', from '.join(calls)}" for calls in places if calls))
