"""Attention layers of every kind over common caches, and requests that decode through them."""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from specialized_decode.backbone.attention import Attention, Compressor, Indexer, Selection
from specialized_decode.backbone.cache import Batch, Caches, Request
from specialized_decode.backbone.config import ModelConfig
from specialized_decode.backbone.context import ForwardContext
from specialized_decode.backbone.linear import Linear
from specialized_decode.backbone.rope import cos_sin_table
from tests.helpers.small_config import small_config
from tests.helpers.step_linear import fp8_linear
from tests.helpers.step_mhc import random_bf16

CONFIG = small_config()
CPU = torch.device("cpu")
CONTEXT, MAX_TOKENS = 192, 512
# A window only; KV and index source at ratio 2 and its reader; candidate source at ratio 1, its reader, and an index
# source that restricts itself to the candidates and owns no keys.
LAYERS = (0, 2, 3, 6, 7, 8)
KINDS = {0: "window only", 2: "source, ratio 2", 3: "reader", 6: "source, ratio 1", 7: "reader", 8: "consumer"}


class World:
    """The layers, their caches with blocks in no order, and open requests. `copy.deepcopy` gives another one."""

    def __init__(
        self, lengths: list[int], config: ModelConfig = CONFIG, context: int = CONTEXT, device: torch.device = CPU
    ) -> None:
        """lengths: tokens of each request before its first decode step; context: the most that one may have."""
        self.config, self.device, self.longest = config, device, context
        self.context, self.selection = ForwardContext(), Selection(config, MAX_TOKENS, device)
        self.caches = Caches(config, len(lengths), context, MAX_TOKENS, device)
        rng = np.random.default_rng(0)
        rng.shuffle(self.caches.window.free)
        rng.shuffle(self.caches.compressed.free)
        self.layers = {number: self._layer(number) for number in LAYERS}
        self.lengths = lengths
        self.requests: list[Request] = [self.caches.open(list(range(context))) for _ in lengths]

    def _layer(self, number: int) -> Attention:
        config, device, seed = self.config, self.device, 1000 * number
        ratio, hidden, rank = config.compress_ratios[number], config.hidden_size, config.q_lora_rank
        heads, groups, low = config.num_attention_heads, config.o_groups, config.o_lora_rank
        owns, indexes = number in config.kv_source_layer_ids, number in config.index_source_layer_ids

        def norm(offset: int, columns: int) -> Tensor:
            return random_bf16(seed + offset, columns).to(device)

        def plain(offset: int, rows: int, columns: int) -> Linear:
            return Linear(random_bf16(seed + offset, rows, columns, size=columns**-0.5).to(device))

        def stored(offset: int, rows: int, columns: int) -> Linear:
            return fp8_linear(seed + offset, rows, columns, columns**-0.5, device)

        compressor = Compressor(ratio, plain(1, 512 * ratio, hidden), norm(2, 512), 1e-20) if owns else None
        keys = (plain(3, 128, 512), norm(4, 128)) if owns else (None, None)
        queries = config.index_n_heads * 128
        inputs = (stored(5, queries, rank), plain(6, config.index_n_heads, hidden)) if indexes else None
        indexer = Indexer(config, number, *inputs, *keys) if inputs is not None else None
        attention = Attention(
            config,
            number,
            self.context,
            self.selection,
            fused_wqa_wkv=stored(7, rank + 512, hidden),
            q_norm=norm(8, rank),
            kv_norm=norm(9, 512),
            wq_b=stored(10, heads * 512, rank),
            wo_a=stored(11, groups * low, heads * 512 // groups),
            wo_b=stored(12, hidden, groups * low),
            sinks=torch.randn(heads, generator=torch.Generator().manual_seed(seed + 13)).to(device),
            cos_sin=cos_sin_table(config, ratio > 0, self.longest).to(device),
            compressor=compressor,
            indexer=indexer,
        )
        attention.bind_caches(self.caches.views)
        return attention

    def prefill(self) -> None:
        """Computes every request's first `lengths` tokens with the plain layers."""
        for at, length in enumerate(self.lengths):
            for start in range(0, length, MAX_TOKENS):
                self.decode([at], [min(MAX_TOKENS, length - start)], self.plain, seed=10_000 + at + start)

    def plain(self, number: int, positions: Tensor, x: Tensor) -> Tensor:
        return self.layers[number](positions, x)

    def batch(self, chosen: list[int], counts: list[int], static: bool = False) -> Batch:
        """The next tokens of the requests `chosen`; -1 is padding."""
        requests = [self.requests[at] if at >= 0 else None for at in chosen]
        return self.caches.batch(requests, counts, decode_length=6, static=static)

    def decode(
        self,
        chosen: list[int],
        counts: list[int],
        run: Callable[[int, Tensor, Tensor], Tensor],
        seed: int,
        static: bool = False,
    ) -> dict[int, Tensor]:
        """One step of every layer: `run(layer, positions, x)` -> its output. Requests go on by `counts` tokens."""
        batch, outputs = self.batch(chosen, counts, static), {}
        inputs = layer_inputs(chosen, counts, seed, self.config.hidden_size, self.device)
        for number in LAYERS:
            with self.context.running(batch.metadata):
                outputs[number] = run(number, batch.positions, inputs[number]).clone()
        self.advance(chosen, counts)
        return outputs

    def advance(self, chosen: list[int], counts: list[int]) -> None:
        for at, count in zip(chosen, counts, strict=True):
            if at >= 0:
                self.requests[at].computed += count

    def state(self) -> Mapping[str, Tensor]:
        """Everything that a step leaves behind, as it lies in memory."""
        assert self.selection.candidate_blocks is not None
        return {
            "window caches": self.caches.window.buffer,
            "compressed caches": self.caches.compressed.buffer,
            "selected positions": self.selection.topk_indices,
            "candidate blocks": self.selection.candidate_blocks,
            **self.caches.rings,
        }


def layer_inputs(
    chosen: list[int],
    counts: list[int],
    seed: int,
    hidden: int = CONFIG.hidden_size,
    device: torch.device = CPU,
) -> dict[int, Tensor]:
    """Random inputs [T, hidden] of every layer, NaN in padding rows."""
    padding = np.repeat([at < 0 for at in chosen], counts)
    inputs = {}
    for number in LAYERS:
        # Where they are wanted: a GPU makes them faster than they are copied.
        generator = torch.Generator(device).manual_seed(seed + number)
        x = torch.randn(int(sum(counts)), hidden, generator=generator, device=device).to(torch.bfloat16)
        x[torch.from_numpy(padding).to(device)] = torch.nan
        inputs[number] = x
    return inputs
