"""The attention kernels on vLLM's KV caches and metadata, in Triton's interpreter: checks that `interpreted` runs.

Gluon has no interpreter: torch multiplies in the place of the FP8 projections' kernel, and the index projection's is
emulated.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.index_interpreted import emulate_projection
from tests.helpers.mla_interpreted import PlainProjection, _assembly, interleave_programs, plain_projections
from tests.helpers.step_interpreted import prepare_interpreter
from tests.integration.interpreted import ROWS, Decoding, Engine, bytes_of, ragged_batch


def prepare(patch: pytest.MonkeyPatch) -> None:
    """Has the interpreter round as the GPU does, and the executor take the CPU for a GPU that the kernels serve."""
    from specialized_decode.attention import fused, mla_tuning
    from specialized_decode.attention.projections import FusedProjections
    from specialized_decode.runtime import executor

    prepare_interpreter(_assembly)
    interleave_programs()
    for name in ("mla_unsupported", "projections_unsupported", "index_unsupported"):
        patch.setattr(executor, name, lambda attn, device: None)
    emulate_projection(patch)
    plain_projections(patch)

    def projections(attn: Any) -> FusedProjections:
        return FusedProjections(*map(PlainProjection, (attn.fused_wqa_wkv, attn.wq_b, attn.wo_a, attn.wo_b)))

    patch.setattr(fused, "fused_projections", projections)
    # Few programs.
    launch, tiles = mla_tuning.mla_launch, mla_tuning.key_tiles
    patch.setattr(mla_tuning, "sparse_mla", lambda rows, heads, *keys: launch(rows, heads, tiles(*keys), 1, 1))


def indexer_kernels(attn: Any) -> Any:
    from specialized_decode.attention.fused_index import FusedIndexer, fused_bins

    return FusedIndexer(attn, fused_bins(torch.device("cpu")))


def in_order(partial_sums: Tensor) -> Tensor:
    """[splits, T, N] -> [T, N], added up as the kernels add them."""
    total = partial_sums[0].clone()
    for part in partial_sums[1:]:
        total += part
    return total


def kernels_write_like_vllm(engine: Engine, folder: Path) -> None:
    """The compressor's launch against vLLM's kernels on the same projection: rings of equal bits, records and index
    keys but for what a latent's last bit turns, and nobody else's bytes. Warming writes none."""
    from vllm.forward_context import set_forward_context

    from specialized_decode.runtime.tuning import GATES

    positions, metadata = ragged_batch(engine)
    random = torch.Generator().manual_seed(6)
    with set_forward_context(metadata, engine.config, num_tokens=ROWS):
        for attn in (layer.attn for layer in engine.target().layers if layer.attn.compressor is not None):
            memory = bytes_of(engine)
            before, kernels = memory.clone(), indexer_kernels(attn)
            kernels.warm(attn, GATES["hopper"].low_batch)
            assert torch.equal(memory, before), f"layer {attn.layer_id}: warming wrote to vLLM's caches"
            assert_same_records(memory, attn, kernels, positions, random)


def assert_same_records(memory: Tensor, attn: Any, kernels: Any, positions: Tensor, random: torch.Generator) -> None:
    name, caches, compressor = f"layer {attn.layer_id}", attn.metadata(), attn.compressor
    x = torch.randn(ROWS, kernels.heads.shape[1], generator=random).to(torch.bfloat16)
    inputs = kernels.project(x)
    score = in_order(inputs.partial)[:, : inputs.heads].contiguous()
    exact = x.double() @ compressor.fused_wkv_wgate.weight.double().T
    torch.testing.assert_close(score.double(), exact, rtol=1e-5, atol=1e-5)
    before = torch.randint(256, memory.shape, generator=random, dtype=torch.uint8)
    rings, owned = rings_of(attn)
    # As warming compiles it: else a capture would compile.
    assert rings.stride(0) % 16 == 0 and rings.data_ptr() % 16 == 0
    held = torch.randn(rings[owned].shape, generator=random)

    def fill(content: Tensor) -> Tensor:
        memory.copy_(content)
        rings[owned] = held
        return memory.clone()

    before = fill(before)
    compress_by_vllm(attn, score, positions)
    theirs, their_rings = memory.clone(), rings[owned]
    fill(before ^ 0xFF)
    compress_by_vllm(attn, score, positions)
    # What does not depend on what was there.
    written = theirs == memory
    fill(before)
    kernels.compress(attn, inputs, positions, caches)
    assert torch.equal(rings[owned].view(torch.int32), their_rings.view(torch.int32)), f"{name}: rings differ"
    assert torch.equal(their_rings, held) == (compressor.ratio == 1)
    assert torch.equal(memory[~written], before[~written]), f"{name}: bytes of nobody's were written"
    closed = int((caches.compressed.slot_mapping >= 0).sum())
    assert closed > 2 and int((theirs != before).sum()) > 600 * closed
    different = int((memory != theirs).sum())
    assert different <= 6 * closed, f"{name}: {different} bytes differ in {closed} rows"


def compress_by_vllm(attn: Any, score: Tensor, positions: Tensor) -> None:
    """score: [T, ratio * 512] float32, of the compressor's projection."""
    from vllm.models.deepseek_v41.common.ops import indexer_k_norm_rope_store
    from vllm.models.deepseek_v41.common.ops.fused_compress_quant_cache import (
        fused_save_compress_norm,
        rope_quant_insert,
    )

    caches, compressor, indexer = attn.metadata(), attn.compressor, attn.indexer
    rings, ring, ratio = compressor.state_cache, caches.ring, compressor.ratio
    owners = (None, None) if rings is None else (ring.query_start_loc, ring.token_to_req)
    slots = caches.compressed.slot_mapping if rings is None else ring.slot_mapping
    latent = torch.empty(len(score), 512, dtype=torch.bfloat16)
    norm = compressor.norm, compressor.eps
    fused_save_compress_norm(score, positions, rings, slots, *owners, *norm, ratio, latent)
    records = attn.compressed_cache, caches.compressed.slot_mapping
    rope_quant_insert(latent, positions, attn.cos_sin, *records, ratio)
    keys = indexer.k_norm, indexer.eps, indexer.k_cache, caches.index.slot_mapping
    indexer_k_norm_rope_store(indexer.wk(latent), positions, attn.cos_sin, *keys, ratio, False)


def kernels_select_like_the_reference(engine: Engine, folder: Path) -> None:
    """Scores of vLLM's index keys, the selection in vLLM's buffer, and its slots, which vLLM's kernel derives too."""
    from vllm.forward_context import set_forward_context
    from vllm.models.deepseek_v41.common.ops import compute_global_topk_indices_and_lens

    positions, metadata = ragged_batch(engine)
    random = torch.Generator().manual_seed(8)
    valid = torch.tensor([True] * (ROWS - 1) + [False])
    with set_forward_context(metadata, engine.config, num_tokens=ROWS):
        for attn in (layer.attn for layer in engine.target().layers if layer.attn.indexer is not None):
            write_keys(attn, positions, valid, random)
            slots = assert_selected(attn, positions, valid, random)
            requests, meta = metadata[attn.window_prefix].token_to_req_indices, attn.metadata().compressed
            chosen = attn.selection.topk_indices[:ROWS]
            theirs, _ = compute_global_topk_indices_and_lens(chosen, requests, meta.block_table, meta.states, valid)
            assert torch.equal(slots[:-1], theirs[:-1].long()), f"layer {attn.layer_id}: slots are elsewhere"
            assert (slots[-1] == -1).all(), f"layer {attn.layer_id}: a padding row has slots"


def write_keys(attn: Any, positions: Tensor, valid: Tensor, random: torch.Generator) -> None:
    """Index keys of all that the rows' requests hold."""
    from specialized_decode.attention import reference

    ratio, meta = attn.indexer.ratio, attn.metadata().index
    closed = ((positions + 1) // ratio).unsqueeze(1)
    states = torch.arange(int(closed.max())).expand(len(closed), -1)
    states = torch.where((states < closed) & valid.unsqueeze(1), states, -1)
    keys = torch.randn(states.numel(), 128, generator=random).to(torch.bfloat16)
    turns = attn.cos_sin[states.clamp_min(0).flatten() * ratio]
    reference.insert_index_keys(attn.indexer.k_cache, reference.position_slots(meta, states).flatten(), keys, turns)


def assert_selected(attn: Any, positions: Tensor, valid: Tensor, random: torch.Generator) -> Tensor:
    """The slots of what the kernels select."""
    from specialized_decode.attention import reference

    caches, indexer, name, kernels = attn.metadata(), attn.indexer, f"layer {attn.layer_id}", indexer_kernels(attn)
    inputs = kernels.project(torch.randn(ROWS, kernels.heads.shape[1], generator=random).to(torch.bfloat16))
    q = torch.randn(ROWS, indexer.num_heads * 128, generator=random).to(torch.bfloat16)
    weights = in_order(inputs.partial)[:, inputs.heads :][:, : indexer.num_heads].to(torch.bfloat16)
    heads = q.unflatten(1, (indexer.num_heads, 128))
    codes, scaled = reference.index_queries(heads, weights, attn.cos_sin[positions])
    expected = reference.index_scores(indexer.k_cache, caches.index, indexer.ratio, codes, scaled, positions)
    flags = torch.rand(expected.shape, generator=random) < 0.6 if indexer.candidate_consumer else None
    wanted = valid.unsqueeze(1) if flags is None else flags & valid.unsqueeze(1)
    expected = expected.masked_fill(~wanted, float("-inf"))
    found = kernels.scores(attn, q, inputs, positions, caches, flags)
    closed = torch.where(valid, (positions + 1) // indexer.ratio, 0)
    held = torch.arange(found.shape[1]) < closed.unsqueeze(1)
    masked = torch.where(held, found, float("-inf"))
    torch.testing.assert_close(masked, expected, rtol=1e-4, atol=1e-3)
    buffer = attn.selection.topk_indices
    buffer.fill_(12345)
    slots: Tensor
    if indexer.candidate_source:
        blocks, size = attn.selection.candidate_blocks, indexer.candidate_block_size
        blocks.fill_(12345)
        slots, made = kernels.choose(attn, found, positions, caches, blocks[:ROWS])
        chosen = reference.candidate_blocks(masked, closed, size, blocks.shape[1])
        assert torch.equal(blocks[:ROWS].sort(1).values, chosen.sort(1).values), f"{name}: other blocks are chosen"
        assert (blocks[ROWS:] == 12345).all(), f"{name}: a row behind the batch's was written"
        assert torch.equal(made & held, reference.candidate_flags(chosen, size, made.shape[1]) & held)
    else:
        slots = kernels.top(attn, found, positions, caches)
    best = reference.top_positions(masked, buffer.shape[1])
    assert torch.equal(buffer[:ROWS].sort(1).values, best.sort(1).values), f"{name}: other positions are selected"
    assert (buffer[ROWS:] == 12345).all(), f"{name}: a row behind the batch's was written"
    # One with less than there are places, and one with more.
    assert (best[0] < 0).any() and (best >= 0).all(1).any()
    return slots


def rings_of(attn: Any) -> tuple[Tensor, Tensor]:
    """A compressor's rings [blocks, rows, 1024], and which are the batch's: vLLM's caches share all blocks."""
    if attn.compressor is None or attn.compressor.state_cache is None:
        return torch.zeros(0, 8, 1024), torch.zeros(0, dtype=torch.int64)
    ring = attn.metadata().ring
    return attn.compressor.state_cache, (ring.slot_mapping[ring.slot_mapping >= 0] // ring.states).unique()


def taken(memory: Tensor, attn: Any) -> tuple[Tensor, Tensor]:
    """A copy of the memory with zeros in the place of the batch's rings, and those, which are cleared."""
    rings, owned = rings_of(attn)
    own = rings[owned]
    rings[owned] = 0
    return memory.clone(), own


class Both:
    """A layer's attention on the reference ops, held against the kernels from the same caches and the same input. What
    it returns and leaves behind is the reference's."""

    mxfp8_input, publisher = False, None

    def __init__(self, engine: Engine, reference: Any, kernels: Any) -> None:
        self.engine, self.reference, self.kernels = engine, reference, kernels
        self.ran = 0
        # Its output is read here, and not by a boundary.
        kernels.publisher = None

    def run(self, x: Tensor, quant: None, positions: Tensor, step: Any) -> Tensor:
        memory, attn = bytes_of(self.engine), self.kernels.attn
        owned = attn.metadata().window.slot_mapping >= 0
        rows, name = int(owned.sum()), f"layer {attn.layer_id}"
        before = memory.clone()
        found = self.kernels.run(x, quant, positions, step)
        chosen = attn.selection.topk_indices[: len(x)].clone()
        left, their_rings = taken(memory, attn)
        memory.copy_(before)
        expected = self.reference.run(x, quant, positions, step)
        behind = memory.clone()
        remained, own_rings = taken(memory, attn)
        memory.copy_(behind)
        error = (found.float() - expected.float())[owned].norm(dim=1) / expected[owned].float().norm(dim=1)
        assert error.max() < 1e-2, f"{name}: {error.tolist()} off"
        # What nobody has written holds any bits.
        torch.testing.assert_close(their_rings, own_rings, rtol=1e-4, atol=1e-4, equal_nan=True)
        different = left != remained
        # Sums in another order turn the last bits of some numbers.
        assert int(different.sum()) <= 24 * rows, f"{name}: {int(different.sum())} bytes differ in {rows} rows"
        different &= before == remained
        assert int(different.sum()) <= 2 * rows, f"{name}: {int(different.sum())} bytes of nobody's were written"
        if attn.indexer is not None:
            theirs = attn.selection.topk_indices[: len(x)]
            for ours, own in zip(chosen[owned].tolist(), theirs[owned].tolist(), strict=True):
                # Keys and scores are rounded otherwise; of what lies closest to the last, some change places.
                common = len(set(ours) & set(own))
                assert common >= 0.9 * len(set(own)), f"{name}: {ours} are selected, {own} by the reference"
                assert ours.count(-1) == own.count(-1), f"{name}: {ours} are selected, {own} by the reference"
        self.ran += 1
        return expected


def decode_on_kernels(engine: Engine, folder: Path) -> None:
    """Steps of one token a request, and of several, of which some are taken back: every layer's attention on the
    kernels beside the reference's, whose steps give the plain model's hidden states, bit for bit."""
    target = engine.target()
    for requests, count in ((ROWS, 1), (1, 6)):
        decoding = Decoding(engine, folder, target, requests)
        ours, kernels = (executor(decoding, target, *families) for families in ((), ("attention",)))
        assert kernels.sparse_mla is not None and kernels.candidates is not None
        for plan in kernels.layers:
            assert (plan.attention.index is None) == (plan.layer.attn.indexer is None)
        decoding.join(0)
        # Past the window and what the indexer selects.
        for step in range(70):
            if requests > 1 and step == 61:
                decoding.join(2)
            assert torch.equal(*decoding.step(ours)), f"step {step}"
            decoding.advance()
        kernels.candidates.warm(requests * count)
        pairs = list(zip(ours.layers, kernels.layers, strict=True))
        both: list[Any] = [Both(engine, plan.attention, other.attention) for plan, other in pairs]
        ours.layers = [replace(plan, attention=beside) for plan, beside in zip(ours.layers, both, strict=True)]
        for step in range(2):
            kernels._forget()
            found, expected = decoding.step(ours, count)
            kernels._join_side_work()
            assert torch.equal(found, expected), f"{count} tokens, step {step}"
            decoding.advance(1 if count == 1 else 3)
        assert [beside.ran for beside in both] == [2] * len(both)
        decoding.leave()


def executor(decoding: Decoding, target: Any, *families: str) -> Any:
    """Of reference ops, and these families' kernels."""
    from specialized_decode.runtime import DecodeConfig, SpecializedDecode

    config = DecodeConfig(stock=False, kernels=frozenset(families))
    return SpecializedDecode.for_target(target, config, decoding.plain.model.lm_head)
