"""Kernels compiled without a GPU for the architectures that they declare, and what their machine code takes."""

import re
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

ARCHITECTURES = (90, 100, 103)
# Of a multiprocessor, and of a program.
REGISTERS, SHARED_BYTES = 65536, 227 * 1024
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


@dataclass(frozen=True)
class Variant:
    """One launch.

    signature: types of the arguments, in Triton's words; constants: the values of the others; warps: of a program;
    options: further ones of the compiler's; aligned: numbers that are multiples of 16, as all pointers are.
    """

    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    warps: int
    options: Mapping[str, Any] = field(default_factory=dict)
    aligned: Collection[str] = ()


def compile_variant(variant: Variant, architecture: int) -> Any:
    """Triton's compiled kernel. architecture: compute capability times ten."""
    names = list(variant.kernel.arg_names)
    given = {*variant.signature, *variant.constants}
    assert given == set(names), f"found arguments {sorted(names)}, expected {sorted(given)}"
    aligned = [name for name, kind in variant.signature.items() if kind[0] == "*" or name in variant.aligned]
    source = GluonASTSource if isinstance(variant.kernel, GluonJITFunction) else ASTSource
    return triton.compile(
        source(
            fn=variant.kernel,
            signature={name: variant.signature.get(name, "constexpr") for name in names},
            constexprs={(names.index(name),): value for name, value in variant.constants.items()},
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
        ),
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": variant.warps, "launch_pdl": True, **variant.options},
    )


def machine_code(kernel: Any, folder: Path) -> Path:
    """The kernel's cubin, written into a folder."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    return cubin


def resources(kernel: Any, folder: Path) -> dict[str, int]:
    """Of the machine code: registers of a thread (REG), its bytes of stack and local memory (STACK, LOCAL), and shared
    memory of a program (SHARED)."""
    command = [str(TOOLS / "cuobjdump"), "--dump-resource-usage", str(machine_code(kernel, folder))]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said)}
    assert found.keys() == {"REG", "STACK", "LOCAL"}, said
    return {**found, "SHARED": kernel.metadata.shared}


def program_registers(found: Mapping[str, int], warps: int) -> int:
    """Registers of a program: they are given to a warp in units of eight a thread."""
    return -(-found["REG"] // 8) * 8 * 32 * warps


def assert_fits(
    name: str,
    found: Mapping[str, int],
    warps: int,
    *,
    programs: int = 1,
    registers: int = REGISTERS,
    shared: int = SHARED_BYTES,
) -> None:
    """No spills; `programs` programs have their registers, and one its shared memory."""
    table = f"{name}, {32 * warps} threads: {dict(found)}"
    print(table)
    assert found["STACK"] == 0 and found["LOCAL"] == 0, f"spills: {table}"
    assert program_registers(found, warps) * programs <= registers, f"registers: {table}"
    assert found["SHARED"] <= shared, f"shared memory: {table}"
