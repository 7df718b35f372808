"""Engram: n-gram lookups in a hashed table, gated into the residual streams."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from specialized_decode.backbone.config import IMAGE_TOKEN_ID, ModelConfig
from specialized_decode.backbone.formats import decode_ue8m0
from specialized_decode.backbone.linear import Linear

# A token that takes no part in any n-gram: an image token.
DEAD = -1
# Floor under the square root of the gate's argument; the training kernel's.
GATE_FLOOR = 1e-6


def image_mask(ids: Tensor) -> Tensor:
    """True where an id is the image token's."""
    return ids == IMAGE_TOKEN_ID


def _primes_from(start: int, taken: set[int]) -> Iterator[int]:
    """Primes of at least `start` in order, none of `taken`; adds what it yields to `taken`."""
    number = max(start, 2)
    while True:
        if number not in taken and all(number % d for d in range(2, int(number**0.5) + 1)):
            taken.add(number)
            yield number
        number += 1


def table_sizes(config: ModelConfig) -> list[list[list[int]]]:
    """Rows of each bucket range, [Engram layer][n-gram size - 2][head]: increasing primes, none used twice."""
    taken: set[int] = set()
    sizes = []
    for _ in config.engram_layer_ids:
        layer = []
        for _ in range(config.engram_max_ngram_size - 1):
            primes = _primes_from(config.engram_vocab_size, taken)
            layer.append([next(primes) for _ in range(config.engram_n_heads)])
        sizes.append(layer)
    return sizes


def hash_multipliers(config: ModelConfig) -> Tensor:
    """[Engram layers, max n-gram] int64 odd multipliers, drawn per layer; the release's generator and seeds."""
    bound = max(1, np.iinfo(np.int64).max // config.engram_compressed_vocab_size // 2)
    rows = [
        np.random.default_rng(10007 * layer).integers(0, bound, config.engram_max_ngram_size, dtype=np.int64)
        for layer in config.engram_layer_ids
    ]
    return torch.from_numpy(np.stack(rows) * 2 + 1)


class NgramHash:
    """Hashes the n-grams (2..max) that end at each token into rows of the Engram layers' tables."""

    def __init__(self, config: ModelConfig, token_map: list[int], device: torch.device) -> None:
        sizes = torch.tensor(table_sizes(config))
        self.max_ngram = config.engram_max_ngram_size
        self.lookback = self.max_ngram - 1
        self.pad = token_map[config.engram_pad_token_id]
        self.token_map = torch.tensor(token_map, device=device)
        self.multipliers = hash_multipliers(config).to(device)
        self.sizes = sizes.to(device)
        flat = sizes.flatten(1)
        self.offsets = (flat.cumsum(1) - flat).view_as(sizes).to(device)

    def __call__(
        self, input_ids: Tensor, positions: Tensor, starts: Tensor, token_to_req: Tensor, lookback_ids: Tensor
    ) -> Tensor:
        """Hashes of T tokens.

        input_ids, positions: [T]; starts: [R] row of each request's first token in this batch; token_to_req: [T];
        lookback_ids: [R, max - 1] ids before that first token, latest first, -1 where there is none.
        Returns [T, Engram layers, columns] int64 rows into each layer's table.
        """
        rows = torch.arange(input_ids.shape[0], device=input_ids.device)
        start = starts.long()[token_to_req.long()]
        compressed = torch.where(image_mask(input_ids), DEAD, self.token_map[input_ids])
        known = torch.where(image_mask(lookback_ids), DEAD, self.token_map[lookback_ids.clamp_min(0)])
        # An id the caller does not know counts as padding; only dead tokens and the text's start break an n-gram.
        before = torch.where(lookback_ids < 0, self.pad, known)[token_to_req.long()]
        dead = torch.zeros_like(rows, dtype=torch.bool)
        rolling = torch.zeros(input_ids.shape[0], self.multipliers.shape[0], dtype=torch.int64, device=rows.device)
        columns = []
        for shift in range(self.max_ngram):
            row = rows - shift
            inside = row >= start
            column = (start - row - 1).clamp(0, self.lookback - 1)
            source = torch.where(inside, compressed[row.clamp_min(0)], before.gather(1, column.unsqueeze(1)).squeeze(1))
            # An n-gram that crosses a dead token or the text's start is padded from there on.
            dead = dead | (source == DEAD) | (positions < shift)
            value = torch.where(dead, self.pad, source)
            rolling = rolling ^ (value.unsqueeze(1) * self.multipliers[:, shift])
            if shift:
                columns.append(rolling.unsqueeze(-1) % self.sizes[:, shift - 1] + self.offsets[:, shift - 1])
        return torch.stack(columns, 2).flatten(2)


class Engram:
    """One Engram layer: table [rows, dim] FP8 with UE8M0 [rows, dim/32]; wkv [(n + 1) hidden, columns dim];
    q_weight, k_weight [n, hidden]. `index` is the layer's place in `engram_layer_ids`.

    `prepare` looks a batch's rows up ahead of the layers, into storage whose address graphs can rely on.
    """

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        table: Tensor,
        scale: Tensor,
        wkv: Linear,
        q: Tensor,
        k: Tensor,
        max_tokens: int,
    ) -> None:
        self.index = index
        self.eps = config.rms_norm_eps
        self.streams, self.hidden = config.hc_mult, config.hidden_size
        self.table, self.scale, self.wkv, self.q_weight, self.k_weight = table, scale, wkv, q, k
        width = config.engram_columns * config.engram_head_dim
        self.staged = torch.zeros(max_tokens, width, dtype=torch.bfloat16, device=table.device)

    def prepare(self, hashes: Tensor) -> None:
        """Looks up hashes [T, Engram layers, columns] for the `T` rows that the next forward injects."""
        self.staged[: hashes.shape[0]].copy_(self.lookup(hashes[:, self.index]))

    def lookup(self, hashes: Tensor) -> Tensor:
        """hashes: [T, columns] -> [T, columns dim] bfloat16."""
        rows = self.table.view(torch.uint8)[hashes].view(torch.float8_e4m3fn).float().unflatten(-1, (-1, 32))
        scale = decode_ue8m0(self.scale.view(torch.uint8)[hashes]).unsqueeze(-1)
        return (rows * scale).to(torch.bfloat16).flatten(1)

    def inject(self, residual: Tensor, kv: Tensor, keep: Tensor) -> Tensor:
        """Adds the gated value to every stream.

        residual: [T, n, hidden] bfloat16; kv: [T, (n + 1) hidden], a key per stream, then the value; keep: [T] bool,
        False shuts the gate. The gate is sigmoid(sign(d) sqrt(max(|d|, 1e-6))) of the normalized dot product d.
        """
        key, value = kv.float().unflatten(-1, (self.streams + 1, self.hidden)).split([self.streams, 1], 1)
        hidden = residual.float()
        dot = (hidden * self.q_weight.float() * self.k_weight.float() * key).sum(-1)
        norms = torch.rsqrt(hidden.square().mean(-1) + self.eps) * torch.rsqrt(key.square().mean(-1) + self.eps)
        dot = dot * norms * self.hidden**-0.5
        root = dot.abs().clamp_min(GATE_FLOOR).sqrt()
        gate = torch.where(keep.unsqueeze(-1), torch.sigmoid(torch.where(dot < 0, -root, root)), 0.0)
        return (hidden + gate.unsqueeze(-1) * value).to(torch.bfloat16)

    def __call__(self, residual: Tensor, keep: Tensor) -> Tensor:
        """residual: [T, n, hidden]; keep: [T] bool -> [T, n, hidden], with the rows that `prepare` looked up."""
        return self.inject(residual, self.wkv(self.staged[: residual.shape[0]]), keep)
