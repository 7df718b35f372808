"""Progress of long work, on standard error; silent where that is not a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm


@contextmanager
def progress_bar(what: str, unit: str, scale: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """A callback (done, total, detail) that moves a bar."""
    bar = tqdm(desc=what, unit=unit, unit_scale=scale, leave=False, disable=not sys.stderr.isatty())
    try:

        def report(done: int, total: int, detail: str) -> None:
            bar.total = total
            bar.set_postfix_str(detail, refresh=False)
            bar.update(done - bar.n)

        yield report
    finally:
        bar.close()
