"""Runs Triton and Gluon kernels on a CPU as plain Python over torch tensors, inline assembly included.

Triton's interpreter knows neither Gluon nor assembly. Here a kernel's own function runs, program by program, with its
language module replaced; layouts are ignored, which a compiler checks. Every access is held to its tensor's bounds, and
assembly is read instruction by instruction: those that the kernels use, as PTX ISA 8.5 defines them.
"""

import functools
import math
import re
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

Index = Any
# The running program's number on each axis: one for all, since functions of one module serve kernels of another.
RUNNING = [0, 0]


class Value:
    """A tensor of numbers; integers are held as int64."""

    def __init__(self, data: Tensor) -> None:
        self.data = data if data.is_floating_point() or data.dtype == torch.bool else data.long()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> "Value":
        if not bitcast:
            return Value(self.data.to(dtype))
        if self.data.is_floating_point():
            return Value(self.data.view(torch.int32))
        return Value(self.data.int().view(dtype))

    def __getitem__(self, index: Index) -> "Value":
        return Value(self.data[index])

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)

    def __neg__(self) -> "Value":
        return Value(-self.data)


def _operator(name: str) -> Callable[[Value, Any], Any]:
    def apply(self: Value, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        return Value(getattr(self.data, name)(raw(other)))

    return apply


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift")
for _name in (*_BINARY, *(f"r{name}" for name in ("add", "sub", "mul", "truediv", "and", "or"))):
    setattr(Value, f"__{_name}__", _operator(f"__{_name}__"))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Value, f"__{_name}__", _operator(f"__{_name}__"))
Value.__hash__ = object.__hash__  # type: ignore[method-assign]


class Pointer:
    """Places in a tensor's memory."""

    def __init__(self, memory: Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset

    def __add__(self, other: Any) -> "Pointer":
        return Pointer(self.memory, raw(other) + self.offset)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(torch.as_tensor(self.offset).shape)

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.memory.dtype)


def raw(value: Any) -> Any:
    return value.data if isinstance(value, Value) else value


def _places(pointer: Pointer, mask: Any) -> tuple[Tensor, Tensor]:
    """Offsets and which of them count; out of bounds is an error."""
    offset = torch.as_tensor(pointer.offset)
    offset, inside = torch.broadcast_tensors(offset, torch.as_tensor(True if mask is None else raw(mask)))
    size = pointer.memory.numel()
    wrong = inside & ((offset < 0) | (offset >= size))
    assert not wrong.any(), f"found an access at {int(offset[wrong][0])} of a tensor of {size}"
    return torch.where(inside, offset, 0), inside


def load(pointer: Pointer, mask: Any = None, other: Any = 0, **_: object) -> Value:
    places, inside = _places(pointer, mask)
    memory = pointer.memory.view(torch.int16) if pointer.memory.dtype == torch.uint16 else pointer.memory
    found = Value(memory[places])
    if pointer.memory.dtype == torch.uint16:
        found = Value(found.data & 0xFFFF)
    return Value(torch.where(inside, found.data, torch.as_tensor(other, dtype=found.data.dtype)))


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    places, inside = _places(pointer, mask)
    values = torch.as_tensor(raw(value)).to(pointer.memory.dtype).broadcast_to(places.shape)
    where, what = places[inside], values[inside]
    pointer.memory[where] = what
    again = pointer.memory[where]
    same = (again == what) | (again.isnan() & what.isnan() if what.is_floating_point() else False)
    assert bool(torch.as_tensor(same).all()), "found different values for the same place"


def atomic_add(pointer: Pointer, value: Any, mask: Any = None, sem: str = "acq_rel") -> Value:
    """Of places that differ."""
    before = load(pointer, mask)
    store(pointer, Value(before.data + raw(value)), mask)
    return before


# --- inline assembly --------------------------------------------------------------------------------------------


def assembly(
    asm: str, constraints: str, arguments: Sequence[Value | Pointer], dtype: Any, is_pure: bool, pack: int
) -> Value | tuple[Value, ...]:
    """One element a register."""
    assert pack == 1
    many = isinstance(dtype, tuple)
    types = dtype if many else (dtype,)
    registers: dict[str, Tensor] = {}
    for number, argument in enumerate(arguments):
        if isinstance(argument, Pointer):
            # Only prefetches take addresses, of so many bytes.
            size = re.search(r"prefetch\S* \[\$\d\], (\d+)", asm)
            assert size is not None, f"found an address in {asm}"
            _places(argument + (int(size[1]) // argument.memory.itemsize - 1), None)
            continue
        data = torch.as_tensor(raw(argument))
        bits = data.view(torch.int32) if data.is_floating_point() else data
        registers[f"${len(types) + number}"] = bits.long() & 0xFFFFFFFF
    for name, operands in _instructions(asm):
        _execute(name, operands, registers)
    found = []
    for number, kind in enumerate(types):
        signed = torch.as_tensor(registers[f"${number}"]).to(torch.int32)
        found.append(Value(signed.view(torch.float32) if kind == torch.float32 else signed))
    return tuple(found) if many else found[0]


@functools.cache
def _instructions(asm: str) -> list[tuple[str, list[str]]]:
    """Names and operands, registers in braces as one operand; what a CPU need not do is left out."""
    found = []
    for part in asm.split(";"):
        text = (part.strip(" {}\n\t") if "mma" not in part and "mov.b32" not in part else part).strip()
        if text and not text.startswith(("griddepcontrol", "bar.sync", "cp.async", ".reg", "}")):
            name, operands = text.lstrip("{ \n").split(None, 1)
            found.append((name, re.findall(r"\{[^}]*\}|[^,\s]+", operands)))
    return found


def _execute(name: str, lists: list[str], registers: dict[str, Tensor]) -> None:
    values = [_operand(one, registers) for one in lists[1:]]
    target = lists[0]
    if name.startswith("mma.sync"):
        results = _multiply(
            name, [registers[one.strip()] for group in lists[1:] for one in group.strip("{}").split(",")]
        )
        for one, result in zip(target.strip("{}").split(","), results, strict=True):
            registers[one.strip()] = result
    elif name == "mov.b32" and target[0] == "{":
        for one, shift in zip(target.strip("{}").split(","), (0, 16), strict=True):
            registers[one.strip()] = values[0] >> shift & 0xFFFF
    else:
        registers[target] = _PLAIN[name](*values) & 0xFFFFFFFF


def _operand(text: str, registers: dict[str, Tensor]) -> Any:
    if text[0] == "{":
        return None
    return registers[text] if text in registers else _number(text)


@functools.cache
def _number(text: str) -> Tensor:
    return torch.tensor(int(text, 0))


def _permute(a: Tensor, b: Tensor, selector: Tensor) -> Tensor:
    """prmt.b32: a nibble of the selector picks one of eight bytes; its top bit spreads that byte's sign."""
    both, result = a | b << 32, torch.zeros_like(a)
    for place in range(4):
        nibble = selector >> 4 * place & 15
        byte = both >> 8 * (nibble & 7) & 0xFF
        result = result | torch.where(nibble >= 8, torch.where(byte >= 128, 0xFF, 0), byte) << 8 * place
    return result


def _logic(a: Tensor, b: Tensor, c: Tensor, table: Tensor) -> Tensor:
    """lop3.b32: a table of eight bits, looked up with a bit of each of the three."""
    result = torch.zeros_like(a | b | c)
    for case in range(8):
        if int(table) >> case & 1:
            result = result | (a if case & 4 else ~a) & (b if case & 2 else ~b) & (c if case & 1 else ~c)
    return result


def _fp8_pair(halves: Tensor) -> Tensor:
    """cvt.rn.f16x2.e4m3x2: the low byte is the low half."""
    parts = [(halves >> shift & 0xFF).to(torch.uint8).view(torch.float8_e4m3fn).half() for shift in (0, 8)]
    low, high = (part.view(torch.int16).long() & 0xFFFF for part in parts)
    return low | high << 16


def _bfloat16_pair(a: Tensor, b: Tensor) -> Tensor:
    """mul.rn.bf16x2."""
    parts = []
    for shift in (0, 16):
        left, right = ((one >> shift & 0xFFFF).to(torch.int16).view(torch.bfloat16) for one in (a, b))
        parts.append((left * right).view(torch.int16).long() & 0xFFFF)
    return parts[0] | parts[1] << 16


_PLAIN: dict[str, Callable[..., Tensor]] = {
    "prmt.b32": _permute,
    "lop3.b32": _logic,
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, count: a >> count,
    "or.b32": lambda a, b: a | b,
    "mul.rn.bf16x2": _bfloat16_pair,
    "shf.r.wrap.b32": lambda low, high, count: (low | high << 32) >> count,
    "shl.b32": lambda a, count: a << count,
    "mov.u32": lambda a: a,
    "mul.lo.u32": lambda a, b: a * b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "cvt.rn.f16x2.e4m3x2": _fp8_pair,
}


def _multiply(name: str, registers: list[Tensor]) -> list[Tensor]:
    """mma.m16n8k16 of every warp's 32 lanes, the last dimension; sums rounded once."""
    dtype = torch.bfloat16 if ".bf16." in name else torch.float16
    words = torch.stack(torch.broadcast_tensors(*registers), -2)
    pairs = words[..., :6, :]
    halves = torch.stack((pairs & 0xFFFF, pairs >> 16), -2).to(torch.int16).view(dtype).double().flatten(-3)
    sums = (halves[..., _LEFT] @ halves[..., _RIGHT]).flatten(-2)[..., _SUMS]
    before = words[..., 6:, :].to(torch.int32).view(torch.float32).double()
    results = (before + sums).float().view(torch.int32).long() & 0xFFFFFFFF
    return list(results.unbind(-2))


def _fragment(rows: Tensor, columns: Tensor, first: int) -> Tensor:
    """Which of the registers' halves, 64 a register, is which number of a matrix whose `columns` lie in pairs:
    registers from `first` on hold eight rows and columns each, a lane a row's pair."""
    register = first + rows // 8 + 2 * (columns // 8)
    return (register * 2 + columns % 2) * 32 + rows % 8 * 4 + columns % 8 // 2


_LEFT = _fragment(torch.arange(16)[:, None], torch.arange(16)[None, :], 0)
# The right matrix's columns are its registers' rows; it has eight.
_RIGHT = _fragment(torch.arange(8)[None, :], torch.arange(8)[:, None], 4)
_RIGHT = torch.cat((_RIGHT, _RIGHT + 64))
# Of [16, 8] sums, those of each lane: two neighbours of a row, and of the row eight further on.
_LANE = torch.arange(32)
_SUMS = torch.stack([_LANE // 4 * 8 + _LANE % 4 * 2 + more for more in (0, 1, 64, 65)])


# --- the language -----------------------------------------------------------------------------------------------


def _reduced(name: str) -> Callable[[Value, int], Value]:
    def reduce(value: Value, axis: int) -> Value:
        data = value.data
        if name == "sum":
            return Value(data.sum(axis))
        if data.is_floating_point():
            # A reduction's maximum passes NaN over.
            data = torch.where(data.isnan(), -torch.inf if name == "amax" else torch.inf, data)
        return Value(getattr(data, name)(axis))

    return reduce


def _where(condition: Any, yes: Any, no: Any) -> Value:
    return Value(torch.where(torch.as_tensor(raw(condition)), raw(yes), raw(no)))


def _unary(function: Callable[[Tensor], Tensor]) -> Callable[[Value], Value]:
    return lambda value: Value(function(value.data))


def language(program: Callable[[int], int]) -> SimpleNamespace:
    """What stands for `triton.language` and for Gluon's; program: the running program's number on an axis."""
    nothing = SimpleNamespace(cuda=SimpleNamespace(gdc_wait=lambda: None, gdc_launch_dependents=lambda: None))
    return SimpleNamespace(
        program_id=program,
        load=load,
        store=store,
        atomic_add=atomic_add,
        debug_barrier=lambda: None,
        inline_asm_elementwise=assembly,
        arange=lambda start, stop, layout=None: Value(torch.arange(start, stop)),
        zeros=lambda shape, dtype, layout=None: Value(torch.zeros(tuple(shape), dtype=dtype)),
        full=lambda shape, value, dtype, layout=None: Value(torch.full(tuple(shape), value, dtype=dtype)),
        where=_where,
        minimum=lambda a, b: Value(torch.minimum(*map(torch.as_tensor, (raw(a), raw(b))))),
        abs=_unary(torch.abs),
        exp=_unary(torch.exp),
        log=_unary(torch.log),
        sqrt=_unary(torch.sqrt),
        sum=_reduced("sum"),
        max=_reduced("amax"),
        min=_reduced("amin"),
        join=lambda a, b: Value(torch.stack((a.data, b.data), -1)),
        split=lambda value: tuple(Value(part) for part in value.data.unbind(-1)),
        reshape=lambda value, shape: Value(value.data.reshape(tuple(shape))),
        convert_layout=lambda value, layout, assert_trivial=False: value,
        allocate_shared_memory=Shared,
        rsqrt=_unary(torch.rsqrt),
        SwizzledSharedLayout=lambda *_: None,
        BlockedLayout=lambda *_: None,
        SliceLayout=lambda *_: None,
        static_range=range,
        extra=nothing,
        constexpr=lambda value: value,
        int32=torch.int32,
        int64=torch.int64,
        float16=torch.float16,
        float32=torch.float32,
        bfloat16=torch.bfloat16,
    )


class Shared:
    """Shared memory; NaN, or what no address is, until it is written."""

    def __init__(self, dtype: torch.dtype, shape: Sequence[int], layout: object) -> None:
        self.memory = torch.full(tuple(shape), torch.nan if dtype.is_floating_point else -(1 << 30), dtype=dtype)

    def index(self, number: int) -> "Shared":
        part = Shared.__new__(Shared)
        part.memory = self.memory[number]
        return part

    def store(self, value: Value) -> None:
        self.memory.copy_(value.data)

    def load(self, layout: object) -> Value:
        return Value(self.memory.clone())


def _copy(place: Shared, pointer: Pointer, mask: Any = None) -> None:
    assert place.memory.shape == pointer.shape
    place.store(load(pointer, mask))


# Copies are there at once.
ASYNC_COPY = SimpleNamespace(
    async_copy_global_to_shared=_copy, commit_group=lambda: None, wait_group=lambda outstanding: None
)


def _memory(tensor: Tensor) -> Tensor:
    """What lies from a tensor's first number to its last, in a row."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((last + 1,), (1,))


class Emulated:
    """A kernel that is launched as ever, on CPU tensors. Programs run in a shuffled order if asked."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.launches: list[int] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(
            *arguments: Any, num_warps: int, launch_pdl: bool, maxnreg: int | None = None, **constants: Any
        ) -> None:
            given = [Pointer(_memory(one)) if isinstance(one, Tensor) else one for one in arguments]
            programs = math.prod(grid)
            self.launches.append(programs)
            for number in torch.randperm(programs, generator=torch.Generator().manual_seed(programs)).tolist():
                RUNNING[:] = number % grid[0], number // grid[0]
                self.kernel.fn(*given, **constants)

        return launch


def emulate(patch: pytest.MonkeyPatch, launcher: ModuleType, modules: Sequence[ModuleType]) -> dict[str, Emulated]:
    """Replaces, in `modules`, the language and every jitted function by what runs here, and the kernels that `launcher`
    launches; returns those."""
    from triton.language import constexpr
    from triton.runtime.jit import JITFunction

    substitute = language(RUNNING.__getitem__)
    kernels: dict[str, Emulated] = {}
    originals = {name: value for name, value in vars(launcher).items() if isinstance(value, JITFunction)}
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                patch.setattr(module, name, value.fn)
            elif isinstance(value, constexpr):
                patch.setattr(module, name, value.value)
        for name in ("gl", "tl"):
            if hasattr(module, name):
                patch.setattr(module, name, substitute)
        if hasattr(module, "async_copy"):
            patch.setattr(module, "async_copy", ASYNC_COPY)
    for name, kernel in originals.items():
        kernels[name] = Emulated(kernel)
        patch.setattr(launcher, name, kernels[name])
    return kernels
