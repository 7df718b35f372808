"""Experts packed in place: whose values, how much memory, and which layers are left as they are."""

import gc
import logging
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from specialized_decode.backbone import moe as backbone
from specialized_decode.backbone.graphs import EmulatedDevice, capture
from specialized_decode.backbone.linear import Linear
from specialized_decode.backbone.moe import Experts, MoE
from specialized_decode.moe import MoEStep, RoutedExpertGemms, build_routed_expert_gemms, held, hold_experts, select
from specialized_decode.moe.expert_layout import HummingExperts, pack, projections, unpack
from specialized_decode.moe.held import HummingForm, pack_in_pieces, repack
from tests.helpers.held_moe import held_moe
from tests.helpers.step_gates import Gates
from tests.helpers.step_mhc import random_bf16, same_bits
from tests.helpers.step_moe import EXPERTS, HIDDEN, TOPK, WIDTH, random_moe
from tests.helpers.stock_experts import SCALES, WIDTHS, random_experts

EXPERT_BYTES = 4 * (2 * WIDTH * HIDDEN + HIDDEN * WIDTH)


def tensors(experts: HummingExperts) -> list[Tensor]:
    """All of them as bytes."""
    return [tensor.view(torch.uint8) for weight in (experts.w13, experts.w2) for tensor in vars(weight).values()]


def inputs(rows: int) -> tuple[Tensor, Tensor]:
    """Rows of text and, every third, of an image."""
    ids = torch.where(torch.arange(rows) % 3 == 1, 129264 + torch.arange(rows) % 5, torch.arange(rows))
    return random_bf16(0, rows, HIDDEN), ids


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: layers are refused for their shapes alone."""
    monkeypatch.setattr(select, "unsuited", select.misfit)


# --- packing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 8], ids=lambda count: f"{count} at a time")
@pytest.mark.parametrize(("hidden", "width"), [(128, 96), (160, 288)])
def test_pieces_give_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch, hidden: int, width: int, piece: int) -> None:
    """Each expert is rebased by itself, so that they can be packed apart; scales are further apart than 2**11."""
    experts = random_experts(width, 7, hidden, width, "further apart than 2**11")
    codes = sum(shape.rows * shape.columns for shape in projections(hidden, width))
    monkeypatch.setattr(held, "_PIECE_CODES", piece * codes + codes // 2)
    seen: list[int] = []

    def counted(*parts: Tensor) -> HummingExperts:
        seen.append(len(parts[0]))
        return pack(*parts)

    monkeypatch.setattr(held, "pack", counted)
    found, expected = pack_in_pieces(*vars(experts).values()), pack(*vars(experts).values())
    assert seen == [min(piece, 7 - start) for start in range(0, 7, piece)]
    assert (found.hidden, found.width) == (hidden, width)
    for ours, theirs in zip(tensors(found), tensors(expected), strict=True):
        assert torch.equal(ours, theirs)


def test_a_piece_smaller_than_an_expert_is_one_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = random_experts(0, 3, 128, 64, "one")
    monkeypatch.setattr(held, "_PIECE_CODES", 1)
    for ours, theirs in zip(
        tensors(pack_in_pieces(*vars(experts).values())), tensors(pack(*vars(experts).values())), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_no_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="found no experts"):
        pack_in_pieces(*(tensor[:0] for tensor in vars(random_experts(0, 1, 128, 64, "one")).values()))


@pytest.mark.parametrize(("start", "stop"), [(0, 5), (0, 1), (4, 5), (1, 3), (2, 2)])
def test_some_experts_unpacked(start: int, stop: int) -> None:
    experts = pack(*vars(random_experts(3, 5, 160, 96, "as in a release")).values())
    found, whole = HummingForm(experts).unpacked(start, stop), unpack(experts)
    for ours, theirs in zip(found, vars(whole).values(), strict=True):
        assert torch.equal(ours, theirs[start:stop])


# --- in the model's place -----------------------------------------------------------------------------------------


def random_layer(scales: str, width: int = WIDTH) -> MoE:
    """`random_moe` with experts whose scales are of that kind."""
    ffn = random_moe()
    ffn.experts = Experts(*vars(random_experts(1, EXPERTS, HIDDEN, width, scales)).values())
    return ffn


@pytest.mark.parametrize("chunk", [None, 1, 5], ids=["kept", "one at a time", "five at a time"])
@pytest.mark.parametrize("rows", [1, 9])
def test_the_layer_computes_the_same(monkeypatch: pytest.MonkeyPatch, rows: int, chunk: int | None) -> None:
    """Nothing is requantized: to the bit what the layer gave before."""
    if chunk is not None:
        monkeypatch.setattr(backbone, "_KEEP_BYTES", {"cpu": 0})
        monkeypatch.setattr(backbone, "_CHUNK_BYTES", chunk * EXPERT_BYTES)
    ffn, (x, ids) = random_moe(), inputs(rows)
    expected, routed = ffn(x, ids), ffn.experts.w13
    assert repack(ffn.experts) is None
    assert ffn.experts.layout == "HUMMING" and ffn.experts.w13.dtype == torch.int32 and routed.dtype == torch.uint8
    assert (ffn.experts.kept, ffn.experts.chunk) == ((True, EXPERTS) if chunk is None else (False, chunk))
    assert same_bits(ffn(x, ids), expected)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("scales", SCALES)
def test_what_is_held_rules(monkeypatch: pytest.MonkeyPatch, scales: str, chunked: bool) -> None:
    """The dequantized experts are those of the held form, also where it rounds the checkpoint's."""
    if chunked:
        monkeypatch.setattr(backbone, "_KEEP_BYTES", {"cpu": 0})
    ffn = random_layer(scales)
    before = ffn.experts.dequantized(0, EXPERTS)
    experts = unpack(pack(ffn.experts.w13, ffn.experts.w13_scale, ffn.experts.w2, ffn.experts.w2_scale))
    expected = Experts(*vars(experts).values()).dequantized(3, 14)
    assert repack(ffn.experts) is None
    for ours, theirs in zip(ffn.experts.dequantized(3, 14), expected, strict=True):
        assert torch.equal(ours, theirs)
    # Padded rows, whose scales are 1, and padded columns, 2**-127, count in what is furthest apart.
    exact = scales in ("as in a release", "one")
    found = ffn.experts.dequantized(0, EXPERTS)
    assert all(torch.equal(*pair) for pair in zip(found, before, strict=True)) == exact


@pytest.mark.parametrize("chunked", [False, True])
def test_no_copy_is_kept(monkeypatch: pytest.MonkeyPatch, chunked: bool) -> None:
    """Neither what was loaded nor what was dequantized of it outlives the packing; the kernels' tensors are views."""
    if chunked:
        monkeypatch.setattr(backbone, "_KEEP_BYTES", {"cpu": 0})
    ffn = random_moe()
    experts = ffn.experts
    old = [weakref.ref(t) for t in (experts.w13, experts.w13_scale, experts.w2, experts.w2_scale)]
    old += [weakref.ref(t._base if t._base is not None else t) for t in experts._kept or ()]
    assert len(old) == (4 if chunked else 6)
    assert repack(experts) is None
    gc.collect()
    assert [ref() for ref in old] == [None] * len(old)
    bound = select.held_experts(ffn)
    assert bound.w13.weight is experts.w13 and bound.w2.weight is experts.w2
    assert bound.w13.weight_scale_2 is experts.w13_scale_2 and bound.w2.weight_scale is experts.w2_scale


def test_packing_twice_changes_nothing() -> None:
    ffn = random_moe()
    assert repack(ffn.experts) is None
    first = ffn.experts.w13
    assert repack(ffn.experts) is None
    assert ffn.experts.w13 is first


def test_a_step_takes_the_layers_own_path_without_a_gpu() -> None:
    """The executor over such a layer: its stock path, to the bit."""
    ffn, (x, ids) = random_moe(), inputs(5)
    expected = ffn(x, ids)
    assert repack(ffn.experts) is None
    (gemm,) = build_routed_expert_gemms([ffn])
    assert gemm is None
    step = MoEStep(ffn, gemm, 8)
    assert not step.takes_low_batch(Gates(5))
    output = step.run(x, ids, Gates(5))
    assert isinstance(output, Tensor) and same_bits(output, expected)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_capture_unpacks(monkeypatch: pytest.MonkeyPatch, chunked: bool) -> None:
    """Nothing is read back from the device, and a replay computes from its own inputs."""
    if chunked:
        monkeypatch.setattr(backbone, "_KEEP_BYTES", {"cpu": 0})
        monkeypatch.setattr(backbone, "_CHUNK_BYTES", 5 * EXPERT_BYTES)
    ffn, (x, ids) = random_moe(), inputs(6)
    assert repack(ffn.experts) is None
    outputs: list[Tensor] = []
    graph = capture(EmulatedDevice(), lambda: outputs.append(ffn(x, ids)))
    for seed in (1, 2):
        x.copy_(random_bf16(seed, 6, HIDDEN))
        graph.replay()
        assert same_bits(outputs[0], ffn(x, ids))


@pytest.mark.parametrize("chunked", [False, True])
def test_an_executor_built_before_does_not_go_on(monkeypatch: pytest.MonkeyPatch, chunked: bool) -> None:
    if chunked:
        monkeypatch.setattr("specialized_decode.moe.gemm._KEPT_BYTES", {"cpu": 0})
    ffn = random_moe()
    gemms = RoutedExpertGemms(ffn)
    assert repack(ffn.experts) is None
    with pytest.raises(RuntimeError, match="experts are in the form of HUMMING, and were not when this was built"):
        gemms(random_bf16(0, 2, HIDDEN), torch.zeros(2, TOPK, dtype=torch.int64))


# --- which layers, and what is said -------------------------------------------------------------------------------


def suited() -> MoE:
    """A layer that the kernels could run, but for the device: hidden size 128, width 64."""
    ffn, like = random_moe(), held_moe(0, EXPERTS, 128, 64)
    ffn.gate = Linear(like.gate.weight)
    ffn.shared_up = Linear(like.shared_up.weight, like.shared_up.scale)
    ffn.shared_down = Linear(like.shared_down.weight, like.shared_down.scale)
    ffn.experts = Experts(*vars(random_experts(2, EXPERTS, 128, 64, "as in a release")).values())
    return ffn


def said(caplog: pytest.LogCaptureFixture, layers: list[MoE]) -> list[tuple[str, str]]:
    with caplog.at_level(logging.INFO, logger=held.logger.name):
        hold_experts(layers)
    return [(record.levelname, record.message) for record in caplog.records]


@pytest.mark.parametrize("width", WIDTHS)
def test_widths_of_the_release(width: int) -> None:
    """Padded or not, a rank's experts come back without their padding."""
    own = Experts(*vars(random_experts(width, 2, 64, width, "as in a release")).values())
    expected = own.dequantized(0, 2)
    assert repack(own) is None
    for ours, theirs in zip(own.dequantized(0, 2), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("fits")
def test_layers_are_held_and_the_others_say_why(caplog: pytest.LogCaptureFixture) -> None:
    nan, wide, bare = suited(), suited(), suited()
    nan.experts.w2_scale[3, 5, 1] = 255
    wide.topk = 9
    bare.shared_up.scale = None
    layers = [suited(), nan, suited(), wide, bare, wide]
    before = [layer.experts.w13 for layer in layers]
    messages = said(caplog, layers)
    assert [layer.experts.layout for layer in layers] == ["HUMMING", "checkpoint", "HUMMING", *["checkpoint"] * 3]
    stayed = [layer.experts.w13 is own for layer, own in zip(layers, before, strict=True)]
    assert stayed == [False, True, False, True, True, True]
    left = "Routed experts: layers left in the form that they were loaded in"
    # Of an expert w13 has 128 rows, held as 256, of 128 columns, w2 128, held as 256, of 64, held as 128.
    checkpoint = EXPERTS * (128 * 128 + 128 * 64) * (1 / 2 + 1 / 32)
    packed = EXPERTS * ((256 * 128 + 256 * 128) * (1 / 2 + 1 / 32) + 2 * 4)
    assert messages == [
        (
            "INFO",
            f"Routed experts: 2 of 6 layers held in the kernels' form alone: {2 * packed / 1e6:.1f} MB, "
            f"before {2 * checkpoint / 1e6:.1f} MB",
        ),
        ("WARNING", f"{left}: 1: w2: expert 3 has a NaN scale"),
        ("WARNING", f"{left}: 2: topk: found 9, expected at most 8"),
        (
            "WARNING",
            f"{left}: 1: shared expert's up: found torch.float8_e4m3fn, expected float8_e4m3fn with a scale per "
            "32 x 32",
        ),
    ]


@pytest.mark.usefixtures("fits")
def test_scales_that_cannot_be_rebased(caplog: pytest.LogCaptureFixture) -> None:
    ffn = suited()
    ffn.experts.w13_scale[1, 0, 0], ffn.experts.w13_scale[1, 1, 1] = 0, 254
    expected = ffn.experts.dequantized(0, EXPERTS)
    messages = said(caplog, [ffn])
    assert ffn.experts.layout == "checkpoint" and "further apart than the 2**138" in messages[1][1]
    assert all(torch.equal(*pair) for pair in zip(ffn.experts.dequantized(0, EXPERTS), expected, strict=True))


def test_without_a_gpu_nothing_is_packed(caplog: pytest.LogCaptureFixture) -> None:
    ffn = suited()
    assert said(caplog, [ffn]) == [
        ("INFO", "Routed experts: 0 of 1 layers held in the kernels' form alone: 0.0 MB, before 0.0 MB"),
        (
            "WARNING",
            "Routed experts: layers left in the form that they were loaded in: 1: device: found cpu, expected cuda",
        ),
    ]
    assert ffn.experts.layout == "checkpoint"


def test_experts_of_another_form_are_left() -> None:
    ffn: Any = random_moe()
    ffn.experts._form.layout = "MARLIN"
    assert repack(ffn.experts) == "experts are in the form of MARLIN, expected the checkpoint's"
