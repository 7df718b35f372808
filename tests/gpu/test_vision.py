"""The vision script's own logic: prompts, forced tokens, the tower's values."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from specialized_decode.backbone.config import IMAGE_TOKEN_ID
from tests.gpu.engine import Outputs
from tests.gpu.vision_phases import fill_tower, forced_tokens, settings, unmoved


class Wrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.ModuleDict({"norm": nn.LayerNorm(8), "wo": nn.Linear(64, 8)})
        self.image_start = nn.Parameter(torch.full((8,), float("nan")))
        self.language_model = nn.Linear(4, 4)


def test_the_tower_is_filled_alike() -> None:
    first, second = Wrapper(), Wrapper()
    language = first.language_model.weight.clone()
    assert fill_tower(first) == fill_tower(second) == 5
    for (name, one), other in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other) != name.startswith("language_model.")
    assert torch.equal(first.language_model.weight, language)
    assert first.image_start.isfinite().all() and first.image_start.detach().std() < 0.1
    assert 0.05 < float(dict(first.named_parameters())["vision.wo.weight"].detach().std()) < 0.2
    assert 0.8 < float(dict(first.named_parameters())["vision.norm.weight"].detach().mean()) < 1.2


def test_forced_tokens() -> None:
    tokens = list(range(64))
    assert [place for place, one in enumerate(forced_tokens(tokens, 0)) if one == IMAGE_TOKEN_ID] == [*range(20, 30)]
    assert forced_tokens(tokens, 1) == tokens


def test_an_image_that_counts_for_nothing_is_found() -> None:
    def outputs(*first: float) -> Outputs:
        return Outputs({}, {str(row): torch.full((2, 3), value) for row, value in enumerate(first)})

    assert unmoved(outputs(1, 2, 3), outputs(4, 5, 3)) == []
    assert unmoved(outputs(1, 2, 3), outputs(1, 5, 3)) == ["request 0: another image changes nothing"]


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.gpu import vision_phases

    monkeypatch.setattr(vision_phases, "options", lambda args, executor, **more: more | {"executor": executor})
    found = settings(SimpleNamespace(), {"a": 1})  # type: ignore[arg-type]
    assert found["limit_mm_per_prompt"] == {"image": 1} and found["executor"] == {"a": 1}
