"""LowBatchHead: the vocabulary projection of a few rows, this rank's shard of it."""

from torch import Tensor

from specialized_decode.boundary import TpGroup
from specialized_decode.logits import reference


class LowBatchHead:
    """weight: [V local, K], this rank's rows of the head."""

    def __init__(self, weight: Tensor, group: TpGroup, vocab_size: int) -> None:
        self.weight, self.group, self.vocab_size = weight, group, vocab_size

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden: [T, K] bfloat16 -> all ranks' logits [T, vocab] float32."""
        return gather_logits(reference.head(hidden, self.weight), self.group, self.vocab_size)


def gather_logits(local: Tensor, group: TpGroup, vocab_size: int) -> Tensor:
    """local: [T, V local] -> [T, vocab], the ranks' shards side by side."""
    return reference.gather(group.all_gather(local), vocab_size)
