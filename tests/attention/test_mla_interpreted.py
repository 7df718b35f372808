"""The sparse MLA kernels in Triton's interpreter, against the reference and float64."""

import pytest
import torch
from torch import Tensor

from specialized_decode.attention import reference
from specialized_decode.attention.mla import Settled
from tests.helpers.mla_case import MlaCase, assert_as_good
from tests.helpers.mla_interpreted import (
    CASES,
    CHOSEN,
    INSERTED,
    STEPS,
    UNSETTLED,
    make,
    replayed,
    run_interpreted,
    world,
)
from tests.helpers.step_attention import KINDS, LAYERS
from tests.helpers.step_interpreted import in_interpreter
from tests.helpers.step_mhc import same_bits

Found = dict[str, dict[str, Tensor]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    result: Found = in_interpreter(run_interpreted, tmp_path_factory.mktemp("interpreted") / "found.pt", 1000)
    return result


@pytest.fixture(scope="module", params=CASES)
def one(request: pytest.FixtureRequest, found: Found) -> tuple[str, MlaCase, dict[str, Tensor]]:
    return request.param, make(request.param), found[request.param]


One = tuple[str, MlaCase, dict[str, Tensor]]


def test_attention(one: One) -> None:
    name, case, found = one
    expected = case.by_reference().float()
    for cut in CASES[name][2]:
        out = found[f"out {cut}"]
        assert_as_good(out, case)
        # Splits are added up in their order, whoever does it.
        assert same_bits(found.get(f"alone {cut}", out), out)
        # As the plain ops, but for the rounding of weights.
        torch.testing.assert_close(out.float(), expected, rtol=0.04, atol=0.02)
    assert not (found["arrived"] % 4096).any(), "a counter is between two launches"
    if "out wide" in found:
        assert_as_good(found["out wide"], case)
    if name == UNSETTLED:
        for settled in (Settled.NOTHING, Settled.WINDOW):
            assert same_bits(found[settled.name], found[f"out {CASES[name][2][-1]}"])


def test_tables(one: One) -> None:
    _, case, found = one
    window, selected = case.tables()
    assert same_bits(found["window"], window)
    if selected is not None:
        assert same_bits(found["selected"], selected)


def test_norms_and_insert(one: One) -> None:
    """As the reference's, but for a last bit, which another order of a sum may turn."""
    _, case, found = one
    rank, live = case.shape.q_rank, case.live
    queries, latents = case.projected.split([rank, 512], 1)
    expected = reference.rms_norm(queries, case.attn.q_norm, case.attn.eps)
    torch.testing.assert_close(found["q"][live].float(), expected[live].float(), rtol=2.0**-7, atol=1e-6)
    cos_sin = case.attn.cos_sin[case.positions]
    latents = reference.rms_norm(latents, case.attn.kv_norm, case.attn.eps)
    reference.insert_kv(case.window_cache, case.window.slot_mapping, latents, cos_sin)
    cache = case.window_cache.contiguous()
    different = found["cache"] != cache
    written = int(live.sum())
    # A latent whose last bit turned may turn a code's; no byte beyond the records differs.
    assert int(different.flatten(1).any(1).sum()) <= written and different.sum() <= 3 * written
    slots = case.window.slot_mapping[live].unsqueeze(0)
    ours, theirs = (reference.read_kv(c, slots)[0] for c in (_strided(case, found["cache"]), case.window_cache))
    torch.testing.assert_close(ours, theirs, rtol=2.0**-3, atol=1e-6)


@pytest.mark.parametrize("name", INSERTED)
def test_attention_that_inserts(found: Found, name: str) -> None:
    """The same records and the same outputs as behind a launch that inserts."""
    outputs = found[name]
    assert same_bits(outputs["cache with the insert"], outputs["cache"])
    assert same_bits(outputs["with the insert"], outputs["behind an insert"])
    live = make(name).live
    assert not live.any() or not same_bits(outputs["behind an insert"], outputs[f"out {CASES[name][2][0]}"])


def _strided(case: MlaCase, contents: Tensor) -> Tensor:
    """A cache of other contents, laid out as the case's."""
    other = torch.empty_strided(case.window_cache.shape, case.window_cache.stride(), dtype=torch.uint8)
    return other.copy_(contents)


def test_tables_are_reused_within_a_step_alone(found: Found) -> None:
    """Both layers of a step read its tables; the second step's are of its own blocks and selections."""
    outputs = found["steps, reused"]
    for step, case in (("first", make(UNSETTLED)), ("second", replayed())):
        assert_as_good(outputs[f"{step} 0"], case)
        assert same_bits(outputs[f"{step} 0"], outputs[f"{step} 1"])


def test_whole_steps(found: Found) -> None:
    """Every kind of layer against the plain ones: outputs, and the caches that they leave behind."""
    plain, outputs = world(), found["steps"]
    live = torch.tensor(CHOSEN) >= 0
    for at in range(STEPS):
        expected = plain.decode(CHOSEN, [1] * len(CHOSEN), plain.plain, seed=at)
        for number in LAYERS:
            ours, theirs = outputs[f"{at} {number}"], expected[number]
            assert not ours[~live].any(), "padding rows come out as zeros"
            error = (ours.float() - theirs.float()).norm() / theirs.float().norm()
            assert error < 1e-2, f"step {at}, layer {number}, {KINDS[number]}: {error:g} off"
    state = plain.state()
    for name in ("window caches", "compressed caches"):
        different = (outputs[name] != state[name]).float().mean()
        assert different < 1e-3, f"{name}: {different:g} of the bytes differ"
