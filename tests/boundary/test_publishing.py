"""PublishingMxfp8Linear, and which FlashInfer counts as checked."""

import importlib.metadata
import math
import warnings

import numpy as np
import pytest
import torch

from specialized_decode.backbone.host import SingleRank
from specialized_decode.boundary import BoundaryAllReduce, PublishingMxfp8Linear, publishing, uses_checked_flashinfer
from tests.helpers.step_mhc import assert_rounded, numbers, random_bf16, same_bits

HIDDEN, INNER, MAX_ROWS = 64, 96, 49
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No warning given yet, and a table of checked versions that is the test's own."""
    publishing._warn_unchecked.cache_clear()
    monkeypatch.setattr(publishing, "CHECKED_FLASHINFER", {"mxfp8_gemm": ("0.7.2.post1", "0.8.0"), "sparse_mla": ()})


def _installed(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def find(name: str) -> str:
        if name != "flashinfer-python" or version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", find)


def _all_reduce() -> BoundaryAllReduce:
    return BoundaryAllReduce(HIDDEN, MAX_ROWS, SingleRank(), CPU)


# --- the projection ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [*range(1, 17), 47, 48, 49])
def test_the_projection_lies_in_the_slot(rows: int) -> None:
    """Right in float64, published, and no row past its own written."""
    all_reduce = _all_reduce()
    slot = all_reduce.publish_target(MAX_ROWS)
    slot.fill_(math.nan)
    all_reduce.reset()
    x, weight = random_bf16(0, rows, INNER), random_bf16(1, HIDDEN, INNER).float()
    found = PublishingMxfp8Linear(all_reduce)(x, weight)
    assert found.data_ptr() == slot.data_ptr() and found.shape == (rows, HIDDEN)
    sizes = np.abs(numbers(x)) @ np.abs(numbers(weight)).T
    assert_rounded(found, numbers(x) @ numbers(weight).T, INNER * 2.0**-24 * sizes)
    assert slot[rows:].isnan().all()
    expected = found.float()
    assert same_bits(all_reduce.reduce(found), expected)


def test_two_projections_need_a_boundary_between_them() -> None:
    all_reduce = _all_reduce()
    linear = PublishingMxfp8Linear(all_reduce)
    x, weight = random_bf16(0, 3, INNER), random_bf16(1, HIDDEN, INNER).float()
    first = linear(x, weight)
    with pytest.raises(RuntimeError, match="expected one producer a boundary"):
        linear(x, weight)
    all_reduce.reduce(first)
    linear(x, weight)


def test_padded_rows_stay_by_themselves() -> None:
    x, weight = random_bf16(0, 8, INNER), random_bf16(1, HIDDEN, INNER).float()
    clean = PublishingMxfp8Linear(_all_reduce())(x, weight)
    x[1::2] = math.nan
    found = PublishingMxfp8Linear(_all_reduce())(x, weight)
    assert same_bits(found[::2], clean[::2]) and found[1::2].isnan().all()


def test_a_weight_of_another_width_is_refused() -> None:
    with pytest.raises(RuntimeError):
        PublishingMxfp8Linear(_all_reduce())(random_bf16(0, 3, INNER), random_bf16(1, HIDDEN // 2, INNER).float())


# --- where it is built ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [None, "0.7.2.post1"])
def test_built_without_flashinfer_off_blackwell(
    monkeypatch: pytest.MonkeyPatch, version: str | None, recwarn: pytest.WarningsRecorder
) -> None:
    """Neither a CPU nor Hopper asks for FlashInfer, nor warns about it."""
    _installed(monkeypatch, version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    all_reduce = _all_reduce()
    for device in (CPU, torch.device("cuda")):
        built = PublishingMxfp8Linear.build(all_reduce, device)
        assert built is not None and built.all_reduce is all_reduce
    assert not recwarn.list


@pytest.mark.parametrize(("version", "built"), [("0.8.0", True), ("0.7.1", False), (None, False)])
def test_built_on_blackwell_where_flashinfer_is_checked(
    monkeypatch: pytest.MonkeyPatch, version: str | None, built: bool
) -> None:
    _installed(monkeypatch, version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert (PublishingMxfp8Linear.build(_all_reduce(), torch.device("cuda")) is not None) == built


# --- FlashInfer's version ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.7.2.post1", "0.8.0"])
def test_a_checked_version_is_used_without_a_word(
    monkeypatch: pytest.MonkeyPatch, version: str, recwarn: pytest.WarningsRecorder
) -> None:
    _installed(monkeypatch, version)
    assert uses_checked_flashinfer("mxfp8_gemm")
    assert not recwarn.list


@pytest.mark.parametrize(
    ("version", "feature", "message"),
    [
        (None, "mxfp8_gemm", "found none, checked for mxfp8_gemm: 0.7.2.post1, 0.8.0; the stock path runs"),
        ("0.7.2", "mxfp8_gemm", "found version 0.7.2, checked for mxfp8_gemm: 0.7.2.post1, 0.8.0; the stock path runs"),
        ("0.8.0", "sparse_mla", "found version 0.8.0, checked for sparse_mla: no version yet; the stock path runs"),
        (None, "sparse_mla", "found none, checked for sparse_mla: no version yet; the stock path runs"),
    ],
    ids=["none installed", "unchecked", "never checked", "neither"],
)
def test_another_version_is_not_used_and_said_once(
    monkeypatch: pytest.MonkeyPatch, version: str | None, feature: str, message: str
) -> None:
    _installed(monkeypatch, version)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert [uses_checked_flashinfer(feature) for _ in range(3)] == [False] * 3
    (warning,) = said
    assert str(warning.message) == f"FlashInfer: {message}"
    assert warning.filename == __file__, "the warning names its caller"


def test_every_feature_is_warned_about_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, None)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for feature in ("mxfp8_gemm", "sparse_mla", "mxfp8_gemm"):
            uses_checked_flashinfer(feature)
    assert [str(warning.message).split(": ")[1].split(" for ")[1] for warning in said] == ["mxfp8_gemm", "sparse_mla"]


def test_an_unknown_feature_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, "0.8.0")
    with pytest.raises(KeyError, match="fused_moe"):
        uses_checked_flashinfer("fused_moe")
