"""Clocks of CUDA graphs."""

from collections.abc import Callable

import torch

# Replays of each graph that are not counted.
FIRST = 3


def replayed(
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]], replays: int, before: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """graphs: by name, with how many of what is timed one has. All replay in turn; microseconds of one, of each replay.
    before: called ahead of each."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for replay in range(replays + FIRST):
        for name, (graph, count) in graphs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before()
            torch.cuda.synchronize()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if replay >= FIRST:
                times[name].append(begin.elapsed_time(end) * 1e3 / count)
    return times
