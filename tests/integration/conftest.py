"""vLLM without a GPU: a driver library that finds no device, and a platform that stands for a host with H200s.

These tests run in an environment that has vLLM (CONTRIBUTING.md); elsewhere every file of them is skipped.
"""

import ctypes
import importlib.util
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch


class WithoutVllm(pytest.Module):
    """A file of these tests in an environment without vLLM: skipped unread, also when it is named alone."""

    def collect(self) -> NoReturn:
        pytest.skip("vLLM is not installed in this environment: see CONTRIBUTING.md", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if importlib.util.find_spec("vllm") is not None:
        return None
    return WithoutVllm.from_parent(parent, path=module_path)


# The functions that vLLM's extensions bind when they are loaded; each answers that there is no device.
_DRIVER = """\
cuCtxGetCurrent cuCtxSetCurrent cuDeviceGetAttribute cuDevicePrimaryCtxRetain cuDriverGetVersion cuGetErrorString
cuGetProcAddress_v2 cuMemAddressFree cuMemAddressReserve cuMemCreate cuMemGetAllocationGranularity cuMemMap cuMemRelease
cuMemSetAccess cuMemUnmap cuPointerGetAttribute cuTensorMapEncodeTiled
"""
_NO_DEVICE = 100


def _load_driver(folder: Path) -> None:
    """Loads a stand-in for libcuda.so.1, for this process and those that it starts."""
    source, library = folder / "driver.c", folder / "libcuda.so.1"
    source.write_text("".join(f"int {name}(void) {{ return {_NO_DEVICE}; }}\n" for name in _DRIVER.split()))
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    ctypes.CDLL(str(library))
    os.environ["LD_LIBRARY_PATH"] = os.pathsep.join([str(folder), *os.environ.get("LD_LIBRARY_PATH", "").split()])


def _stand_for_hopper() -> None:
    """Makes vLLM's platform a host with H200s. Before any of its modules binds the platform by name."""
    import vllm.platforms

    from tests.integration.platform import H200Host

    vllm.platforms._current_platform = H200Host()


def pytest_configure() -> None:
    # Nothing is looked up or reported over the network.
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="WARNING")


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


if importlib.util.find_spec("vllm") is not None:
    if not torch.cuda.is_available():
        # Names no device. Without this vLLM, where it finds no driver, replaces Triton by a dummy.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if not _has_driver():
        _driver = tempfile.TemporaryDirectory(prefix="libcuda-")
        _load_driver(Path(_driver.name))
    # Also on a host with a GPU, so that the tests do not depend on which, or how many.
    _stand_for_hopper()


@pytest.fixture
def engine_config(tiny_folder: Path) -> Callable[..., Any]:
    """vLLM's own configuration of an engine on the tiny model, from the arguments of `vllm serve`."""
    from vllm.engine.arg_utils import EngineArgs

    def build(**arguments: Any) -> Any:
        given = {"max_model_len": 512, "additional_config": {"decode_backend": "latency_specialized"}, **arguments}
        return EngineArgs(model=str(tiny_folder), **given).create_engine_config()

    return build
