"""A platform for vLLM that answers as a host with H200s would, on a machine without a GPU."""

from typing import ClassVar

from vllm.platforms.cuda import NonNvmlCudaPlatform
from vllm.platforms.interface import DeviceCapability


class H200Host(NonNvmlCudaPlatform):
    """`capability` may be changed to stand for another family."""

    capability: ClassVar[tuple[int, int]] = (9, 0)

    @classmethod
    def device_count(cls) -> int:
        return 16

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(*cls.capability)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "NVIDIA H200"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return 141 << 30
