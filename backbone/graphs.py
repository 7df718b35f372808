"""Graph capture on the local host: FULL CUDA graphs on a GPU, an emulation of them on a CPU.

The emulation keeps what makes graphs hard: a capture records operations with the addresses of their tensors, a replay
runs those operations and no Python, nothing may be read back or sized by data while capturing, and work forked to a
side stream must be joined before it is read and before the capture ends.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Graph(Protocol):
    """A captured graph."""

    def replay(self) -> None:
        """Runs the recorded work on the recorded addresses."""


class CaptureError(RuntimeError):
    """A capture did something a graph cannot hold."""


class EmulatedStream:
    """A side stream on a machine without streams: work runs at once, and the capture checks its order."""

    def __init__(self, name: str, device: "EmulatedDevice") -> None:
        self.name, self._device = name, device
        self.pending = False

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Work inside is on this stream, after all that the current stream has been given so far."""
        before = self._device.current
        self._device.order_after(self.name, before)
        self.pending = True
        self._device.current = self.name
        try:
            yield
        finally:
            self._device.current = before

    def join(self) -> None:
        """The current stream goes on after this stream's work."""
        if self.pending and self._device.current != self.name:
            self._device.order_after(self._device.current, self.name)
            self.pending = False


class EmulatedDevice:
    """Streams as vector clocks, and the capture in progress."""

    MAIN = "main"

    def __init__(self) -> None:
        self.current = self.MAIN
        self.capturing = False
        self.streams: list[EmulatedStream] = []
        self._clocks: dict[str, dict[str, int]] = {}
        self._written: dict[int, tuple[str, int]] = {}

    def stream(self, name: str) -> EmulatedStream:
        stream = EmulatedStream(name, self)
        self.streams.append(stream)
        return stream

    def order_after(self, later: str, earlier: str) -> None:
        """`later` has seen all that `earlier` has done and seen."""
        clock = self._clocks.setdefault(later, {})
        for name, count in self._clocks.get(earlier, {}).items():
            clock[name] = max(clock.get(name, 0), count)

    def begin(self) -> None:
        self.capturing = True
        self._clocks, self._written = {}, {}
        for stream in self.streams:
            stream.pending = False

    def end(self) -> None:
        """Ends the capture. Raises CaptureError, as a GPU does, when forked work was not joined."""
        self.capturing = False
        unjoined = [stream.name for stream in self.streams if stream.pending]
        for stream in self.streams:
            stream.pending = False
        if unjoined:
            raise CaptureError(f"capture ended with unjoined work on {', '.join(unjoined)}")

    def ran(self, func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Notes an operation on the current stream. Raises CaptureError when it reads unjoined work.

        Pages of several caches share one buffer of bytes, which is told apart by its readers' joins only; so bytes
        are left out.
        """
        clock = self._clocks.setdefault(self.current, {})
        for tensor in inputs:
            if not tensor.numel():
                continue
            writer, count = self._written.get(_storage(tensor), (self.current, 0))
            if writer != self.current and clock.get(writer, 0) < count:
                raise CaptureError(f"{func} on {self.current} reads what {writer} wrote, without a join between them")
        clock[self.current] = clock.get(self.current, 0) + 1
        for tensor in outputs:
            if tensor.dtype != torch.uint8 and tensor.numel():
                self._written[_storage(tensor)] = (self.current, clock[self.current])


@dataclass
class _Call:
    """One recorded operation. `fills` name the places in its arguments that take the values of earlier ones."""

    func: Any
    args: list[Any]
    kwargs: dict[str, Any]
    fills: list[tuple[Any, Any, int]]
    results: list[int]
    dead: list[int] = field(default_factory=list)


class EmulatedGraph(TorchDispatchMode):
    """Records every operation; a replay runs them again in order, on the same outside tensors.

    Tensors that existed before the capture are used where they lie. Of those made inside, the ones still alive when
    it ends are a graph's outputs: a replay copies into them. All others are made anew and dropped after their last
    use, as a graph's memory pool would.
    """

    def __init__(self, device: EmulatedDevice) -> None:
        super().__init__()
        self._device = device
        self._calls: list[_Call] = []
        # While capturing: every tensor made inside with its slot. The references keep addresses from being reused.
        self._slots: dict[int, int] = {}
        self._made: list[Any] = []
        self._outputs: list[tuple[int, Tensor]] = []
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _reads_back(func, args, kwargs or {}):
            raise CaptureError(f"{func} reads the device back, which a capture does not permit")
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        if not any(a is not None and not a.is_write for a in (value.alias_info for value in schema.returns)):
            written = _written_arguments(func, args, kwargs or {}) or _tensors(result)
            self._device.ran(func, _tensors((args, kwargs)), written)
        self._record(func, args, kwargs or {}, result)
        return result

    def _record(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        fills: list[tuple[Any, Any, int]] = []
        call = _Call(func, self._template(list(args), fills), self._template(dict(kwargs), fills), fills, [])
        for tensor in _tensors(result):
            if id(tensor) not in self._slots:
                self._slots[id(tensor)] = len(self._made)
                self._made.append(tensor)
            call.results.append(self._slots[id(tensor)])
        self._calls.append(call)

    def _template(self, container: Any, fills: list[tuple[Any, Any, int]]) -> Any:
        """`container` with the values made inside the capture taken out, and noted in `fills`."""
        places = container.items() if isinstance(container, dict) else enumerate(container)
        for place, value in list(places):
            if isinstance(value, Tensor) and id(value) in self._slots:
                fills.append((container, place, self._slots[id(value)]))
                container[place] = None
            elif isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
                container[place] = self._template(list(value), fills)
        return container

    def finish(self) -> None:
        """Ends the recording: keeps the outputs, forgets the rest, and notes where each value is used last."""
        self._count = len(self._made)
        alive = [weakref.ref(tensor) for tensor in self._made]
        self._made.clear()
        self._slots.clear()
        self._outputs = [(slot, tensor) for slot, ref in enumerate(alive) if (tensor := ref()) is not None]
        pending = set(range(self._count)) - {slot for slot, _ in self._outputs}
        for call in reversed(self._calls):
            used = {slot for _, _, slot in call.fills} | set(call.results)
            call.dead = sorted(used & pending)
            pending -= used

    def replay(self) -> None:
        """Runs the recorded operations in order."""
        values: list[Any] = [None] * self._count
        with torch.no_grad():
            for call in self._calls:
                for container, place, slot in call.fills:
                    container[place] = values[slot]
                result = call.func(*call.args, **call.kwargs)
                if isinstance(result, Tensor):
                    values[call.results[0]] = result
                else:
                    for slot, value in zip(call.results, _tensors(result), strict=True):
                        values[slot] = value
                for container, place, _ in call.fills:
                    container[place] = None
                for slot in call.dead:
                    values[slot] = None
            for slot, output in self._outputs:
                output.copy_(values[slot])


def _capture_cuda(run: Callable[[], None]) -> Graph:
    graph = torch.cuda.CUDAGraph()
    failure: BaseException | None = None
    try:
        with torch.cuda.graph(graph):
            try:
                run()
            except BaseException as error:
                # Ending an invalidated capture raises an error of its own, which must not hide this one.
                failure = error
    except RuntimeError:
        if failure is None:
            raise
    if failure is not None:
        raise failure
    return _CudaGraph(graph)


class _CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()


def capture(device: EmulatedDevice | None, run: Callable[[], None]) -> Graph:
    """Captures `run` once. device: the emulated device, or None for the current CUDA device.

    An error inside `run` reaches the caller as itself.
    """
    if device is None:
        return _capture_cuda(run)
    emulated = EmulatedGraph(device)
    device.begin()
    try:
        with torch.no_grad(), emulated:
            run()
    except BaseException:
        device.capturing = False
        raise
    device.end()
    emulated.finish()
    return emulated


def _reads_back(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the host would have to wait for the device: for a value, a size that depends on one, or a copy."""
    aten, packet = torch.ops.aten, func.overloadpacket
    if packet is aten.index:
        return _has_mask(args[1])
    if packet in (aten.index_put, aten.index_put_):
        return _has_mask(args[1]) and args[2].numel() != 1
    if packet is aten.repeat_interleave:
        return kwargs.get("output_size") is None
    if packet is aten.lift_fresh:
        return args[0].dim() > 0
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def _has_mask(indices: Any) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    written = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written += _tensors(value)
    return written
