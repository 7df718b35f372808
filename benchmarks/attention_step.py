"""Whole attention steps in CUDA graphs, at V4.1-Flash's widths over 4 ranks: `python -m benchmarks.attention_step`.

A chain is layers of one kind with weights of their own, more than the L2 cache holds, over caches that they share. The
kernels, two of their families alone, and the reference ops replay in turn in one run. `wo_b` publishes into the
boundary's slot, as the executor has it on one GPU; the reduce that follows there is not part of a layer. vLLM's layer,
which takes an engine's configuration, metadata and caches, is not among them.

In "kernels, nothing cached" a launch ahead of each layer reads more than the L2 cache holds, so that the layer finds
none of its weights, caches, tables and positions there; a graph of these launches alone is taken off. They trigger no
dependents, so nothing of a layer overlaps what lies ahead of it.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from torch import Tensor

from benchmarks.attention_mla import Times, interleaved
from benchmarks.results import FOLDER, write_gpu_result
from specialized_decode.attention import (
    AttentionStep,
    CandidateOverlap,
    SparseIndexTables,
    SparseMlaDecode,
    projection_tuning,
    reference,
)
from specialized_decode.attention.fused import fused_projections
from specialized_decode.attention.fused_index import FusedIndexer, fused_bins
from specialized_decode.attention.fused_mla import FusedSparseMla, FusedTables
from specialized_decode.attention.step import AuxStreams
from specialized_decode.backbone.attention import Attention, Compressor, Indexer, Selection
from specialized_decode.backbone.cache import WINDOW_BLOCK, Batch, Caches
from specialized_decode.backbone.config import ModelConfig
from specialized_decode.backbone.context import ForwardContext
from specialized_decode.backbone.host import SingleRank
from specialized_decode.backbone.linear import Linear
from specialized_decode.backbone.presets import flash_plan
from specialized_decode.backbone.rope import cos_sin_table
from specialized_decode.boundary import BoundaryAllReduce, CudaSideStream, PublishingMxfp8Linear

RANKS = 4
# Layers of the release, by kind.
KINDS = {
    "window only": 0,
    "reader, ratio 2": 3,
    "source, ratio 2": 2,
    "reader, ratio 1": 21,
    "candidate source, ratio 1": 20,
    "candidate consumer": 24,
}
ROWS = (1, 2, 4, 8, 16, 48)
# Layers of a chain: 39 MB of weights each, and an L2 cache of 50 MB.
CHAIN = 8
# Bytes that are read to have none of a layer's in that cache: four times what it holds.
EVICTING = 4 * 50 * 2**20
MAX_ROWS = 384
REPLAYS = 30
DEVICE = torch.device("cuda")
# Names of graphs.
COLD, EVICTIONS = "kernels, nothing cached", "evictions"


@dataclass(frozen=True)
class Gates:
    """A step's gates, as Hopper's table has them; but low-batch as far as kernels go."""

    rows: int

    @property
    def side_stream(self) -> bool:
        return self.rows <= 48

    @property
    def low_batch(self) -> bool:
        return self.rows <= projection_tuning.MAX_ROWS

    @property
    def overlap_inputs(self) -> bool:
        return True

    @property
    def overlap_candidates(self) -> bool:
        return self.rows <= 48

    @property
    def engram_prefetch(self) -> bool:
        return self.rows <= 48


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).bfloat16()


def plain(rows: int, columns: int) -> Linear:
    """A BF16 layer whose outputs are about as large as its inputs."""
    return Linear(normal(rows, columns) * columns**-0.5)


def stored(rows: int, columns: int) -> Linear:
    """An FP8 layer of the like."""
    weight = (torch.randn(rows, columns, device=DEVICE) * columns**-0.5 * 32).to(torch.float8_e4m3fn)
    return Linear(weight, torch.full((rows // 32, columns // 32), 122, dtype=torch.uint8, device=DEVICE))


class Eviction:
    """A launch that leaves nothing in the L2 cache that was there."""

    def __init__(self) -> None:
        columns = 8192
        self.matrix = torch.ones(EVICTING // 2 // columns, columns, dtype=torch.bfloat16, device=DEVICE)
        self.vector, self.out = self.matrix[0].clone(), self.matrix[:, 0].clone()

    def run(self, count: int = 1) -> None:
        for _ in range(count):
            torch.mv(self.matrix, self.vector, out=self.out)


class Layers:
    """CHAIN layers of one kind, and a batch of `rows` requests of `context` tokens."""

    def __init__(self, config: ModelConfig, number: int, rows: int, context: int) -> None:
        torch.manual_seed(rows)
        self.config, self.number, self.rows = config, number, rows
        self.context, self.selection = ForwardContext(), Selection(config, rows, DEVICE)
        chosen = torch.rand(rows, context // 2, device=DEVICE).argsort(1)[:, : config.index_topk]
        self.selection.topk_indices[:, : chosen.shape[1]] = chosen.int()
        caches = Caches(config, rows, context, 512, DEVICE)
        requests = [caches.open([0] * context) for _ in range(rows)]
        for request in requests:
            # Caches of zeros serve a clock.
            request.computed = context - 1
            request.window_blocks = [0] * ((context - config.sliding_window) // WINDOW_BLOCK)
        self.batch: Batch = caches.batch([*requests], [1] * rows, static=True)
        self.layers = [self._layer(caches, context) for _ in range(CHAIN)]
        self._fill_index_keys()
        self.x = [normal(rows, config.hidden_size) for _ in range(CHAIN)]

    def _layer(self, caches: Caches, context: int) -> Attention:
        config, number = self.config, self.number
        hidden, rank, heads = config.hidden_size, config.q_lora_rank, config.num_attention_heads
        groups, low, ratio = config.o_groups, config.o_lora_rank, config.compress_ratios[number]
        owns, indexes = number in config.kv_source_layer_ids, number in config.index_source_layer_ids
        compressor = Compressor(ratio, plain(512 * ratio, hidden), normal(512), config.rms_norm_eps) if owns else None
        keys = (plain(128, 512), normal(128)) if owns else (None, None)
        inputs = (stored(config.index_n_heads * 128, rank), plain(config.index_n_heads, hidden)) if indexes else None
        layer = Attention(
            config,
            number,
            self.context,
            self.selection,
            fused_wqa_wkv=stored(rank + 512, hidden),
            q_norm=normal(rank),
            kv_norm=normal(512),
            wq_b=stored(heads * 512, rank),
            wo_a=stored(groups * low, heads * 512 // groups),
            wo_b=stored(hidden, groups * low),
            sinks=torch.randn(heads, device=DEVICE),
            cos_sin=cos_sin_table(config, ratio > 0, context).to(DEVICE),
            compressor=compressor,
            indexer=Indexer(config, number, *inputs, *keys) if inputs is not None else None,
        )
        layer.bind_caches(caches.views)
        return layer

    def _fill_index_keys(self) -> None:
        """Random keys: scores of zeros all have the same place in the order, which is no selection's usual case."""
        caches = [layer.indexer.k_cache for layer in self.layers if layer.indexer is not None]
        # Layers share theirs.
        for cache in {id(cache): cache for cache in caches}.values():
            assert cache is not None
            values, scales = reference.page_planes(cache, 128, 4)
            values.copy_((8 * torch.randn(values.shape, device=DEVICE)).to(torch.float8_e4m3fn).view(torch.uint8))
            scales.copy_(torch.full((*scales.shape[:-1], 1), 0.0625, device=DEVICE).view(torch.uint8))

    def chain(self, mla: bool, projections: bool, ahead: Callable[[], None] = lambda: None) -> Callable[[], None]:
        """All layers' steps, one behind the other. mla, projections: which families of kernels run, and with both the
        indexer's too. ahead: called before each layer. Of candidate sources the first chooses blocks: a model has
        one."""
        config = self.config
        aux = AuxStreams(CudaSideStream(DEVICE), CudaSideStream(DEVICE))
        overlap = CandidateOverlap(CudaSideStream(DEVICE), config.candidate_block_size)
        overlap.warmed.update(range(1, MAX_ROWS + 1))
        tables = SparseIndexTables(FusedTables() if mla else None)
        shape = config.num_attention_heads, config.sliding_window, config.index_topk
        fused = FusedSparseMla(*shape, self.rows, DEVICE) if mla else None
        consumes, bins = config.consumes_candidates(self.number), fused_bins(DEVICE)
        chooses = self.number == config.candidate_source_layer_id
        all_reduce = BoundaryAllReduce(config.hidden_size, MAX_ROWS, SingleRank(), DEVICE)
        publisher = PublishingMxfp8Linear.build(all_reduce, DEVICE)
        kernels = [fused_projections(layer) if projections else None for layer in self.layers]
        steps = [
            AttentionStep(
                layer,
                tables,
                SparseMlaDecode(tables, MAX_ROWS),
                publisher,
                mxfp8_input=False,
                source=overlap if chooses and layer is self.layers[0] else None,
                consumer=overlap if consumes else None,
                aux=aux,
                fused=fused,
                projections=own,
                index=FusedIndexer(layer, bins, own) if mla and own and layer.indexer is not None else None,
            )
            for layer, own in zip(self.layers, kernels, strict=True)
        ]
        gates = Gates(self.rows)

        def run() -> None:
            tables.reset()
            overlap.reset()
            with self.context.running(self.batch.metadata):
                for x, step in zip(self.x, steps, strict=True):
                    # In place of the reduce that frees the slot.
                    all_reduce.reset()
                    ahead()
                    step.run(x, None, self.batch.positions, gates)
            overlap.stream.join()
            aux.join()

        return run


def measure(config: ModelConfig, rows: int, context: int, kinds: list[str], replays: int) -> dict[str, Times]:
    """kind -> variant -> microseconds a layer."""
    found, eviction = {}, Eviction()
    for kind in kinds:
        layers = Layers(config, KINDS[kind], rows, context)
        chains: dict[str, Callable[[], object]] = {
            "kernels": layers.chain(True, True),
            COLD: layers.chain(True, True, eviction.run),
            EVICTIONS: lambda: eviction.run(CHAIN),
            "sparse MLA alone": layers.chain(True, False),
            "projections alone": layers.chain(False, True),
            "reference ops": layers.chain(False, False),
        }
        if rows > projection_tuning.MAX_ROWS:
            # There the kernels are those of sparse MLA.
            del chains["projections alone"], chains["sparse MLA alone"]
        times = interleaved(chains, CHAIN, replays)
        # Of the same turn: what changes from one to the next falls out.
        alone = times.pop(EVICTIONS)
        times[COLD] = [whole - part for whole, part in zip(times[COLD], alone, strict=True)]
        found[kind] = times
    return found


@click.command()
@click.option("--name", default="attention_step_h200", show_default=True, help="Name of the result.")
@click.option("--commit", "given", help="The commit, where the checkout is a copy without its history.")
@click.option("--out", type=click.Path(path_type=Path), default=FOLDER, help="Folder that the result is written to.")
@click.option("--replays", type=click.IntRange(min=20), default=REPLAYS, show_default=True)
@click.option("--rows", "only", type=click.IntRange(1, MAX_ROWS), multiple=True, help="Row counts; 1 to 48.")
@click.option("--kind", "kinds", type=click.Choice([*KINDS]), multiple=True, help="Kinds of layer; all.")
@click.option("--context", type=click.IntRange(min=1024), default=8192, show_default=True, help="Tokens of a request.")
def main(
    name: str, given: str | None, out: Path, replays: int, only: tuple[int, ...], kinds: tuple[str, ...], context: int
) -> None:
    """Times whole attention steps on the current GPU."""
    config = ModelConfig.from_dict(flash_plan(shard_tp=RANKS).config, "flash")
    runs = []
    for rows in only or ROWS:
        us: dict[str, dict[str, float]] = {}
        for kind, times in measure(config, rows, context, [*kinds] or [*KINDS], replays).items():
            click.echo(f"{rows} rows, context {context}, {kind}, us a layer:")
            for label, values in times.items():
                q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
                click.echo(f"  {label:20s} {median:8.2f} ({q1:.2f} to {q3:.2f})")
                us[f"{kind}: {label}"] = {"median": round(median, 3), "q1": round(q1, 3), "q3": round(q3, 3)}
        runs.append({"rows": rows, "layers": CHAIN, "us": us})
    fields = {"ranks": RANKS, "context": context, "replays": replays, "runs": runs}
    write_gpu_result(out / f"{name}.json", "attention_step", given, fields)


if __name__ == "__main__":
    main(prog_name="attention_step")
