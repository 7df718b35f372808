"""Sparse MLA in CUDA graphs, at V4.1-Flash's widths: `python -m benchmarks.attention_mla`.

Layers of a chain have KV caches of their own, more than the L2 cache holds, and their queries rotate. Our kernels and
vLLM's FlashMLA op, where vLLM is installed, replay in turn in one run. vLLM is read through its public Python modules
and its ops alone and is not needed. `--sweep` times every cut of a launch instead, for `attention/mla_tuning.py`.

"insert, conversion, attention" is all that lies between `wq_b`'s output and the head outputs: RoPE, the latent's norm
and the insert of its record, the attention and its combine in every layer; and launches that convert positions to
slots, once for the layers that share them: at the release's 8 index sources among its 40 layers, 36 of which read a
selection, 4.5 a source; and the window's once in 40. So a layer bears 9 launches in 40. They lie in the chain itself.
In "insert, conversion beside, attention" a source's runs on a side stream, beside the attention of the layer before,
and is joined ahead of its own. In low-batch steps whose indexer runs on kernels the launch that selects stores the
slots itself, and no conversion is launched but the window's: "insert, attention" has none at all.

The query's norm lies ahead of `wq_b`, and is not in it: in low-batch steps `wq_b` norms its input itself. Where it does
not, one launch norms queries and inserts records: "norms and insert apart" has that launch in every layer. "behind
wq_b" has `wq_b` with its norm in front of each; less "wq_b", it is what the rest adds to a step.
"""

import statistics
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import torch
from torch import Tensor

from benchmarks.results import FOLDER, write_gpu_result
from benchmarks.timing import replayed
from specialized_decode.attention import mla_tuning as tuning
from specialized_decode.attention.fused import NormedLinear
from specialized_decode.attention.fused_mla import MAX_INSERTED, RECORD, FusedSparseMla, FusedTables
from specialized_decode.attention.mla import Settled
from specialized_decode.backbone.linear import Linear

WINDOW, TOPK, Q_RANK, WINDOW_STATES, STATES = 128, 512, 1280, 32, 64
LAYERS = 40
# The release's layers that make a selection, which those up to the next share.
SOURCES = (2, 8, 14, 20, 24, 28, 32, 36)
# Layers with a `wq_b` of their own, of 10 MB at 16 heads.
PROJECTIONS = 8
ROWS = (1, 2, 4, 8, 16, 48, 128, 384)
# Bytes of KV records that a pass over the layers reads at least: more than an H200's L2 cache.
READ = 60_000_000
REPLAYS = 30

# name -> microseconds a layer, of each replay
Times = dict[str, list[float]]


class Cache:
    """A paged cache of one layer among three of its group, requests' blocks in no order."""

    def __init__(self, requests: int, tokens: int, states: int, kept: int) -> None:
        """kept: blocks at a request's end that it still has."""
        columns = -(-tokens // states)
        first = max(0, columns - kept)
        used = columns - first
        page = -(-states * RECORD // 576) * 576
        buffer = torch.zeros(1 + requests * used, 3 * page, dtype=torch.uint8, device="cuda")
        buffer[:, page : page + states * 576] = torch.randint(0, 120, (states * 576,), device="cuda").to(torch.uint8)
        buffer[:, page + states * 576 : 2 * page] = 117
        self.view = buffer.view(-1).as_strided((1 + requests * used, states, RECORD), (3 * page, RECORD, 1), page)
        table = torch.zeros(requests, columns, dtype=torch.int32, device="cuda")
        order = torch.randperm(requests * used, device="cuda").view(requests, used)
        table[:, first:] = 1 + order.int()
        slots = table[:, (tokens - 1) // states].long() * states + (tokens - 1) % states
        self.meta = SimpleNamespace(
            states=states,
            slot_mapping=slots,
            token_to_req=torch.arange(requests, dtype=torch.int32, device="cuda"),
            block_table=table,
        )


class Layers:
    """Layers of one row count at one context."""

    def __init__(self, rows: int, heads: int, context: int) -> None:
        torch.manual_seed(rows)
        self.rows, self.heads = rows, heads
        self.positions = torch.full((rows,), context - 1, dtype=torch.int64, device="cuda")
        count = max(2, -(-READ // (rows * (WINDOW + TOPK) * RECORD)))
        self.window = [Cache(rows, context, WINDOW_STATES, 5) for _ in range(count)]
        self.compressed = [Cache(rows, context, STATES, 1 << 30) for _ in range(count)]
        chosen = [torch.rand(rows, context, device="cuda").argsort(1)[:, :TOPK] for _ in range(count)]
        self.selection = [torch.full((rows, TOPK), -1, dtype=torch.int32, device="cuda") for _ in range(count)]
        for states, found in zip(self.selection, chosen, strict=True):
            states[:, : found.shape[1]] = found.int()
        angles = torch.rand(context + 1, 32, device="cuda") * 6.28
        cos_sin, sinks = torch.cat((angles.cos(), angles.sin()), 1), torch.randn(heads, device="cuda")
        norms = [torch.ones(n, dtype=torch.bfloat16, device="cuda") for n in (Q_RANK, 512)]
        self.attn: list[Any] = [
            SimpleNamespace(
                num_heads=heads, head_dim=512, q_lora_rank=Q_RANK, scale=512**-0.5, eps=1e-20, sinks=sinks,
                cos_sin=cos_sin, q_norm=norms[0], kv_norm=norms[1], window_cache=window.view,
                compressed_cache=compressed.view,
            )
            for window, compressed in zip(self.window, self.compressed, strict=True)
        ]  # fmt: skip
        self.q = [torch.randn(rows, heads, 512, device="cuda").bfloat16() for _ in range(count)]
        self.projected = [torch.randn(rows, Q_RANK + 512, device="cuda").bfloat16() for _ in range(count)]

    @property
    def chain(self) -> int:
        """Layers of a chain: all, and no fewer than a model's."""
        return max(LAYERS, len(self.attn))


class Ours:
    """Chains of our kernels."""

    def __init__(self, layers: Layers) -> None:
        self.layers, self.ops = layers, FusedTables()
        self.fused = FusedSparseMla(layers.heads, WINDOW, TOPK, layers.rows, torch.device("cuda"))
        self.tables = [self._tables(number) for number in range(len(layers.attn))]
        few = layers.rows <= MAX_INSERTED
        self.wq_b = [self._wq_b() for _ in range(PROJECTIONS)] if few else []
        self.side = torch.cuda.Stream()

    def _wq_b(self) -> NormedLinear:
        n = self.layers.heads * 512
        weight = torch.randn(n, Q_RANK, device="cuda").to(torch.float8_e4m3fn)
        scale = torch.full((n // 32, Q_RANK // 32), 122, dtype=torch.uint8, device="cuda")
        return NormedLinear(Linear(weight, scale), 512, early=False)

    def _tables(self, number: int) -> tuple[Tensor, Tensor]:
        layers = self.layers
        window: Any = layers.window[number].meta
        compressed: Any = layers.compressed[number].meta
        return (
            self.ops.window(window, layers.positions, WINDOW),
            self.ops.selected(compressed, layers.selection[number], window),
        )

    def _convert(self, number: int) -> None:
        """A selection's slots."""
        window: Any = self.layers.window[number].meta
        compressed: Any = self.layers.compressed[number].meta
        self.ops.selected(compressed, self.layers.selection[number], window)

    def run(
        self,
        norms: bool = False,
        insert: bool = False,
        convert: bool = False,
        project: bool = False,
        attend: bool = True,
        settled: Settled = Settled.ALL,
        selected: bool = True,
        launch: tuning.SparseMla | None = None,
        beside: bool = False,
    ) -> None:
        """norms: the launch that norms and inserts ahead of each; insert: attention inserts; convert: index conversion,
        the sources' and the window's; project: `wq_b` ahead of each, and whatever it yields as queries; beside:
        sources' conversions run on the side stream."""
        layers = self.layers
        for at in range(layers.chain):
            number = at % len(layers.attn)
            attn, tables, q = layers.attn[number], self.tables[number], layers.q[number]
            meta: Any = layers.window[number].meta
            if convert and at % LAYERS == 0:
                self.ops.window(meta, layers.positions, WINDOW)
            if convert and beside and at + 1 < layers.chain and (at + 1) % LAYERS in SOURCES:
                self.side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self.side):
                    self._convert((at + 1) % len(layers.attn))
            if convert and at % LAYERS in SOURCES:
                if beside:
                    torch.cuda.current_stream().wait_stream(self.side)
                else:
                    self._convert(number)
            projected = layers.projected[number]
            if norms:
                self.fused.norm_insert(attn, projected, layers.positions, meta)
            if project:
                wq_b = self.wq_b[at % PROJECTIONS]
                q = wq_b.normed(projected[:, :Q_RANK], attn.q_norm, attn.eps).view_as(q)
            if not attend:
                continue
            chosen = tables[1] if selected else None
            inserted = (projected[:, Q_RANK:], meta) if insert else (None, None)
            self.fused(attn, q, layers.positions, tables[0], chosen, settled, launch, *inserted)


# --- vLLM -------------------------------------------------------------------------------------------------------


def stock_chains(layers: Layers, tables: list[tuple[Tensor, Tensor]]) -> dict[str, Callable[[], object]]:
    """vLLM's ops as its FlashMLA layer calls them, heads padded to 64; none where vLLM cannot be imported. Without its
    inverse RoPE."""
    try:
        import vllm._custom_ops  # noqa: F401
        from vllm.models.deepseek_v41.common.ops import cache_utils
        from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache, get_mla_metadata
    except Exception as error:
        click.echo(f"no stock kernels: {type(error).__name__}: {error}", err=True)
        return {}
    rows, padded = layers.rows, 64
    schedule = get_mla_metadata()[0]
    queries = [torch.nn.functional.pad(q, (0, 0, 0, padded - layers.heads)) for q in layers.q]
    kv = [projected[:, Q_RANK:].contiguous() for projected in layers.projected]
    sinks = torch.full((padded,), float("-inf"), device="cuda")
    sinks[: layers.heads] = layers.attn[0].sinks
    lengths = [torch.full((rows,), n, dtype=torch.int32, device="cuda") for n in (WINDOW, TOPK)]
    slots = [(window.int().unsqueeze(1), selected.int().unsqueeze(1)) for window, selected in tables]
    valid = torch.ones(rows, dtype=torch.bool, device="cuda")
    out = torch.empty(rows, 1, padded, 512, dtype=torch.bfloat16, device="cuda")

    def attend(number: int, q: Tensor) -> None:
        attn = layers.attn[number]
        flash_mla_with_kvcache(
            q=q.unsqueeze(1),
            k_cache=attn.window_cache.unsqueeze(-2),
            block_table=None,
            head_dim_v=512,
            tile_scheduler_metadata=schedule,
            cache_seqlens=None,
            is_fp8_kvcache=True,
            indices=slots[number][0],
            topk_length=lengths[0],
            softmax_scale=attn.scale,
            attn_sink=sinks,
            extra_k_cache=attn.compressed_cache.unsqueeze(-2),
            extra_indices_in_kvcache=slots[number][1],
            extra_topk_length=lengths[1],
            out=out,
        )

    def alone() -> None:
        for at in range(layers.chain):
            attend(at % len(layers.attn), queries[at % len(layers.attn)])

    def whole() -> None:
        for at in range(layers.chain):
            number = at % len(layers.attn)
            attn, window, compressed = layers.attn[number], layers.window[number], layers.compressed[number]
            q = torch.ops._C.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
                layers.q[number], kv[number], attn.window_cache.view(attn.window_cache.shape[0], -1),
                window.meta.slot_mapping, layers.positions, attn.cos_sin, padded, attn.eps, WINDOW_STATES,
                False, False, True, False,
            )  # fmt: skip
            # In every layer, as its decode path does.
            cache_utils.compute_global_topk_indices_and_lens(
                layers.selection[number], window.meta.token_to_req, compressed.meta.block_table, STATES, valid
            )
            attend(number, q)

    found: dict[str, Callable[[], object]] = {}
    chains: tuple[tuple[str, Callable[[], object]], ...] = (
        ("stock attention", alone),
        ("stock RoPE, insert, conversion, attention", whole),
    )
    for name, run in chains:
        try:
            run()
            torch.cuda.synchronize()
        except Exception as error:
            click.echo(f"no {name}: {type(error).__name__}: {error}", err=True)
            continue
        found[name] = run
    return found


# --- measuring --------------------------------------------------------------------------------------------------


def capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of `run`, which runs twice before: what it compiles and loads is there then."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def interleaved(chains: dict[str, Callable[[], object]], count: int, replays: int) -> Times:
    """All graphs replay in turn; microseconds of one of `count` layers."""
    graphs = {name: (capture(run), count) for name, run in chains.items()}
    return replayed(graphs, replays)


def cuts(layers: Layers) -> dict[str, Callable[[], object]]:
    """Every launch that `tuning.candidates` has."""
    ours = Ours(layers)
    found: dict[str, Callable[[], object]] = {}
    for launch in tuning.candidates(layers.rows, layers.heads, WINDOW, TOPK):
        found[cut_name(launch)] = lambda launch=launch: ours.run(launch=launch)  # type: ignore[misc]
    return found


def cut_name(launch: tuning.SparseMla) -> str:
    """A launch in words."""
    extra = ", splits wait" * launch.spread + ", next waits" * (not launch.early)
    return f"{launch.splits} splits, {launch.slices} slices, {launch.keys} keys, {launch.warps} warps{extra}"


def chains_of(layers: Layers, stock: bool) -> dict[str, Callable[[], object]]:
    """What is compared."""
    ours = Ours(layers)
    chains: dict[str, Callable[[], object]] = {
        "attention": ours.run,
        "attention, nothing read ahead": lambda: ours.run(settled=Settled.NOTHING),
        "attention, window alone": lambda: ours.run(selected=False),
        "norms and insert apart": lambda: ours.run(norms=True, convert=True),
    }
    if layers.rows <= MAX_INSERTED:
        chains |= {
            "insert, attention": lambda: ours.run(insert=True),
            "insert, conversion, attention": lambda: ours.run(insert=True, convert=True),
            "insert, conversion beside, attention": lambda: ours.run(insert=True, convert=True, beside=True),
            "wq_b": lambda: ours.run(project=True, attend=False),
            "behind wq_b": lambda: ours.run(project=True, insert=True, convert=True),
        }
    return chains | (stock_chains(layers, ours.tables) if stock else {})


@click.command()
@click.option("--name", default="attention_mla_h200", show_default=True, help="Name of the result.")
@click.option("--commit", "given", help="The commit, where the checkout is a copy without its history.")
@click.option("--out", type=click.Path(path_type=Path), default=FOLDER, help="Folder that the result is written to.")
@click.option("--no-stock", is_flag=True, help="Leave vLLM's kernels out.")
@click.option("--sweep", is_flag=True, help="Time every cut of a launch; writes nothing.")
@click.option("--replays", type=click.IntRange(min=20), default=REPLAYS, show_default=True)
@click.option("--rows", "only", type=click.IntRange(1, 384), multiple=True, help="Row counts; 1 to 384.")
@click.option("--heads", type=click.IntRange(1, 64), default=16, show_default=True, help="Heads of a rank.")
@click.option("--context", type=click.IntRange(min=TOPK), default=8192, show_default=True, help="Tokens of a request.")
def main(
    name: str,
    given: str | None,
    out: Path,
    no_stock: bool,
    sweep: bool,
    replays: int,
    only: tuple[int, ...],
    heads: int,
    context: int,
) -> None:
    """Times sparse MLA on the current GPU."""
    runs = []
    for rows in only or ROWS:
        layers = Layers(rows, heads, context)
        times = interleaved(cuts(layers) if sweep else chains_of(layers, not no_stock), layers.chain, replays)
        quartiles = {label: statistics.quantiles(values, n=4, method="inclusive") for label, values in times.items()}
        order = sorted(quartiles, key=lambda label: quartiles[label][1]) if sweep else quartiles
        click.echo(f"{rows} rows, {heads} heads, context {context}, us a layer:")
        for label in order:
            q1, median, q3 = quartiles[label]
            click.echo(f"  {label:45s} {median:8.2f} ({q1:.2f} to {q3:.2f})")
        us = {
            label: {"median": round(median, 3), "q1": round(q1, 3), "q3": round(q3, 3)}
            for label, (q1, median, q3) in quartiles.items()
        }
        runs.append({"rows": rows, "layers": layers.chain, "caches": len(layers.attn), "us": us})
    if sweep:
        return
    fields = {"heads": heads, "context": context, "replays": replays, "runs": runs}
    write_gpu_result(out / f"{name}.json", "attention_mla", given, fields)


if __name__ == "__main__":
    main(prog_name="attention_mla")
