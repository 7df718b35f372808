"""What the attention step reads of the model: weights, caches and metadata of one layer, whoever holds them."""

from typing import Protocol

from torch import Tensor

from specialized_decode.boundary import LinearView


class CacheView(Protocol):
    """How a batch of T tokens reads and writes one paged cache.

    slot_mapping: [T] int64, block * states + state, -1 for no write; block_table: [R, n] int32; token_to_req: [T]
    int32; query_start_loc: [R + 1] int32; `states` of a page and `max_seq_len` in tokens are host numbers.
    """

    @property
    def states(self) -> int: ...
    @property
    def max_seq_len(self) -> int: ...
    @property
    def slot_mapping(self) -> Tensor: ...
    @property
    def block_table(self) -> Tensor: ...
    @property
    def token_to_req(self) -> Tensor: ...
    @property
    def query_start_loc(self) -> Tensor: ...


class LayerCaches(Protocol):
    """The metadata of one layer's caches; None where the layer reads no such cache."""

    @property
    def window(self) -> CacheView: ...
    @property
    def compressed(self) -> CacheView | None: ...
    @property
    def index(self) -> CacheView | None: ...
    @property
    def ring(self) -> CacheView | None: ...


class CompressorView(Protocol):
    """fused_wkv_wgate: [ratio * 512, hidden] BF16, values then scores; norm: [512]; state_cache: [rings, rows, 1024]
    float32, the open group's rows, for ratio 2."""

    ratio: int
    fused_wkv_wgate: LinearView
    norm: Tensor
    eps: float
    state_cache: Tensor | None


class IndexerView(Protocol):
    """wq_b: [heads * 128, q rank]; weights_proj: [heads, hidden]; wk: [128, 512] and k_norm: [128] where the layer
    owns the index keys; k_cache: [blocks, states, 132] uint8."""

    num_heads: int
    head_dim: int
    topk: int
    ratio: int
    eps: float
    candidate_source: bool
    candidate_consumer: bool
    candidate_block_size: int
    wq_b: LinearView
    weights_proj: LinearView
    wk: LinearView | None
    k_norm: Tensor | None
    k_cache: Tensor | None


class SelectionView(Protocol):
    """topk_indices: [max tokens, topk] int32; candidate_blocks: [max tokens, blocks] int32 or None."""

    topk_indices: Tensor
    candidate_blocks: Tensor | None


class AttentionView(Protocol):
    """One layer's attention. Heads and groups are this rank's; caches are read when a step runs, not before.

    fused_wqa_wkv: [q rank + 512, hidden]; wq_b: [heads * 512, q rank]; wo_a: [groups * o rank, heads * 512 / groups];
    wo_b: [hidden, groups * o rank]; sinks: [heads] float32; cos_sin: [positions, rope] float32; window_cache,
    compressed_cache: [blocks, states, 584] uint8.
    """

    layer_id: int
    num_heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    window_size: int
    compress_ratio: int
    index_source: int | None
    kv_source: int | None
    eps: float
    scale: float
    fused_wqa_wkv: LinearView
    wq_b: LinearView
    wo_a: LinearView
    wo_b: LinearView
    q_norm: Tensor
    kv_norm: Tensor
    sinks: Tensor
    cos_sin: Tensor
    window_cache: Tensor | None
    compressed_cache: Tensor | None

    @property
    def compressor(self) -> CompressorView | None: ...
    @property
    def indexer(self) -> IndexerView | None: ...
    @property
    def selection(self) -> SelectionView: ...
    @property
    def window_prefix(self) -> str: ...

    def metadata(self) -> LayerCaches:
        """The running batch's metadata of this layer's caches."""
