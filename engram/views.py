"""What the Engram step reads of the model."""

from typing import Protocol

from torch import Tensor

from specialized_decode.boundary import LinearView


class EngramView(Protocol):
    """One Engram layer: wkv [(n + 1) hidden, columns dim]; q_weight, k_weight [n, hidden]; staged [max tokens,
    columns dim] bfloat16, the rows that the running batch looked up before its layers."""

    @property
    def eps(self) -> float: ...
    @property
    def wkv(self) -> LinearView: ...
    @property
    def q_weight(self) -> Tensor: ...
    @property
    def k_weight(self) -> Tensor: ...
    @property
    def staged(self) -> Tensor: ...
