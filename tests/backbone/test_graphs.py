"""Emulated capture: replays against eager runs on other inputs, and what a capture must refuse."""

import gc
import math
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from specialized_decode.backbone.cache import CacheMetadata
from specialized_decode.backbone.context import ForwardContext, GraphMode
from specialized_decode.backbone.graphs import CaptureError, EmulatedDevice, Graph, capture
from specialized_decode.backbone.host import LocalHost


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# Each takes (x [4, 6], state [4, 6]) and returns what a replay must reproduce; state may be written to.
Program = Callable[[Tensor, Tensor], Tensor]


def _chain(x: Tensor, state: Tensor) -> Tensor:
    return ((x @ state.T).softmax(-1) @ x).relu().sum(0)


def _in_place(x: Tensor, state: Tensor) -> Tensor:
    state.add_(x).mul_(0.5)
    state[1] = 3.0
    state.clamp_(-1, 1)
    return state + x


def _views(x: Tensor, state: Tensor) -> Tensor:
    y = x * 2
    y.view(2, 12)[0].zero_()
    first, second = y.t().chunk(2)
    first.add_(second)
    y[:, 1:3] *= 10
    return y.unflatten(1, (2, 3)).transpose(1, 2).flatten(1) + y.select(0, 2)


def _views_of_inputs(x: Tensor, state: Tensor) -> Tensor:
    rows = state[1:3]
    rows.copy_(x[:2])
    rows[0, 0] += 1
    return rows.expand(2, 2, 6).sum(0)


def _factories(x: Tensor, state: Tensor) -> Tensor:
    total = torch.zeros(4, 6)
    total += x
    columns = torch.arange(6, dtype=torch.float32)
    filled, empty = torch.full((4, 1), 2.0), torch.empty(4, 6)
    empty.copy_(x)
    return total * columns + filled + empty + torch.ones_like(x) + x.new_zeros(6)


def _indexing(x: Tensor, state: Tensor) -> Tensor:
    order = x[:, 0].argsort()
    state[order, 2] = x[:, 1]
    state.index_add_(0, order, x)
    state.scatter_(1, x.argmax(-1, keepdim=True), 7.0)
    picked = x.gather(1, state.abs().topk(2, -1).indices)
    return picked + x[order][:, :2]


def _where(x: Tensor, state: Tensor) -> Tensor:
    kept = torch.where(x > 0, x, state)
    kept = kept.masked_fill(kept < 0.5, math.nan)
    kept[x < -1] = 5.0
    return torch.nan_to_num(kept, nan=-1.0)


def _several_outputs(x: Tensor, state: Tensor) -> Tensor:
    values, indices = x.topk(3, -1)
    low, high = torch.aminmax(x, dim=-1)
    ordered, permutation = state.sort(-1)
    parts = torch.split(x * 3, [2, 4], -1)
    return values + indices + low[:, None] + high[:, None] + ordered[:, :3] + permutation[:, :3] + parts[0][:, :1]


def _casts(x: Tensor, state: Tensor) -> Tensor:
    bits = (x * 8).to(torch.float8_e4m3fn).view(torch.uint8)
    packed = torch.cat((bits, x.to(torch.bfloat16).view(torch.uint8)), -1)
    return packed[:, :6].contiguous().view(torch.float8_e4m3fn).float() + x.to(torch.bfloat16).float()


def _out_arguments(x: Tensor, state: Tensor) -> Tensor:
    result = torch.empty(4, 6)
    torch.add(x, 1, out=result)
    torch.mul(result, 2, out=state)
    torch._foreach_add_([result, state], 1.0)
    return result + state


def _reshapes(x: Tensor, state: Tensor) -> Tensor:
    copied = x.t().reshape(-1)
    same = x.reshape(24)
    joined = torch.einsum("ti,tj->tij", x, state).flatten(1)
    return copied[:4] + same[:4] + joined[:, 3] + torch.stack((x, x), 1).sum((1, 2))


def _metadata_in_place(x: Tensor, state: Tensor) -> Tensor:
    y = x + 1
    y.unsqueeze_(0)
    y.t_() if y.dim() == 2 else y.squeeze_(0)
    y.t_()
    return y @ state


PROGRAMS: list[Program] = [
    _chain,
    _in_place,
    _views,
    _views_of_inputs,
    _factories,
    _indexing,
    _where,
    _several_outputs,
    _casts,
    _out_arguments,
    _reshapes,
    _metadata_in_place,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_replays_equal_eager_runs(program: Program) -> None:
    """On other inputs, three times over, with the state that the replays before left behind."""
    x, state = _randn(4, 6, seed=1), _randn(4, 6, seed=2)
    captured: list[Tensor] = []
    graph = capture(EmulatedDevice(), lambda: captured.append(program(x, state)))
    shape = captured[0].shape
    reference = state.clone()
    for seed in range(3, 6):
        x.copy_(_randn(4, 6, seed=seed))
        expected = program(x.clone(), reference)
        graph.replay()
        assert captured[0].shape == shape
        assert torch.equal(captured[0], expected)
        assert torch.equal(state, reference)


def test_a_replay_runs_no_python() -> None:
    x, calls = torch.zeros(3), []

    def run() -> None:
        calls.append(1)
        x.add_(len(calls))

    graph = capture(EmulatedDevice(), run)
    for _ in range(3):
        graph.replay()
    assert len(calls) == 1 and x.tolist() == [4.0] * 3


def test_results_that_share_memory_keep_sharing_it() -> None:
    x, results = torch.ones(2, 3), list[Tensor]()

    def run() -> None:
        y = x * 2
        results.extend((y, y[0], y.view(6), (x * 3)[1]))
        y[0, 0] = x[1, 1]

    graph = capture(EmulatedDevice(), run)
    base, row, flat, lone = results
    for value in (5.0, 7.0):
        x.fill_(value)
        graph.replay()
        assert base.flatten().tolist() == flat.tolist() == [value] + [2 * value] * 5
        assert row.tolist() == base[0].tolist() and lone.tolist() == [3 * value] * 3
        assert row.data_ptr() == base.data_ptr() == flat.data_ptr()


def test_what_one_graph_made_another_one_reads() -> None:
    device, x, results = EmulatedDevice(), torch.ones(2), list[Tensor]()
    first = capture(device, lambda: results.append(x + 1))
    second = capture(device, lambda: results.append(results[0] * 10))
    x.fill_(4.0)
    second.replay()
    assert results[1].tolist() == [20.0, 20.0]
    first.replay()
    second.replay()
    assert results[1].tolist() == [50.0, 50.0]


def test_host_decisions_are_frozen_and_values_are_not() -> None:
    x, scale = torch.ones(2), [10.0]
    result: list[Tensor] = []
    graph = capture(EmulatedDevice(), lambda: result.append(x * scale[0]))
    scale[0] = 99.0
    x.fill_(3.0)
    graph.replay()
    assert result[0].tolist() == [30.0, 30.0]


def _scaling(device: EmulatedDevice, x: Tensor, factor: float, results: list[Tensor]) -> Graph:
    return capture(device, lambda: results.append(x * factor))


def test_graphs_share_state_and_keep_their_own_results() -> None:
    device, x = EmulatedDevice(), torch.zeros(2)
    results: list[Tensor] = []
    graphs = [_scaling(device, x, factor, results) for factor in (2.0, 3.0)]
    x.fill_(1.0)
    graphs[0].replay()
    x.fill_(5.0)
    graphs[1].replay()
    assert results[0].tolist() == [2.0, 2.0] and results[1].tolist() == [15.0, 15.0]


# --- what the host would have to read back -------------------------------------------------------------------------

READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "int": lambda x: int(x[0]),
    "float": lambda x: float(x[0]),
    "bool": lambda x: 1 if x.sum() > 0 else 2,
    "any": lambda x: bool((x > 0).any()),
    "index": lambda x: [1, 2, 3][x[0].long()],
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "argwhere": torch.argwhere,
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x + 1),
    "allclose": lambda x: torch.allclose(x, x + 1),
    "boolean mask": lambda x: x[x > 0],
    "boolean mask write": lambda x: x.index_put_((x > 0,), torch.ones(4)),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "tolist": lambda x: (x + 1).tolist(),
    "numpy": lambda x: (x + 1).numpy(),
    "cpu": lambda x: (x + 1).cpu(),
    "copied literal": lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]),
}
# What the emulation cannot see: on a CPU these dispatch no operator at all.
UNSEEN = {"tolist", "numpy", "cpu"}


@pytest.mark.parametrize("read", sorted(set(READS) - UNSEEN))
def test_reading_the_device_back_is_refused(read: str) -> None:
    """A CUDA capture fails on each of these, as each waits for the device (the last one to copy from the host)."""
    device, x, done = EmulatedDevice(), torch.ones(4), list[object]()
    with pytest.raises(CaptureError):
        capture(device, lambda: done.append(READS[read](x)))
    assert not device.capturing
    _captures_and_replays(device)


def test_reads_outside_a_capture_are_free() -> None:
    for read in READS.values():
        read(torch.ones(4))


def _captures_and_replays(device: EmulatedDevice) -> None:
    x, result = torch.ones(2), []
    graph = capture(device, lambda: result.append(x + 1))
    x.fill_(4.0)
    graph.replay()
    assert result[0].tolist() == [5.0, 5.0]


# --- side streams ---------------------------------------------------------------------------------------------------


def test_joined_side_work_replays() -> None:
    device, x = EmulatedDevice(), torch.ones(2)
    side, result = device.stream("side"), []

    def run() -> None:
        with side.fork():
            y = x * 2
        z = x + 1
        side.join()
        result.append(y + z)

    graph = capture(device, run)
    x.fill_(3.0)
    graph.replay()
    assert result[0].tolist() == [10.0, 10.0]
    assert device.current == device.MAIN


def test_reading_unjoined_work_is_refused() -> None:
    device, x = EmulatedDevice(), torch.ones(2)
    side = device.stream("side")

    def run() -> None:
        with side.fork():
            y = x * 2
        y + 1

    with pytest.raises(CaptureError, match="main reads what side wrote, without a join"):
        capture(device, run)


@pytest.mark.parametrize("access", ["view", "in place", "slice", "second output", "argument of a list"])
def test_reading_unjoined_work_through_any_tensor_of_it(access: str) -> None:
    device, x = EmulatedDevice(), torch.ones(4, 2)
    side = device.stream("side")

    def run() -> None:
        with side.fork():
            y = x * 2
            _, order = x.sort()
        if access == "view":
            y.view(-1).sum()
        elif access == "in place":
            y.add_(1)
        elif access == "slice":
            y[1:2].sum()
        elif access == "second output":
            order + 1
        else:
            torch.cat([x, y])

    with pytest.raises(CaptureError, match="main reads what side wrote"):
        capture(device, run)


def test_reading_an_argument_that_unjoined_work_wrote() -> None:
    device, x, y = EmulatedDevice(), torch.ones(2), torch.zeros(2)
    side = device.stream("side")

    def run() -> None:
        with side.fork():
            y.copy_(x)
        x + y

    with pytest.raises(CaptureError, match="main reads what side wrote"):
        capture(device, run)


def test_a_fork_sees_what_was_done_before_it_only() -> None:
    device, x = EmulatedDevice(), torch.ones(2)
    side, other = device.stream("side"), device.stream("other")

    def early() -> None:
        with side.fork():
            y = x + 1
        with other.fork():
            y + 1

    with pytest.raises(CaptureError, match="other reads what side wrote"):
        capture(device, early)

    def late() -> None:
        with side.fork():
            y = x + 1
        side.join()
        with other.fork():
            z = y + 1
        other.join()
        z + y

    capture(device, late)


def test_main_goes_on_while_the_side_stream_does_not_see_it() -> None:
    device, x = EmulatedDevice(), torch.ones(2)
    outer, inner = device.stream("outer"), device.stream("inner")

    def run() -> None:
        with outer.fork():
            with inner.fork():
                y = x + 1
            z = x + 2
            inner.join()
            z += y
        outer.join()
        z * 2

    capture(device, run)


def test_a_join_orders_the_stream_that_asks_for_it() -> None:
    """What one side stream joined, another one has not."""
    device, x = EmulatedDevice(), torch.ones(2)
    first, second = device.stream("first"), device.stream("second")

    def run() -> None:
        with first.fork():
            y = x + 1
        with second.fork():
            first.join()
            z = y + 1
        y + 1
        second.join()
        z + 1

    with pytest.raises(CaptureError, match="main reads what first wrote"):
        capture(device, run)


def test_a_join_covers_what_was_forked_before_it() -> None:
    device, x = EmulatedDevice(), torch.ones(2)
    side = device.stream("side")

    def run() -> None:
        with side.fork():
            x + 1
        side.join()
        with side.fork():
            y = x + 2
        y + 1

    with pytest.raises(CaptureError, match="main reads what side wrote"):
        capture(device, run)


def test_unjoined_work_at_the_end_is_refused() -> None:
    device, x = EmulatedDevice(), torch.ones(2)
    side, other = device.stream("side"), device.stream("other")

    def run() -> None:
        with side.fork():
            x + 1
        with other.fork():
            x + 1
        other.join()

    with pytest.raises(CaptureError, match=r"unjoined work on side$"):
        capture(device, run)
    assert not device.capturing
    _captures_and_replays(device)


def test_a_stream_that_joins_itself_is_still_unjoined() -> None:
    device, x = EmulatedDevice(), torch.ones(2)
    side = device.stream("side")

    def run() -> None:
        with side.fork():
            x + 1
            side.join()

    with pytest.raises(CaptureError, match="unjoined work on side"):
        capture(device, run)


def test_empty_tensors_carry_no_work() -> None:
    """Tensors without elements have no storage of their own, so nothing can be read out of order."""
    device, x, nothing = EmulatedDevice(), torch.ones(2), torch.ones(0)
    side = device.stream("side")

    def run() -> None:
        with side.fork():
            x[:0] * 2
        torch.cat([nothing, x])
        side.join()

    capture(device, run)


def test_eager_forks_need_no_capture_and_leave_nothing_behind() -> None:
    device, x = EmulatedDevice(), torch.ones(2)
    side = device.stream("side")
    with side.fork():
        y = x + 1
    assert y.tolist() == [2.0, 2.0]
    _captures_and_replays(device)


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["main", "side", "after a fork", "nested"])
def test_an_error_surfaces_as_itself_and_leaves_the_device_usable(where: str) -> None:
    """Not as "unjoined work", although what was forked is not joined."""
    device, x = EmulatedDevice(), torch.ones(2)
    side, inner = device.stream("side"), device.stream("inner")

    def run() -> None:
        if where == "main":
            raise KeyError("the error itself")
        with side.fork():
            x + 1
            if where == "nested":
                with inner.fork():
                    raise KeyError("the error itself")
            if where == "side":
                raise KeyError("the error itself")
        raise KeyError("the error itself")

    with pytest.raises(KeyError, match="the error itself"):
        capture(device, run)
    assert not device.capturing and device.current == device.MAIN
    assert x.add(1).tolist() == [2.0, 2.0]
    _captures_and_replays(device)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_a_capture_collects_no_garbage(enabled: bool, fails: bool) -> None:
    """A graph that the collector frees in a capture ends it; afterwards the collector is as it was."""
    seen: list[bool] = []

    def run() -> None:
        seen.append(gc.isenabled())
        if fails:
            raise KeyError("the error itself")

    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(KeyError) if fails else nullcontext():
            capture(EmulatedDevice(), run)
        assert (seen, gc.isenabled()) == ([False], enabled)
    finally:
        (gc.enable if before else gc.disable)()


def test_an_error_of_torch_itself() -> None:
    device, x = EmulatedDevice(), torch.ones(2, 3)

    def run() -> None:
        x @ x

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        capture(device, run)
    _captures_and_replays(device)


def test_a_refused_capture_does_not_refuse_the_next_one() -> None:
    """After a read of unjoined work its stream can be forked and joined again."""
    device, x = EmulatedDevice(), torch.ones(2)
    side = device.stream("side")

    def bad() -> None:
        with side.fork():
            y = x * 2
        y + 1

    with pytest.raises(CaptureError):
        capture(device, bad)
    _captures_and_replays(device)


# --- the host -------------------------------------------------------------------------------------------------------


def _metadata() -> dict[str, CacheMetadata]:
    empty = torch.zeros(1, dtype=torch.int32)
    return {"a": CacheMetadata(0, 1, 1, 1, 1, empty, empty, empty, empty)}


def test_host_answers() -> None:
    context = ForwardContext()
    host = LocalHost(context, torch.device("cpu"))
    assert not host.forward_context_available() and not host.capturing() and host.attention_metadata() is None
    metadata, seen = _metadata(), []
    with host.running(metadata):
        assert host.forward_context_available() and host.attention_metadata() is metadata
        assert host.graph_mode() == "NONE" and not host.capturing()
        host.capture(lambda: seen.append((host.capturing(), host.graph_mode())))
        with context.running(metadata, GraphMode.PIECEWISE):
            assert host.graph_mode() == "PIECEWISE"
        assert host.graph_mode() == "NONE"
    assert seen == [(True, "NONE")]
    assert not host.forward_context_available() and not host.capturing()
    assert host.tp_group.size == 1 and host.tp_group.min(3) == 3
    assert host.tp_group.all_gather(torch.ones(2)).shape == (1, 2)


def test_host_leaves_its_context_on_an_error() -> None:
    context = ForwardContext()
    host = LocalHost(context, torch.device("cpu"))
    with pytest.raises(KeyError):
        with host.running(_metadata()):
            raise KeyError
    assert not host.forward_context_available()


def test_host_streams_take_part_in_its_captures() -> None:
    host, x = LocalHost(ForwardContext(), torch.device("cpu")), torch.ones(2)
    side = host.emulated_stream("side")

    def run() -> None:
        with side.fork():
            x + 1

    with pytest.raises(CaptureError, match="unjoined work on side"):
        host.capture(run)
