"""Graph capture on the local host: FULL CUDA graphs on a GPU, an emulation of them on a CPU.

The emulation keeps what makes graphs hard: a capture records operations with the addresses of their tensors, a replay
runs those operations and no Python, nothing may be read back or sized by data while capturing, and work forked to a
side stream must be joined before it is read and before the capture ends.
"""

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

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


class _Value(NamedTuple):
    """Stands in a recorded call's arguments for the value that an earlier call made."""

    slot: int


@dataclass
class _Call:
    """One recorded operation: a function, its arguments, and the slots that its results take."""

    func: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    results: list[int]
    single: bool


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
        self._program: Callable[[], None] = lambda: None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _reads_back(func, args, kwargs):
            raise CaptureError(f"{func} reads the device back, which a capture does not permit")
        result = func(*args, **kwargs)
        inputs = _tensors((args, kwargs))
        if any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns):
            if not any(id(tensor) in self._slots for tensor in inputs):
                # A view of tensors that stay where they lie is the same in every replay.
                return result
            written = []
        else:
            written = _written_arguments(func, args, kwargs)
            self._device.ran(func, inputs, written or _tensors(result))
        self._record(func, args, kwargs, result, {id(tensor) for tensor in written})
        return result

    def _record(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any, written: set[int]) -> None:
        given, named = [self._template(a) for a in args], {name: self._template(a) for name, a in kwargs.items()}
        results = []
        for tensor in _tensors(result):
            if id(tensor) in written and id(tensor) not in self._slots:
                continue  # an outside tensor that was written in place
            if id(tensor) not in self._slots:
                self._slots[id(tensor)] = len(self._made)
                self._made.append(tensor)
            results.append(self._slots[id(tensor)])
        self._calls.append(_Call(_binding(func), given, named, results, isinstance(result, Tensor)))

    def _template(self, value: Any) -> Any:
        """An argument with the values made inside the capture replaced by their slots."""
        if isinstance(value, Tensor):
            return _Value(self._slots[id(value)]) if id(value) in self._slots else value
        if isinstance(value, (list, tuple)):
            return [self._template(item) for item in value]
        return value

    def finish(self) -> None:
        """Ends the recording: keeps the outputs, forgets the rest, and makes the program that replays run."""
        alive = [weakref.ref(tensor) for tensor in self._made]
        self._made.clear()
        self._slots.clear()
        outputs = [(slot, tensor) for slot, ref in enumerate(alive) if (tensor := ref()) is not None]
        self._program = _compile(self._calls, outputs)

    def replay(self) -> None:
        """Runs the recorded operations in order."""
        with torch.no_grad():
            self._program()


def _compile(calls: list[_Call], outputs: list[tuple[int, Tensor]]) -> Callable[[], None]:
    """The calls as one Python function, a line each: its local variables cost less than a list of values would."""
    names: dict[str, Any] = {}

    def name(value: Any) -> str:
        names[f"k{len(names)}"] = value
        return f"k{len(names) - 1}"

    def shown(value: Any) -> str:
        if isinstance(value, _Value):
            return f"v{value.slot}"
        if isinstance(value, list):
            return "[" + ", ".join(shown(item) for item in value) + "]"
        return repr(value) if value is None or type(value) in (bool, int) else name(value)

    last_use = {slot: len(calls) for slot, _ in outputs}
    for index in range(len(calls) - 1, -1, -1):
        for slot in {*_slots_in(calls[index].args), *_slots_in(calls[index].kwargs.values()), *calls[index].results}:
            last_use.setdefault(slot, index)
    dead: dict[int, list[str]] = {}
    for slot, index in last_use.items():
        dead.setdefault(index, []).append(f"v{slot}")
    lines = ["def program():"]
    for index, call in enumerate(calls):
        arguments = [shown(a) for a in call.args] + [f"{key}={shown(a)}" for key, a in call.kwargs.items()]
        target = ", ".join(f"v{slot}" for slot in call.results) + ("," if call.results and not call.single else "")
        lines.append(f" {target + ' = ' if target else ''}{name(call.func)}({', '.join(arguments)})")
        if index in dead:
            lines.append(f" del {', '.join(dead[index])}")
    lines += [f" {name(output)}.copy_(v{slot})" for slot, output in outputs]
    exec(compile("\n".join([*lines, " return"]), "<captured graph>", "exec"), names)
    program: Callable[[], None] = names["program"]
    return program


def _slots_in(values: Iterable[Any]) -> Iterator[int]:
    for value in values:
        if isinstance(value, _Value):
            yield value.slot
        elif isinstance(value, list):
            yield from _slots_in(value)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keeps the collector out of a capture: a graph that it frees there makes the driver give the capture up."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _capture_cuda(run: Callable[[], None]) -> Graph:
    # What has piled up goes now.
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    failure: BaseException | None = None
    try:
        with _no_garbage_collection(), torch.cuda.graph(graph):
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
        with _no_garbage_collection(), torch.no_grad(), emulated:
            run()
    except BaseException:
        device.capturing = False
        raise
    device.end()
    emulated.finish()
    return emulated


def _binding(func: Any) -> Callable[..., Any]:
    """torch's own Python function for an operator: the same kernel, called in a third of the operator's time."""
    name = func.overloadpacket.__name__
    if name in _BINDINGS:
        return _BINDINGS[name]
    bound = getattr(torch._C._VariableFunctions, name, None) or getattr(torch._C.TensorBase, name, None)
    return func if bound is None else bound


def _to_copy(x: Tensor, *, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    return x.to(dtype=dtype or x.dtype, copy=True, **{k: v for k, v in options.items() if v is not None})


def _slice(x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    return x[(slice(None),) * (dim % x.dim()) + (slice(start, end, step),)]


def _index(x: Tensor, indices: list[Tensor | None]) -> Tensor:
    return x[tuple(slice(None) if index is None else index for index in indices)]


# Operators without a function of their own name.
_BINDINGS: dict[str, Callable[..., Any]] = {"_to_copy": _to_copy, "slice": _slice, "index": _index}


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
