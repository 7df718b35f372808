"""The LM head of a low-batch step and the gather of its shards."""

from specialized_decode.logits.head import LowBatchHead, gather_logits

__all__ = ["LowBatchHead", "gather_logits"]
