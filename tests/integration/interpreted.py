"""vLLM's KV caches and attention metadata on a CPU, its Triton kernels in Triton's interpreter.

Triton reads TRITON_INTERPRET when it is imported: `python -m tests.integration.interpreted FOLDER CHECK ...` runs some
of CHECKS in a process of its own. An assertion that fails ends it.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

ROWS, CONTEXT, BLOCK_BYTES = 6, 256, 24 << 20


class Engine:
    """vLLM's model on the CPU with its caches, as its worker makes them, and the executor's view of it."""

    def __init__(self, config: Any, patch: pytest.MonkeyPatch) -> None:
        """config: vLLM's, set and with one rank's groups."""
        import vllm.v1.attention.backends.mla.indexer as indexer
        from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
        from vllm.platforms import current_platform
        from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec, init_attn_backend, init_kv_cache

        from specialized_decode.integration import bind_weights
        from tests.integration import vllm_model
        from tests.integration.loaded import process

        self.config = config
        patch.setattr(type(current_platform), "num_compute_units", classmethod(lambda cls, device_id=0: 132))
        # The plan of DeepGEMM's kernel, which that kernel alone reads.
        plan = torch.zeros(133, 2, dtype=torch.int32)
        patch.setattr(indexer, "get_paged_mqa_logits_metadata", lambda *args, **kwargs: plan)
        # In the place of vLLM's GEMMs, for which its backends need a GPU.
        patch.setattr(bind_weights.BoundLinear, "__call__", multiply)
        self.language_model = vllm_model.build(config, patch)
        DefaultModelLoader(config.load_config).load_weights(self.language_model, config.model_config)
        process(self.language_model)
        current_platform.update_block_size_for_backend(config)
        self.layout = self._plan(get_kv_cache_spec(config))
        self.groups, _, kernel_blocks = init_attn_backend(self.layout, config, torch.device("cpu"))
        context = config.compilation_config.static_forward_context
        flat = [group for found in self.groups for group in found]
        init_kv_cache(context, self.layout, torch.device("cpu"), kernel_blocks, config, attn_groups=flat)
        self.free = list(range(self.layout.num_blocks - 1, 0, -1))
        self.blocks: dict[int, list[list[int]]] = {}

    def _plan(self, specs: dict[str, Any]) -> Any:
        """vLLM's plan of its KV cache, as its engine core makes it."""
        from vllm.config.vllm import get_layers_from_vllm_config
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
        from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
        from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs

        layers = get_layers_from_vllm_config(self.config, AttentionLayerBase).values()
        layouts = get_supported_kv_cache_layouts({layer.get_attn_backend() for layer in layers})
        layout = resolve_kv_cache_layout(self.config, [[found.name for found in layouts]], list(specs.values()))
        self.config.cache_config.kv_cache_layout = layout.name
        groups = get_global_kv_cache_groups(self.config, [specs])
        return get_kv_cache_configs(self.config, [specs], [BLOCK_BYTES], groups)[0]

    def tables(self, requests: list[int | None], lengths: list[int]) -> list[Tensor]:
        """Block tables by group, [R, n]; a request's blocks are taken as its length needs them. None: padding."""
        tables = []
        for index, group in enumerate(self.layout.kv_cache_groups):
            size = group.kv_cache_spec.block_size
            ring = "state_cache" in group.layer_names[0]
            table = torch.zeros(len(requests), 1 if ring else -(-CONTEXT // size), dtype=torch.int32)
            for row, (request, length) in enumerate(zip(requests, lengths, strict=True)):
                if request is None:
                    continue
                owned = self.blocks.setdefault(request, [[] for _ in self.layout.kv_cache_groups])[index]
                while len(owned) < (1 if ring else -(-length // size)):
                    owned.append(self.free.pop())
                table[row, : len(owned)] = torch.tensor(owned, dtype=torch.int32)
            tables.append(table)
        return tables

    def metadata(self, requests: list[int | None], positions: Tensor, count: int = 1) -> dict[str, Any]:
        """vLLM's own, of a decode batch of `count` tokens a request; the i-th rows are of requests[i], or padding."""
        from vllm.v1.worker.gpu.attn_utils import build_attn_metadata

        rows = len(requests) * count
        real = torch.tensor([request is not None for request in requests])
        lengths = torch.where(real, positions[count - 1 :: count] + 1, 0).to(torch.int32)
        tables = self.tables(requests, lengths.tolist())
        slots = torch.full((len(tables), rows), -1)
        owner = torch.arange(len(requests)).repeat_interleave(count)
        for index, group in enumerate(self.layout.kv_cache_groups):
            size = group.kv_cache_spec.block_size
            if "state_cache" not in group.layer_names[0]:
                blocks = tables[index][owner].gather(1, (positions // size).unsqueeze(1))[:, 0].long()
                slots[index] = torch.where(real[owner], blocks * size + positions % size, -1)
        starts = torch.arange(0, rows + 1, count, dtype=torch.int32)
        return build_attn_metadata(
            self.groups,
            len(requests),
            rows,
            starts,
            starts,
            count,
            lengths,
            CONTEXT,
            tables,
            slots,
            self.layout,
            seq_lens_cpu_upper_bound=lengths,
            positions=positions,
            is_prefilling=torch.zeros(len(requests), dtype=torch.bool),
        )

    def target(self) -> Any:
        """The executor's view. The experts are as vLLM loaded them: no backend has rewritten them here."""
        from specialized_decode.backbone.graphs import EmulatedDevice
        from specialized_decode.integration.bind import VllmTarget
        from specialized_decode.integration.host import VllmHost

        prepared = self.language_model._specialized_decode_prepared
        target = VllmTarget(self.language_model.model, VllmHost(torch.device("cpu")), prepared)
        setattr(target.host, "emulated_stream", EmulatedDevice().stream)  # noqa: B010
        for layer in target.layers:
            layer.ffn.experts.layout = "checkpoint"
        return target


def round_like_the_gpu(patch: pytest.MonkeyPatch) -> None:
    """Rounding to FP8 e4m3 and to BF16 goes to the nearest, ties to even; the interpreter's own loses the carry."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float
    formats = {tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8), tl.bfloat16: (torch.bfloat16, torch.uint16)}

    def rounded(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if source != tl.float32 or target not in formats:
            return convert(values, source, target, mode)
        dtype, bits = formats[target]
        return torch.from_numpy(np.ascontiguousarray(values)).view(torch.float32).to(dtype).view(bits).numpy()

    patch.setattr(interpreter, "_convert_float", rounded)


def multiply(linear: Any, x: Tensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A dense layer's values, summed in float32."""
    from specialized_decode.boundary import reference

    return (x.float() @ reference.dequantize(linear.weight, linear.scale).T).to(out_dtype)


class Plain:
    """The plain model of the same folder, on its own caches, with vLLM's rotary tables: their last bits differ."""

    def __init__(self, folder: Path, target: Any) -> None:
        from specialized_decode.backbone.engine import LocalEngine
        from specialized_decode.backbone.model import load_model

        self.model = load_model(folder, torch.device("cpu"), 64, CONTEXT)
        for layer, bound in zip(self.model.model.layers, target.layers, strict=True):
            layer.attn.cos_sin = bound.attn.cos_sin
        self.engine = LocalEngine(self.model, ROWS, CONTEXT, 64)


class Decoding:
    """Requests that an executor decodes on vLLM's caches, and the plain model beside it on its own."""

    def __init__(self, engine: Engine, folder: Path, target: Any, slots: int = ROWS) -> None:
        """slots: requests of a step; those that nobody has joined are padding."""
        self.engine, self.plain = engine, Plain(folder, target)
        random = torch.Generator().manual_seed(5)
        self.texts = torch.randint(1, self.plain.model.config.vocab_size, (slots, CONTEXT), generator=random).tolist()
        self.requests: list[Any] = [None] * slots
        # So that no two decodings share vLLM's blocks.
        self.first = 1 + max(engine.blocks, default=0)

    def join(self, slot: int) -> None:
        self.requests[slot] = self.plain.engine.caches.open([])

    def leave(self) -> None:
        """Gives vLLM's blocks back."""
        for number in range(self.first, self.first + len(self.requests)):
            for owned in self.engine.blocks.pop(number, []):
                self.engine.free += owned

    def step(self, executor: Any, count: int = 1) -> tuple[Tensor, Tensor]:
        """The next `count` tokens of each request -> the rows' hidden states, the executor's and the plain model's;
        without padding rows."""
        from vllm.forward_context import set_forward_context

        from specialized_decode.runtime import step_gates

        plain, rows = self.plain, len(self.requests) * count
        for slot, request in enumerate(self.requests):
            if request is not None:
                request.tokens[request.computed :] = self.texts[slot][request.computed : request.computed + count]
        batch = plain.engine.caches.batch(self.requests, [count] * len(self.requests), decode_length=count, static=True)
        expected = plain.engine.forward(batch)
        hashes, mask = plain.model.engram_inputs(batch)
        assert hashes is not None
        for layer in self.engine.language_model.model.layers:
            if layer.engram is not None:
                layer.engram.prepare_embeddings(hashes[:, layer.engram.layer_hash_index])
        owners = [None if request is None else self.first + slot for slot, request in enumerate(self.requests)]
        metadata = self.engine.metadata(owners, batch.positions, count)
        with set_forward_context(metadata, self.engine.config, num_tokens=rows):
            x = plain.model.model.embedding[batch.input_ids]
            found = step_gates(rows, executor).run(x, batch.positions, batch.input_ids, hashes, mask)
        assert isinstance(found, Tensor) and isinstance(expected, Tensor)
        live = torch.tensor([owner is not None for owner in owners]).repeat_interleave(count)
        return found[live], expected[live]

    def advance(self, accepted: int = 1) -> None:
        for request in self.requests:
            if request is not None:
                request.computed += accepted


def decode_like_the_plain_model(engine: Engine, folder: Path) -> None:
    """Requests that join one after another are decoded from their first token on, beside rows of padding.

    Every step's hidden states are the plain model's, bit for bit: weights, caches and metadata are all as it has them.
    """
    from specialized_decode.runtime import DecodeConfig, SpecializedDecode

    target = engine.target()
    decoding = Decoding(engine, folder, target)
    executor = SpecializedDecode.for_target(target, DecodeConfig(stock=False), decoding.plain.model.lm_head)
    assert all(plan.moe.gemm is not None for plan in executor.layers)
    # So far into the text, and the first row's text is longer than the window and what the indexer selects.
    joins, steps = (0, 3, 90, 95), 100
    for step in range(steps):
        for slot, join in enumerate(joins):
            if join == step:
                decoding.join(slot)
        found, expected = decoding.step(executor)
        assert torch.equal(found, expected), f"step {step}"
        decoding.advance()
    assert sum(request is None for request in decoding.requests) == ROWS - len(joins)
    decoding.leave()


class Batch(NamedTuple):
    """A decode batch of vLLM's: rows of three requests, the last row padding."""

    positions: Tensor
    metadata: dict[str, Any]


def ragged_batch(engine: Engine) -> Batch:
    """Positions within, at and past the borders of pages, of groups of two tokens and of the window."""
    positions = torch.tensor([0, 31, 64, 95, 191, 7])
    return Batch(positions, engine.metadata([0, 1, 2, 3, 4, None], positions))


def bytes_of(engine: Engine) -> Tensor:
    """The one allocation that all caches lie in."""
    cache = engine.language_model.model.layers[0].attn.swa_cache_layer.kv_cache
    return torch.tensor([], dtype=torch.uint8).set_(cache.untyped_storage())


def assert_same_writes(engine: Engine, name: str, theirs: Callable[[], None], ours: Callable[[], None]) -> None:
    """Both leave the same bytes behind in the whole allocation, and change some."""
    memory = bytes_of(engine)
    memory.copy_(torch.randint(256, memory.shape, generator=torch.Generator().manual_seed(1), dtype=torch.uint8))
    before = memory.clone()
    theirs()
    expected = memory.clone()
    memory.copy_(before)
    ours()
    assert torch.equal(memory, expected), f"{name}: {int((memory != expected).sum())} bytes differ"
    assert not torch.equal(memory, before), f"{name}: nothing was written"


def write_like_vllm(engine: Engine, folder: Path) -> None:
    """Compressed KV records, index keys and rings, by vLLM's kernels and by ours: the same bytes, and no others."""
    from vllm.forward_context import set_forward_context
    from vllm.models.deepseek_v41.common.ops import indexer_k_norm_rope_store
    from vllm.models.deepseek_v41.common.ops.fused_compress_quant_cache import rope_quant_insert

    from specialized_decode.attention import reference

    positions, metadata = ragged_batch(engine)
    random = torch.Generator().manual_seed(2)
    latent = (torch.randn(ROWS, 512, generator=random) * torch.logspace(-3, 3, ROWS).unsqueeze(1)).to(torch.bfloat16)
    key = torch.randn(ROWS, 128, generator=random).to(torch.bfloat16)
    with set_forward_context(metadata, engine.config, num_tokens=ROWS):
        for attn in (layer.attn for layer in engine.target().layers if layer.attn.compressor is not None):
            caches, ratio, name = attn.metadata(), attn.compressor.ratio, f"layer {attn.layer_id}"
            cache, slots = attn.compressed_cache, caches.compressed.slot_mapping
            cos_sin = attn.cos_sin[positions - positions % ratio]
            theirs = partial(rope_quant_insert, latent, positions, attn.cos_sin, cache, slots, ratio)
            ours = partial(reference.insert_kv, cache, slots, latent, cos_sin)
            assert_same_writes(engine, f"{name}, KV", theirs, ours)
            cache, slots = attn.indexer.k_cache, caches.index.slot_mapping
            norm, eps = attn.indexer.k_norm, attn.indexer.eps
            store = partial(indexer_k_norm_rope_store, compress_ratio=ratio, use_fp4_cache=False)
            theirs = partial(store, key, positions, attn.cos_sin, norm, eps, cache, slots)
            ours = partial(reference.insert_index_keys, cache, slots, reference.rms_norm(key, norm, eps), cos_sin)
            assert_same_writes(engine, f"{name}, index", theirs, ours)


def compress_like_vllm(engine: Engine, folder: Path) -> None:
    """Rings take the same bytes; latents agree to the last bit of bfloat16."""
    from vllm.forward_context import set_forward_context
    from vllm.models.deepseek_v41.common.ops.fused_compress_quant_cache import fused_save_compress_norm

    from specialized_decode.attention import reference

    positions, metadata = ragged_batch(engine)
    random = torch.Generator().manual_seed(4)
    memory = bytes_of(engine)
    with set_forward_context(metadata, engine.config, num_tokens=ROWS):
        for layer in engine.target().layers:
            attn, compressor = layer.attn, layer.attn.compressor
            if compressor is None:
                continue
            caches, ratio, cache = attn.metadata(), compressor.ratio, compressor.state_cache
            score = torch.randn(ROWS, 512 * ratio, generator=random)
            if cache is not None:
                cache.copy_(torch.randn(cache.shape, generator=random))
            before = memory.clone()
            slots = caches.compressed.slot_mapping if cache is None else caches.ring.slot_mapping
            ring = (None, None) if cache is None else (caches.ring.query_start_loc, caches.ring.token_to_req)
            latent = torch.empty(ROWS, 512, dtype=torch.bfloat16)
            norm = compressor.norm
            fused_save_compress_norm(score, positions, cache, slots, *ring, norm, compressor.eps, ratio, latent)
            expected = memory.clone()
            memory.copy_(before)
            found = reference.compress(compressor, score, positions, caches.ring)
            assert torch.equal(memory, expected), f"layer {layer.layer_id}"
            assert (cache is None) == torch.equal(memory, before)
            written = caches.compressed.slot_mapping >= 0
            assert written.sum() > 2
            torch.testing.assert_close(found[written], latent[written], rtol=2**-7, atol=0)


def read_like_vllm(engine: Engine, folder: Path) -> None:
    """Slots that decodes read are those of vLLM's own metadata, and records hold what vLLM's gather reads."""
    from vllm.forward_context import set_forward_context
    from vllm.models.deepseek_v41.common.ops import compute_global_topk_indices_and_lens
    from vllm.models.deepseek_v41.common.ops.cache_utils import dequantize_and_gather_k_cache_triton

    from specialized_decode.attention import reference

    positions, metadata = ragged_batch(engine)
    random = torch.Generator().manual_seed(3)
    with set_forward_context(metadata, engine.config, num_tokens=ROWS):
        for layer in engine.target().layers:
            attn, caches = layer.attn, layer.attn.metadata()
            theirs = metadata[attn.window_prefix]
            found = reference.window_slots(caches.window, positions, attn.window_size)
            for row, count in enumerate(theirs.decode_swa_lens.tolist()):
                expected = theirs.decode_swa_indices[row].flatten()[:count]
                assert torch.equal(found[row][found[row] >= 0].int(), expected), f"layer {layer.layer_id}, row {row}"
            assert theirs.decode_swa_lens.tolist() == [1, 32, 48, 48, 48, 0][:ROWS]
            if caches.compressed is None:
                continue
            ratio = attn.compress_ratio
            closed = (positions + 1) // ratio
            chosen = torch.where(closed.unsqueeze(1) > 0, torch.randint(1 << 20, (ROWS, 32), generator=random), -1)
            chosen = torch.where(chosen >= 0, chosen % closed.clamp_min(1).unsqueeze(1), -1).int()
            table, block = caches.compressed.block_table, caches.compressed.states
            valid = torch.tensor([True] * (ROWS - 1) + [False])
            expected, _ = compute_global_topk_indices_and_lens(chosen, theirs.token_to_req_indices, table, block, valid)
            slots = reference.position_slots(caches.compressed, chosen)
            assert torch.equal(slots[:-1], expected[:-1].long()), f"layer {layer.layer_id}"
            # Every record of every request, of valid bytes.
            everything = torch.arange(int(closed.max())).expand(ROWS, -1)
            everything = torch.where(everything < closed.unsqueeze(1), everything, -1)[:-1]
            view = caches.compressed
            latent = torch.randn(everything.numel(), 512, generator=random).to(torch.bfloat16)
            slots = reference.position_slots(view, torch.cat((everything, everything[:1])))[:-1]
            reference.insert_kv(attn.compressed_cache, slots.flatten(), latent, attn.cos_sin[: len(latent)])
            out = torch.zeros(ROWS - 1, everything.shape[1], 512, dtype=torch.bfloat16)
            dequantize_and_gather_k_cache_triton(
                out, attn.compressed_cache, closed[:-1].int(), None, table[:-1], block, 0
            )
            records = torch.where((everything >= 0).unsqueeze(2), reference.read_kv(attn.compressed_cache, slots), 0.0)
            assert torch.equal(records, out.float()), f"layer {layer.layer_id}"
            assert records.abs().sum() > 0


CHECKS: dict[str, Callable[[Engine, Path], None]] = {
    check.__name__: check
    for check in (decode_like_the_plain_model, write_like_vllm, compress_like_vllm, read_like_vllm)
}


def kernel_checks(patch: pytest.MonkeyPatch) -> dict[str, Callable[[Engine, Path], None]]:
    """Those of the attention kernels, for which the interpreter is changed."""
    from tests.integration import interpreted_kernels as kernels

    kernels.prepare(patch)
    return {
        check.__name__: check
        for check in (
            kernels.kernels_write_like_vllm,
            kernels.kernels_select_like_the_reference,
            kernels.decode_on_kernels,
        )
    }


def main(argv: list[str]) -> None:
    folder, *names = argv
    assert os.environ["TRITON_INTERPRET"] == "1"
    import tests.integration.conftest  # noqa: F401  # a platform for this process too
    from tests.integration import vllm_model
    from tests.integration.loaded import Loaded

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        config = Loaded(Path(folder), patch).config
        with vllm_model.one_rank(config):
            round_like_the_gpu(patch)
            engine = Engine(config, patch)
            checks = CHECKS if set(names) <= set(CHECKS) else kernel_checks(patch)
            for name in names:
                checks[name](engine, Path(folder))
                print(f"passed: {name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
