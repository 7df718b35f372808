"""Humming's weight kernels on a machine without a GPU: its own sources compiled for the host, launched by its own code.

What stands in: the compiler, the launch (every thread of the grid, one after the other), and the questions to the
device, which answer as an H200. Tensors stay on the CPU and say that they are on CUDA.
"""

import contextlib
import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

CXX = shutil.which("c++")

# What CUDA's headers give the kernels. Of Humming's own all.cuh, the kernels for weights need base.cuh alone.
_CUDA = """\
#pragma once
#include <cassert>
#include <cmath>
#include <cstdint>
#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
struct Index { uint32_t x, y, z; };
struct uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
static Index threadIdx, blockIdx, blockDim, gridDim;
static void __syncthreads() {}
"""

# A block with a barrier runs twice: the second time, shared memory holds all that its threads loaded before it.
_LAUNCH = """
extern "C" void launch(Index grid, Index block, ARGUMENTS) {
  gridDim = grid, blockDim = block;
  for (blockIdx.z = 0; blockIdx.z < grid.z; blockIdx.z++)
    for (blockIdx.y = 0; blockIdx.y < grid.y; blockIdx.y++)
      for (blockIdx.x = 0; blockIdx.x < grid.x; blockIdx.x++)
        for (int round = 0; round < ROUNDS; round++)
          for (threadIdx.x = 0; threadIdx.x < block.x; threadIdx.x++) KERNEL(NAMES);
}
"""


class _Index(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint32), ("y", ctypes.c_uint32), ("z", ctypes.c_uint32)]


# Of each kernel: its parameters, as C++ declares them, and how often a block runs. The first works in place.
_KERNELS = {
    "process_mxfp4_w4a8": ("uint4 *a, uint4 *b, uint8_t *c, uint32_t d", 1),
    "weight_repack_nk": (
        "uint32_t *a, uint32_t *b, uint32_t *c, uint32_t d, uint32_t e, uint32_t f, uint32_t g, uint32_t h",
        2,
    ),
}


def _compile(code: str, kernel: str, folder: Path) -> ctypes.CDLL:
    """A library with the instance `kernel` of a template in `code`."""
    import humming

    name = kernel.partition("<")[0]
    parameters, rounds = _KERNELS[name]
    names = ", ".join(re.findall(r"\w+(?=,|$)", parameters))
    include = folder / "include"
    (include / "humming" / "utils").mkdir(parents=True, exist_ok=True)
    (include / "cuda.h").write_text(_CUDA)
    (include / "humming" / "utils" / "all.cuh").write_text("#include <humming/utils/base.cuh>\n")
    launch = _LAUNCH.replace("ARGUMENTS", parameters).replace("KERNEL", kernel)
    launch = launch.replace("NAMES", names).replace("ROUNDS", str(rounds))
    number = len(list(folder.glob("*.so")))
    source, library = folder / f"{name}-{number}.cpp", folder / f"{name}-{number}.so"
    source.write_text("#include <cuda.h>\n" + code + launch)
    flags = ["-std=c++17", "-O2", "-fno-strict-aliasing", "-w", "-shared", "-fPIC"]
    paths = [f"-I{include}", f"-I{Path(humming.__file__).parent / 'include'}"]
    assert CXX is not None
    subprocess.run([CXX, *flags, *paths, "-o", str(library), str(source)], check=True)
    return ctypes.CDLL(str(library))


class HostHumming:
    """Humming's kernels, compiled once each into `folder`; `launched` lists the launches by kernel."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.libraries: dict[str, ctypes.CDLL] = {}
        self.launched: list[str] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """In it, Humming runs its weight kernels on CPU tensors."""
        import cuda.bindings.driver as driver
        import humming.device
        import humming.transform
        from humming.jit.runtime import KernelRuntime

        device = SimpleNamespace(sm_version=90, sm_major=9, sm_minor=0, is_ppu=False, index=0)
        host = self

        def prepare(self: Any) -> None:
            if self.kernel_expr not in host.libraries:
                host.libraries[self.kernel_expr] = _compile(self.code, self.kernel_expr, host.folder)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(humming.device.DeviceInfo, "_get_value", lambda self: device)
            patch.setattr(humming.transform, "DeviceInfo", lambda device: humming.device.current_device)
            patch.setattr(KernelRuntime, "_instances", {})
            patch.setattr(KernelRuntime, "prepare", prepare)
            patch.setattr(KernelRuntime, "load_cubin", lambda self: self.kernel_expr)
            patch.setattr(driver, "cuLaunchKernelEx", self._launch)
            patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
            patch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
            patch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
            yield

    def _launch(self, config: Any, kernel: str, arguments: Any, extra: int) -> None:
        values, types = arguments
        grid = _Index(config.gridDimX, config.gridDimY, config.gridDimZ)
        block = _Index(config.blockDimX, config.blockDimY, config.blockDimZ)
        self.libraries[kernel].launch(grid, block, *(kind(value) for kind, value in zip(types, values, strict=True)))
        self.launched.append(kernel.partition("<")[0])
