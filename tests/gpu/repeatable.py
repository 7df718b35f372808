"""Stock kernels that give the same bits every time, so that a run can be held against another bit for bit.

vLLM differs from itself in every step, for two reasons. Each has a remedy here, the same for stock and the executor.

Humming's Stream-K kernels cut the work of a GEMM evenly over the multiprocessors. Where a tile's sum comes out of more
than three of them, it is added up by atomics in bfloat16, in an order that is chance. On as many programs as the weight
has tiles each sum stays whole. The kernels are the same, and slower.

The indexer's top-k writes the positions that it selects in an order of chance too, and attention adds them up in it.
Here they are put in order.
"""

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any


def programs(tiles: int, cluster: int, at_once: int) -> int:
    """How many programs leave every tile of a weight whole.

    tiles: of the weight's columns, a cluster of programs each; cluster: programs of one; at_once: programs that the GPU
    holds. The most clusters that share out the tiles evenly: with any number of tiles along the rows nothing is left to
    cut.
    """
    if at_once < cluster:
        raise ValueError(f"programs at once: found {at_once}, expected a cluster of {cluster}")
    return max(count for count in range(1, tiles + 1) if tiles % count == 0 and count * cluster <= at_once) * cluster


def whole_tiles(config: Mapping[str, Any], columns: int, multiprocessors: int) -> dict[str, Any]:
    """Humming's launch configuration of a weight with so many columns, with the multiprocessors that leave tiles whole.

    One that does not use Stream-K is returned as it is.
    """
    if not config.get("use_stream_k", True):
        return dict(config)
    across = int(config.get("multi_cast_size_a", 1))
    cluster = across * int(config.get("multi_cast_size_b", 1))
    tiles = columns // int(config["block_shape"][1]) // across
    resident = int(config.get("num_ctas_per_sm", 1))
    count = programs(tiles, cluster, multiprocessors * resident)
    # A launch is of whole multiprocessors. With twice the programs a tile is cut once, which is added up in order.
    return {**config, "num_sms": count // resident if count % resident == 0 else count}


def put_in_order(positions: Any) -> None:
    """Sorts each row of selected positions [rows, k] int32 in place: the lowest first, those unused, -1, at the end."""
    unused = positions.new_full((), 2**31 - 1)
    found = positions.where(positions >= 0, unused).sort(dim=1).values
    positions.copy_(found.masked_fill(found == unused, -1))


def make_repeatable() -> None:
    """Makes the kernels of this process, from now on, ones that repeat. Before an engine is built."""
    make_gemms_repeatable()
    make_selection_repeatable()


def make_selection_repeatable() -> None:
    """Puts in order what the indexer selects, in prefill and in decode."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.indexer_topk import SparseIndexerTopk

    decode, prefill = SparseIndexerTopk.forward, _custom_ops.top_k_per_row_prefill

    @functools.wraps(decode)
    def forward(self: Any, *args: Any, **kwargs: Any) -> None:
        decode(self, *args, **kwargs)
        put_in_order(inspect.signature(decode).bind(self, *args, **kwargs).arguments["topk_indices"])

    @functools.wraps(prefill)
    def top_k_per_row_prefill(*args: Any, **kwargs: Any) -> None:
        prefill(*args, **kwargs)
        put_in_order(inspect.signature(prefill).bind(*args, **kwargs).arguments["raw_topk_indices"])

    SparseIndexerTopk.forward = forward
    _custom_ops.top_k_per_row_prefill = top_k_per_row_prefill


def make_gemms_repeatable() -> None:
    """Gives every Humming GEMM a launch that leaves tiles whole."""
    import torch
    from humming.kernel.humming import HummingKernel

    resolve = HummingKernel._resolve_configs

    def resolved(layer: Any, compute: Any, tuning: Any, device: Any = None) -> Any:
        layer_config, compute_config, found = resolve(layer, compute, tuning, device)
        columns = int(layer_config["shape_n"])
        # Asked here, not above: a worker process calls this function before it has chosen its GPU.
        multiprocessors = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        if isinstance(found, Sequence):
            return (
                layer_config,
                compute_config,
                [(low, high, whole_tiles(one, columns, multiprocessors)) for low, high, one in found],
            )
        return layer_config, compute_config, whole_tiles(found, columns, multiprocessors)

    HummingKernel._resolve_configs = resolved
