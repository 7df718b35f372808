"""The head's ops in plain torch: the definition of right."""

import torch
from torch import Tensor


def head(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden [T, K] bfloat16, weight [V, K] -> logits [T, V] float32, accumulated in float32."""
    if weight.is_cuda:
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    return hidden.float() @ weight.float().T


def gather(shards: Tensor, vocab_size: int) -> Tensor:
    """[ranks, T, V / ranks] -> [T, vocab]; padding rows past the vocabulary are cut."""
    return shards.transpose(0, 1).flatten(1)[:, :vocab_size]
