"""A small model with the executor beside it, and the comparison of the two on one batch from one state."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specialized_decode.backbone.cache import Batch, Request
from specialized_decode.backbone.config import ModelConfig
from specialized_decode.backbone.engine import Captured, LocalEngine
from specialized_decode.backbone.engram import table_sizes
from specialized_decode.backbone.model import ModelOutput, load_model
from specialized_decode.backbone.presets import CheckpointPlan, tiny_plan
from specialized_decode.boundary import SideStream
from specialized_decode.runtime import DecodeConfig, SpecializedDecode, hold_experts

# The router's image tokens are five ids from 129264 on; Engram leaves out the first alone.
IMAGE_IDS = tuple(range(129264, 129269))
# What the MTP buffer holds before a step: a value that no step leaves there, so that an unwritten row shows.
POISON = -12345.0
SMALL_WIDTHS: dict[str, Any] = {
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "index_topk": 16,
    "candidate_topk_blocks": 6,
    "candidate_block_size": 4,
    "sliding_window": 48,
    # Enough to tell rows from columns; each costs a capture some hundred operations.
    "hc_sinkhorn_iters": 2,
}


@dataclass(frozen=True)
class Layers:
    """A layer plan, under the configuration's names."""

    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...] = ()
    index_source_layer_ids: tuple[int, ...] = ()
    candidate_source_layer_id: int = -1
    engram_layer_ids: tuple[int, ...] = ()


# Every kind of layer in as few as possible, for steps of many rows.
FEW_LAYERS = Layers((0, 2, 1, 1), (1, 2), (1, 2, 3), 2, (1,))


def small_checkpoint(layers: Layers, seed: int = 0, **widths: Any) -> CheckpointPlan:
    """A checkpoint of `layers`, a few megabytes beside the vocabulary, which holds the image tokens."""
    config = copy.deepcopy(tiny_plan().config)
    text = config["text_config"]
    text |= SMALL_WIDTHS | widths
    text |= {name: list(v) if isinstance(v, tuple) else v for name, v in vars(layers).items()}
    text |= {"num_hidden_layers": len(layers.compress_ratios), "dspark_target_layer_ids": []}
    text["engram_num_embeddings"] = [0] * len(layers.engram_layer_ids)
    tables = table_sizes(ModelConfig.from_dict(config, "a test"))
    text["engram_num_embeddings"] = [sum(map(sum, table)) for table in tables]
    return CheckpointPlan(config, seed)


@dataclass
class Seen:
    """What one step of T rows left behind, on the rows and blocks that belong to a request."""

    hidden: Tensor
    logits: Tensor
    aux: list[Tensor]
    mtp: Tensor
    caches: dict[str, Tensor]
    selection: list[Tensor] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.logits.argmax(1).tolist()


class Pair:
    """A model and its executor on the same caches. Requests come from `open`, batches from `batch`.

    kernels: the families that the executor runs on; of "moe" the model's experts are held in those kernels' form.
    """

    def __init__(
        self,
        folder: Path,
        *,
        device: str = "cpu",
        max_rows: int = 16,
        max_context: int = 256,
        max_tokens: int = 512,
        kernels: frozenset[str] = frozenset(),
    ) -> None:
        # One request more than rows: the one that `open` grows.
        room = max(max_tokens, max_rows + 1)
        self.model = load_model(folder, torch.device(device), room, max_context)
        self.backbone = self.model.model
        self.backbone.keep_mtp_hidden(room)
        self.engine = LocalEngine(self.model, max_rows + 1, max_context, max_tokens)
        self.caches, self.host = self.engine.caches, self.engine.host
        config = DecodeConfig(kernels=kernels)
        hold_experts(self.backbone, config)
        self.executor = SpecializedDecode.for_target(self.backbone, config, self.model.lm_head)
        self.random = torch.Generator().manual_seed(7)

    def token_ids(self, count: int, image_share: float = 0.0) -> list[int]:
        """Random text tokens, a share of them image tokens."""
        ids = torch.randint(3, IMAGE_IDS[0], (count,), generator=self.random)
        images = torch.randint(IMAGE_IDS[0], IMAGE_IDS[-1] + 1, (count,), generator=self.random)
        chosen = torch.rand(count, generator=self.random) < image_share
        found: list[int] = torch.where(chosen, images, ids).tolist()
        return found

    def open(self, contexts: Sequence[int], new: int = 1, image_share: float = 0.0) -> list[Request]:
        """Requests whose next step computes `new` tokens and ends at a context of that many tokens.

        Two texts are prefilled, in as many chunks as there are contexts; a request starts as a copy of one of them.
        """
        opened: dict[int, Request] = {}
        for text in range(2):
            wanted = sorted(range(text, len(contexts), 2), key=lambda index: contexts[index])
            if not wanted:
                continue
            grown = self.caches.open(self.token_ids(contexts[wanted[-1]] - new, image_share))
            for index in wanted:
                while count := min(contexts[index] - new - grown.computed, self.engine.max_tokens):
                    self.engine.forward(self.caches.batch([grown], [count]))
                    grown.computed += count
                opened[index] = self.copy(grown)
                opened[index].tokens += self.token_ids(new, image_share)
            self.caches.close(grown)
        return [opened[index] for index in range(len(contexts))]

    def copy(self, request: Request) -> Request:
        """A request that has computed what `request` has, in blocks of its own."""
        twin = self.caches.open(request.tokens[: request.computed])
        twin.computed = request.computed
        for group, mine, theirs in (
            (self.caches.window, twin.window_blocks, request.window_blocks),
            (self.caches.compressed, twin.compressed_blocks, request.compressed_blocks),
        ):
            pages = group.buffer.view(group.blocks, -1)
            for block in theirs:
                mine.append(group.take("copied") if block else 0)
                pages[mine[-1]] = pages[block]
        for ring in self.caches.rings.values():
            ring[twin.ring] = ring[request.ring]
        return twin

    def shuffle(self, requests: Sequence[Request]) -> None:
        """Moves every request's blocks, and the free ones, to other places, as an engine that runs for long would."""
        for group, owned in (
            (self.caches.window, [request.window_blocks for request in requests]),
            (self.caches.compressed, [request.compressed_blocks for request in requests]),
        ):
            moved = [0, *(1 + torch.randperm(group.blocks - 1, generator=self.random)).tolist()]
            pages = group.buffer.view(group.blocks, -1)
            pages[torch.tensor(moved, device=pages.device)] = pages.clone()
            group.free = [moved[block] for block in group.free]
            for blocks in owned:
                blocks[:] = [moved[block] for block in blocks]

    def close(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.caches.close(request)

    def advance(self, requests: Sequence[Request], accepted: int = 1, new: int = 1, image_share: float = 0.0) -> None:
        """Keeps `accepted` of the last step's tokens, rolls the others back and appends `new` random ones."""
        for request in requests:
            request.computed += accepted
            request.tokens[request.computed :] = self.token_ids(new, image_share)

    def batch(self, requests: Sequence[Request | None], count: int = 1) -> Batch:
        """The step of `count` tokens a request, as a graph reads it. None is a padding request."""
        return self.caches.batch(list(requests), [count] * len(requests), decode_length=count, static=True)

    def capture(self, requests: int, count: int = 1, use_engram: bool = True) -> Captured:
        """Captures a step, after the eager run that a capture follows. The executor must be granted it."""
        batch = self.batch([None] * requests, count)
        output: list[ModelOutput] = []
        granted: list[bool] = []

        def run() -> None:
            granted.append(self.executor.plan(batch.positions, None) is not None)
            output.append(self.model.forward(batch, use_engram))

        self.model.executor = self.executor
        try:
            self.engine.forward(batch, use_engram)
            with torch.no_grad(), self.host.running(batch.metadata):
                graph = self.host.capture(run)
        finally:
            self.model.executor = None
        assert granted == [True]
        return Captured(batch, graph, output[0], None)

    def state(self) -> list[Tensor]:
        """Every buffer that a step writes and a later one reads."""
        selection = self.model.selection
        buffers = [self.caches.window.buffer, self.caches.compressed.buffer, *self.caches.rings.values()]
        buffers += [buffer for buffer in (selection.topk_indices, selection.candidate_blocks) if buffer is not None]
        return buffers

    def snapshot(self) -> list[Tensor]:
        return [buffer.clone() for buffer in self.state()]

    def restore(self, snapshot: Sequence[Tensor]) -> None:
        for buffer, saved in zip(self.state(), snapshot, strict=True):
            buffer.copy_(saved)

    def plain(self, batch: Batch, use_engram: bool = True) -> Seen:
        """Runs `batch` through the plain layers, eagerly."""
        assert self.model.executor is None
        self._poison()
        return self._seen(batch, self.engine.forward(batch, use_engram))

    def replayed(self, captured: Captured, batch: Batch) -> Seen:
        """Runs `batch` through a captured step."""
        self._poison()
        self.engine.replay(captured, batch)
        return self._seen(batch, captured.output)

    def both(self, captured: Captured, batch: Batch, use_engram: bool = True) -> tuple[Seen, Seen]:
        """`batch` from the same state through the plain layers and the captured step, whose state stays."""
        before = self.snapshot()
        plain = self.plain(batch, use_engram)
        self.restore(before)
        return plain, self.replayed(captured, batch)

    def _poison(self) -> None:
        assert self.backbone.mtp_hidden_buffer is not None
        self.backbone.mtp_hidden_buffer.fill_(POISON)

    def _seen(self, batch: Batch, output: ModelOutput) -> Seen:
        """A copy without padding rows and null blocks, whose content is nobody's."""
        valid = next(iter(batch.metadata.values())).slot_mapping >= 0
        hidden, aux = (output, []) if isinstance(output, Tensor) else output
        assert self.backbone.mtp_hidden_buffer is not None
        # Rows past the batch must stay as they were, so they count as valid.
        kept = torch.ones(self.backbone.mtp_hidden_buffer.shape[0], dtype=torch.bool, device=valid.device)
        kept[: batch.num_tokens] = valid
        caches = {}
        for name, group in (("window", self.caches.window), ("compressed", self.caches.compressed)):
            caches[name] = group.buffer.view(group.blocks, -1)[1:].clone() if group.stride else group.buffer.clone()
        caches |= {name: ring[1:].clone() for name, ring in self.caches.rings.items()}
        selection = [self.model.selection.topk_indices, self.model.selection.candidate_blocks]
        return Seen(
            hidden=hidden[valid],
            logits=self.executor.compute_logits(hidden[valid]),
            aux=[rows[valid] for rows in aux],
            mtp=self.backbone.mtp_hidden_buffer[kept],
            caches=caches,
            selection=[rows[: batch.num_tokens][valid] for rows in selection if rows is not None],
        )


def assert_same(plain: Seen, executed: Seen, rows: int | None = None) -> None:
    """Bit equality of all that a step leaves, and that it is there: finite, with `rows` rows."""
    if rows is not None:
        assert plain.hidden.shape[0] == rows
    assert torch.isfinite(plain.hidden).all()
    assert_equal("hidden states", plain.hidden, executed.hidden)
    assert len(plain.aux) == len(executed.aux)
    for index, (ours, theirs) in enumerate(zip(executed.aux, plain.aux, strict=True)):
        assert_equal(f"aux hidden states {index}", theirs, ours)
    assert_equal("MTP buffer", plain.mtp, executed.mtp)
    assert not (executed.mtp[: executed.hidden.shape[0]] == POISON).any()
    assert plain.caches.keys() == executed.caches.keys()
    for name, theirs in plain.caches.items():
        assert_equal(f"cache {name}", theirs, executed.caches[name])
    for theirs, ours in zip(plain.selection, executed.selection, strict=True):
        assert_equal("selection", theirs, ours)
    assert_equal("logits", plain.logits, executed.logits)
    assert plain.tokens == executed.tokens


def assert_equal(what: str, expected: Tensor, found: Tensor) -> None:
    """torch.equal, with a message that says where the two differ."""
    assert expected.shape == found.shape, f"{what}: found shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    if not torch.equal(expected, found):
        rows = (expected != found).flatten(1).any(1).nonzero().flatten().tolist()
        worst = (expected.double() - found.double()).abs().max().item()
        raise AssertionError(f"{what}: {len(rows)} of {len(expected)} rows differ, by up to {worst:g}: {rows[:20]}")


def assert_close(expected: Seen, found: Seen, rows: int, alike: Tensor | None = None) -> None:
    """The same but for rounding, which routed experts and FP8 caches magnify from layer to layer: hidden states are
    held to a bound after the first layer alone, whose aux hidden states come first. alike: [rows] bool, rows that the
    first layer's router sent to the same experts on both sides, None for all; others are not held to the bound."""
    assert found.logits.shape == expected.logits.shape and found.logits.shape[0] == rows
    assert found.logits.isfinite().all() and found.hidden.isfinite().all()
    ours, theirs = found.aux[0].double(), expected.aux[0].double()
    if alike is not None:
        ours, theirs = ours[alike], theirs[alike]
    error = ((ours - theirs).norm() / theirs.norm()).item() if len(ours) else 0.0
    assert error < 2e-2, f"layer 1: the aux hidden states are {error:g} off, expected below 0.02"
    ours, theirs = found.logits.double(), expected.logits.double()
    # The same logits but for some rounding: what is unrelated is about 1.4 off.
    relative = ((ours - theirs).norm() / theirs.norm()).item()
    assert relative < 0.3, f"the logits are {relative:g} off the reference's"
    assert torch.equal(found.mtp.isnan(), expected.mtp.isnan())


def unjoined(pair: Pair) -> list[str]:
    """Side streams with forked work that nobody waited for."""
    return [name for name, stream in named_streams(pair).items() if stream.pending]


def named_streams(pair: Pair) -> dict[str, SideStream]:
    """Every stream that a step may fork to."""
    executor = pair.executor
    streams = {f"engram {layer}": stream for layer, stream in executor.engram.streams.items()}
    assert executor.aux_streams is not None and executor.mhc_stream is not None
    streams |= {"compressor": executor.aux_streams.compressor, "indexer": executor.aux_streams.indexer}
    if executor.candidates is not None:
        streams["candidates"] = executor.candidates.stream
    return {**streams, "mhc": executor.mhc_stream}
