"""This package's log, in vLLM's."""

import logging


def follow_vllm() -> None:
    """Makes this package's log part of vLLM's: its handlers, its level, also when they are set up later."""
    ours = logging.getLogger("specialized_decode")
    ours.parent = logging.getLogger("vllm")
    ours.setLevel(logging.NOTSET)
