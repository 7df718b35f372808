"""The index kernels in Triton's interpreter, against the reference."""

from typing import Any

import pytest
import torch

from tests.helpers.index_interpreted import CASES, run_interpreted
from tests.helpers.mla_interpreted import CHOSEN, STEPS, world
from tests.helpers.step_attention import KINDS, LAYERS
from tests.helpers.step_interpreted import in_interpreter


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result: dict[str, Any] = in_interpreter(run_interpreted, tmp_path_factory.mktemp("interpreted") / "found.pt", 1000)
    return result


@pytest.mark.parametrize("name", CASES)
def test_launches(name: str, found: dict[str, Any]) -> None:
    """Projection, compressor, scores, selection and candidates; see `index_case`'s assertions."""
    assert found["failures"].get(name) is None, found["failures"][name]


def test_ties(found: dict[str, Any]) -> None:
    assert found["ties"] == []


def test_whole_steps(found: dict[str, Any]) -> None:
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
        selected = plain.selection.topk_indices[: len(CHOSEN)]
        assert torch.equal(outputs[f"{at} selected"][live].sort(1).values, selected[live].sort(1).values)
        assert (outputs[f"{at} selected"][~live] == -1).all()
        assert plain.selection.candidate_blocks is not None
        blocks = plain.selection.candidate_blocks[: len(CHOSEN)]
        assert torch.equal(outputs[f"{at} candidates"][live].sort(1).values, blocks[live].sort(1).values)
        assert (outputs[f"{at} candidates"][~live] == -1).all()
    state = plain.state()
    for name in ("window caches", "compressed caches"):
        different = (outputs[name] != state[name]).float().mean()
        assert different < 1e-3, f"{name}: {different:g} of the bytes differ"
