"""Graph capture on the local host: FULL CUDA graphs on a GPU, an emulation of them on a CPU.

The emulation keeps what makes graphs hard: a capture records operations with the addresses of their tensors, a replay
runs those operations and no Python, nothing may be read back or sized by data while capturing, and work forked to a
side stream must be joined before it is read and before the capture ends.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operations whose result, or whose result's size, the host would have to read back from the device.
_READ_BACK = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "equal",
}


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
        if self.pending:
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
            writer, count = self._written.get(_storage(tensor), (self.current, 0))
            if writer != self.current and clock.get(writer, 0) < count:
                raise CaptureError(f"{func} on {self.current} reads what {writer} wrote, without a join between them")
        clock[self.current] = clock.get(self.current, 0) + 1
        for tensor in outputs:
            if tensor.dtype != torch.uint8:
                self._written[_storage(tensor)] = (self.current, clock[self.current])


class EmulatedGraph(TorchDispatchMode):
    """Records every operation with its tensors; replays them into the same tensors."""

    def __init__(self, device: EmulatedDevice) -> None:
        super().__init__()
        self._device = device
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        # Views and intermediates stay alive: replays write into them.
        self._alive: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in _READ_BACK:
            raise CaptureError(f"{func} reads the device back, which a capture does not permit")
        result = func(*args, **kwargs)
        returns = func._schema.returns
        aliases = [value.alias_info for value in returns]
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._alive.append((args, kwargs, result))
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        if is_view:
            return result
        in_place = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
        written = [a for a in _written_arguments(func, args, kwargs)] if in_place else outputs
        self._device.ran(func, inputs, written)
        self._calls.append((func, args, kwargs, [] if in_place else outputs))
        return result

    def replay(self) -> None:
        """Runs the recorded operations in order."""
        with torch.no_grad():
            for func, args, kwargs, outputs in self._calls:
                result = func(*args, **kwargs)
                for old, new in zip(outputs, tree_leaves(result) if outputs else (), strict=False):
                    if isinstance(new, Tensor) and new.data_ptr() != old.data_ptr():
                        old.copy_(new)


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
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return _CudaGraph(graph)
    emulated = EmulatedGraph(device)
    device.begin()
    try:
        with torch.no_grad(), emulated:
            run()
    except BaseException:
        device.capturing = False
        raise
    device.end()
    return emulated


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    written = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return written
