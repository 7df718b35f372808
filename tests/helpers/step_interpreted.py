"""The boundary's kernels in Triton's interpreter, on a CPU.

Triton reads TRITON_INTERPRET when it is imported, so this runs in a process of its own, which the test spawns: no
import here at the top may import Triton.
"""

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specialized_decode.boundary.types import UnfinalizedRows
from tests.helpers.step_gates import FixedGroup
from tests.helpers.step_mhc import random_bf16, random_mixer

WIDTHS = (64, 96)
ROWS = (*range(1, 17), 49)
TOPK = (0, 3)
EPS = 1e-6
# The row with values that are no numbers, where there are so many rows.
SPECIAL = 4


def inputs(hidden: int, rows: int, topk: int) -> dict[str, Tensor]:
    """One boundary's inputs, by name."""
    generator = torch.Generator().manual_seed(hidden + rows)
    comb = torch.rand(rows, 4, 4, generator=generator) + 0.05
    found = {
        "residual": random_bf16(1, rows, 4, hidden),
        "post": 2 * torch.rand(rows, 4, generator=generator),
        "comb": comb / comb.sum(1, keepdim=True),
        "pre": torch.rand(rows, 4, generator=generator),
        "norm": random_bf16(2, hidden),
        "shared": random_bf16(3, rows, hidden),
    }
    if topk:
        found["rows"] = random_bf16(4, rows, topk, hidden)
        found["weights"] = torch.rand(rows, topk, generator=generator)
    if rows > SPECIAL:
        found["shared"][SPECIAL, 3] = float("nan")
        found["residual"][SPECIAL - 1, 0, :2] = torch.tensor([-0.0, 2.0**-130])
    return found


def streams(hidden: int, rows: int) -> Tensor:
    return random_bf16(5, rows, 4, hidden)


def run_interpreted(path: str) -> None:
    """Leaves every case's outputs in a file, by kernel and case."""
    assert os.environ["TRITON_INTERPRET"] == "1"
    torch.set_num_threads(1)
    prepare_interpreter(_assembly)
    torch.use_deterministic_algorithms(True)  # Fresh tensors are filled with NaN.
    torch.save({**_boundary_cases(), **_mixes_cases()}, Path(path))


def in_interpreter(run: Callable[[str], None], path: Path, seconds: float) -> Any:
    """What `run` saves under the path that it is given, in a process of its own in which kernels are interpreted."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        process = multiprocessing.get_context("spawn").Process(target=run, args=(str(path),))
        process.start()
    finally:
        del os.environ["TRITON_INTERPRET"]
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
    assert process.exitcode == 0, f"the interpreter's process ended with {process.exitcode}"
    return torch.load(path)


def prepare_interpreter(assembly: Callable[..., Any]) -> None:
    """Has the interpreter round as the hardware does, and run `assembly` where a kernel holds inline assembly."""
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    # Triton 3.6 truncates float32 to bfloat16 there, and rounds FP8 wrongly; the hardware rounds to nearest even.
    interpreter._convert_float = converted
    # Its tensors of one number have a dimension, which numpy takes for no loop bound.
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch
    # It would multiply bfloat16's bits as integers.
    create_dot = interpreter.InterpreterBuilder.create_dot

    def dot(builder: Any, a: Any, b: Any, *arguments: Any) -> Any:
        return create_dot(builder, _widened(a), _widened(b), *arguments)

    interpreter.InterpreterBuilder.create_dot = dot
    # It runs no assembly; a single rank's kernels use it for conversions alone.
    tl.inline_asm_elementwise = assembly
    # Nothing runs before or after an interpreted launch.
    for name in ("gdc_wait", "gdc_launch_dependents"):
        setattr(tl.extra.cuda, name, lambda: None)


def _assembly(asm: str, constraints: str, arguments: Any, dtype: Any, **_: object) -> Any:
    """`widened`, `rounded` and `reciprocal` of the boundary's kernels."""
    import triton.language as tl

    (value,) = arguments
    if asm.startswith("cvt.rn.bf16x2.f32"):
        number = value.to(tl.bfloat16)
        return number, number.to(tl.float32)
    if asm.startswith("rcp.approx.ftz.f32"):
        return 1 / value
    assert asm.startswith("shl.b32") and dtype == tl.float32, asm
    return value.to(tl.float32)


def _widened(handle: Any) -> Any:
    """An interpreted tensor of bfloat16 bits as float32."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle(converted(handle.data, tl.bfloat16, tl.float32, None).view(np.float32), tl.float32)


def converted(values: Any, source: Any, target: Any, rounding: object) -> Any:
    """Values of one float format as the bits of another, by torch; bfloat16 and FP8 are bits to numpy."""
    types = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp8e4nv": torch.float8_e4m3fn}
    bits = {8: torch.uint8, 16: torch.int16, 32: torch.int32}
    raw = torch.from_numpy(np.ascontiguousarray(values).reshape(-1).view(f"i{source.primitive_bitwidth // 8}").copy())
    result = raw.view(types[source.name]).to(types[target.name]).view(bits[target.primitive_bitwidth]).numpy()
    return result.view(f"u{target.primitive_bitwidth // 8}").reshape(np.shape(values))


def _boundary_cases() -> dict[tuple[object, ...], list[Tensor]]:
    from specialized_decode.boundary.fused import FusedBoundary

    found: dict[tuple[object, ...], list[Tensor]] = {}
    for hidden in WIDTHS:
        fused = FusedBoundary(hidden, max(ROWS), FixedGroup(0, []), torch.device("cpu"))
        for rows in ROWS:
            for topk in TOPK:
                given = inputs(hidden, rows, topk)
                unfinalized = UnfinalizedRows(given["rows"], given["weights"], given["shared"]) if topk else None
                pending = unfinalized or given["shared"]
                common = pending, False, given["residual"], given["post"], given["comb"]
                collapse = given["pre"], given["norm"], EPS
                new, x, quant = fused.run(*common, collapse, True)
                assert x is not None and quant is not None
                alone = fused.run(*common, None, False, settled=True)[0]
                plain_x = fused.run(*common, collapse, False, settled=True)[1]
                assert plain_x is not None
                found["boundary", hidden, rows, topk] = [new, x, quant.values, quant.scales, alone, plain_x]
    return found


def _mixes_cases() -> dict[tuple[object, ...], list[Tensor]]:
    from specialized_decode.boundary.fused import FusedCoefficients

    found: dict[tuple[object, ...], list[Tensor]] = {}
    for hidden in WIDTHS:
        ops, mixer = FusedCoefficients(hidden, max(ROWS), torch.device("cpu")), random_mixer(hidden, hidden)
        ops.prepare_first(mixer)
        ops.prepare(mixer)
        for rows in ROWS:
            given = streams(hidden, rows)
            found["mixes", hidden, rows] = [*ops(given, mixer)]
            found["first", hidden, rows] = [*ops.first(given[:, 0].contiguous(), given, mixer)]
            found["mean", hidden, rows] = [ops.mean(given)]
            found["arrived", hidden, rows] = [ops._arrived.clone()]
    return found
