"""Attention layers of every kind over common caches, and requests that decode through them."""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from specialized_decode.backbone.attention import Attention, Compressor, Indexer, Selection
from specialized_decode.backbone.cache import Batch, Caches, Request
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

    def __init__(self, lengths: list[int]) -> None:
        """lengths: tokens of each request before its first decode step."""
        self.context, self.selection = ForwardContext(), Selection(CONFIG, MAX_TOKENS, CPU)
        self.caches = Caches(CONFIG, len(lengths), CONTEXT, MAX_TOKENS, CPU)
        rng = np.random.default_rng(0)
        rng.shuffle(self.caches.window.free)
        rng.shuffle(self.caches.compressed.free)
        self.layers = {number: self._layer(number) for number in LAYERS}
        self.lengths = lengths
        self.requests: list[Request] = [self.caches.open(list(range(CONTEXT))) for _ in lengths]

    def _layer(self, number: int) -> Attention:
        seed, ratio = 1000 * number, CONFIG.compress_ratios[number]
        owns, indexes = number in CONFIG.kv_source_layer_ids, number in CONFIG.index_source_layer_ids

        def plain(offset: int, rows: int, columns: int) -> Linear:
            return Linear(random_bf16(seed + offset, rows, columns, size=columns**-0.5))

        def stored(offset: int, rows: int, columns: int) -> Linear:
            return fp8_linear(seed + offset, rows, columns, size=columns**-0.5)

        compressor = Compressor(ratio, plain(1, 512 * ratio, 64), random_bf16(seed + 2, 512), 1e-20) if owns else None
        keys = (plain(3, 128, 512), random_bf16(seed + 4, 128)) if owns else (None, None)
        indexer = Indexer(CONFIG, number, stored(5, 512, 32), plain(6, 4, 64), *keys) if indexes else None
        attention = Attention(
            CONFIG,
            number,
            self.context,
            self.selection,
            fused_wqa_wkv=stored(7, 32 + 512, 64),
            q_norm=random_bf16(seed + 8, 32),
            kv_norm=random_bf16(seed + 9, 512),
            wq_b=stored(10, 4 * 512, 32),
            wo_a=stored(11, 2 * 32, 2 * 512),
            wo_b=stored(12, 64, 64),
            sinks=torch.randn(4, generator=torch.Generator().manual_seed(seed + 13)),
            cos_sin=cos_sin_table(CONFIG, ratio > 0, CONTEXT),
            compressor=compressor,
            indexer=indexer,
        )
        attention.bind_caches(self.caches.views)
        return attention

    def prefill(self) -> None:
        """Computes every request's first `lengths` tokens with the plain layers."""
        for at, length in enumerate(self.lengths):
            if length:
                self.decode([at], [length], self.plain, seed=10_000 + at)

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
        batch, inputs, outputs = self.batch(chosen, counts, static), layer_inputs(chosen, counts, seed), {}
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


def layer_inputs(chosen: list[int], counts: list[int], seed: int) -> dict[int, Tensor]:
    """Random inputs [T, hidden] of every layer, NaN in padding rows."""
    padding = np.repeat([at < 0 for at in chosen], counts)
    inputs = {}
    for number in LAYERS:
        inputs[number] = random_bf16(seed + number, int(sum(counts)), CONFIG.hidden_size)
        inputs[number][torch.from_numpy(padding)] = torch.nan
    return inputs
