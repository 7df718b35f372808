"""Places inside a captured step where a test lets an error happen."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from specialized_decode.attention import AttentionStep, LowBatchLinear, SparseMlaDecode
from specialized_decode.attention import reference as attention_reference
from specialized_decode.boundary import PublishingMxfp8Linear
from specialized_decode.boundary import reference as boundary_reference
from specialized_decode.engram import EngramPrefetch
from specialized_decode.engram import reference as engram_reference
from specialized_decode.moe import MoEStep, RoutedExpertGemms
from specialized_decode.moe import reference as moe_reference
from specialized_decode.runtime import SpecializedDecode
from tests.helpers.runtime_model import Layers, Pair, unjoined

# Every kind of layer; layer 1 compresses by 2, layer 2 by 1 and publishes candidates, layer 3 restricts itself.
LAYERS = Layers((0, 2, 1, 1), (1, 2), (1, 2, 3), 2, (1, 3))


class Injected(Exception):
    """The error that a test injects."""


@dataclass(frozen=True)
class Place:
    """A call inside a captured step.

    owner: what holds the attribute `name`: a module, a class or an object of the pair; skip: calls that go well
    first; after: the call is done before the error; pending: streams by name of which at least one runs forked work
    at that moment, None where there need not be any.
    """

    owner: Callable[[Pair], Any]
    name: str
    skip: int = 0
    after: bool = False
    pending: tuple[str, ...] | None = ("engram 1", "engram 3")


def _attn(layer: int) -> Callable[[Pair], Any]:
    return lambda pair: pair.backbone.layers[layer].attn


def _indexer(layer: int) -> Callable[[Pair], Any]:
    return lambda pair: pair.backbone.layers[layer].attn.indexer


def _compressor(layer: int) -> Callable[[Pair], Any]:
    return lambda pair: pair.backbone.layers[layer].attn.compressor


def _executor(part: str) -> Callable[[Pair], Any]:
    return lambda pair: getattr(pair.executor, part)


def _always(owner: object) -> Callable[[Pair], Any]:
    return lambda pair: owner


COMPRESSOR, INDEXER, CANDIDATES, MHC = ("compressor",), ("indexer",), ("candidates",), ("mhc",)
PLACES = {
    "all-reduce, first boundary": Place(_executor("all_reduce"), "full"),
    "all-reduce, later boundary": Place(_executor("all_reduce"), "full", skip=2),
    "all-reduce, before Engram": Place(_executor("all_reduce"), "residual_only"),
    "all-reduce, last": Place(_executor("all_reduce"), "residual_only", skip=2, pending=None),
    "all-reduce of a published slot": Place(_executor("all_reduce"), "reduce"),
    "after an all-reduce": Place(_executor("all_reduce"), "reduce", skip=1, after=True),
    "slot wanted": Place(_executor("all_reduce"), "publish_target", skip=1),
    "slot handed out, not published": Place(_executor("all_reduce"), "publish_target", skip=1, after=True),
    "between publish_target and mark_published": Place(_executor("all_reduce"), "mark_published"),
    "first boundary": Place(_executor("boundaries"), "first"),
    "first boundary, after": Place(_executor("boundaries"), "first", after=True, pending=MHC),
    "boundary": Place(_executor("boundaries"), "sublayer", skip=2),
    "boundary, after": Place(_executor("boundaries"), "sublayer", skip=1, after=True, pending=MHC),
    "boundary after Engram": Place(_executor("boundaries"), "pre"),
    "last boundary": Place(_executor("boundaries"), "post_only", skip=2, pending=None),
    "join of the coefficients": Place(_executor("boundaries"), "join", skip=2, pending=MHC),
    "join after a sublayer that has joined": Place(_executor("boundaries"), "join", skip=1),
    "coefficients of the first boundary": Place(_always(boundary_reference), "coefficients", pending=MHC),
    "coefficients": Place(_always(boundary_reference), "coefficients", skip=3, pending=MHC),
    "aux mean": Place(_always(boundary_reference), "stream_mean", skip=1),
    "attention": Place(_always(AttentionStep), "run", skip=1, pending=MHC),
    "attention, after": Place(_always(AttentionStep), "run", skip=2, after=True),
    "attention's metadata": Place(_attn(2), "metadata"),
    "projection": Place(_always(LowBatchLinear), "__call__", skip=2),
    "compressor": Place(_compressor(1), "fused_wkv_wgate", pending=COMPRESSOR),
    "compressor of ratio 1": Place(_compressor(2), "fused_wkv_wgate", pending=COMPRESSOR),
    "compressor's cache": Place(_always(attention_reference), "insert_kv", skip=1, pending=COMPRESSOR),
    "index keys": Place(_always(attention_reference), "insert_index_keys", skip=1, pending=COMPRESSOR),
    "indexer's weights": Place(_indexer(1), "weights_proj", pending=INDEXER),
    "indexer's queries": Place(_indexer(2), "wq_b", pending=INDEXER),
    "indexer's scores": Place(_always(attention_reference), "index_scores", skip=2, pending=INDEXER),
    "selection": Place(_always(attention_reference), "top_positions", pending=INDEXER),
    "window table": Place(_executor("tables"), "window"),
    "selected table": Place(_executor("tables"), "selected", pending=INDEXER),
    "published selection": Place(_executor("tables"), "publish", skip=1, pending=INDEXER),
    "published selection, after": Place(_executor("tables"), "publish", skip=1, after=True, pending=INDEXER),
    "table's slots": Place(_always(attention_reference), "position_slots", skip=1),
    "sparse MLA": Place(_always(SparseMlaDecode), "__call__", skip=1),
    "sparse MLA, after": Place(_always(SparseMlaDecode), "__call__", skip=2, after=True),
    "inside sparse MLA": Place(_always(attention_reference), "sparse_mla"),
    "candidate fork": Place(_executor("candidates"), "fork", pending=INDEXER),
    "candidate expansion": Place(_always(attention_reference), "candidate_flags", pending=CANDIDATES),
    "candidate join": Place(_executor("candidates"), "join", pending=CANDIDATES),
    "output projection": Place(_always(PublishingMxfp8Linear), "__call__", skip=1),
    "output projection, published": Place(_always(PublishingMxfp8Linear), "__call__", skip=1, after=True),
    "MoE": Place(_always(MoEStep), "run", pending=MHC),
    "MoE, after": Place(_always(MoEStep), "run", skip=2, after=True),
    "routed experts": Place(_always(RoutedExpertGemms), "__call__", skip=1),
    "router": Place(_always(moe_reference), "select_experts", skip=1, pending=MHC),
    "Engram start": Place(_executor("engram"), "start", pending=None),
    "Engram started": Place(_executor("engram"), "start", after=True),
    "Engram's second projection": Place(_always(EngramPrefetch), "_wkv", skip=1),
    "Engram": Place(_executor("engram"), "forward"),
    "Engram, after": Place(_executor("engram"), "forward", after=True, pending=("engram 3",)),
    "Engram injection": Place(_always(engram_reference), "inject", pending=("engram 3",)),
    "head": Place(_always(SpecializedDecode), "_head", pending=None),
    "head, after": Place(_always(SpecializedDecode), "_head", after=True, pending=None),
}


def inject(patch: pytest.MonkeyPatch, pair: Pair, place: Place, error: BaseException) -> list[list[str]]:
    """Raises `error` at `place` during captures alone. Returns a list that takes the streams pending at that moment."""
    owner = place.owner(pair)
    original = getattr(owner, place.name)
    calls = iter(range(1 << 30))
    pending: list[list[str]] = []

    def failing(*args: Any, **kwargs: Any) -> Any:
        if not pair.host.capturing() or next(calls) != place.skip:
            return original(*args, **kwargs)
        if place.after:
            original(*args, **kwargs)
        pending.append(unjoined(pair))
        raise error

    patch.setattr(owner, place.name, failing)
    return pending
