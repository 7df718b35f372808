"""What an executor refuses to be built for, and that all ranks refuse together."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specialized_decode.runtime import DecodeConfig, SpecializedDecode, UnsupportedTarget
from tests.helpers.runtime_hosts import AnsweringHost, RecordedGroup
from tests.helpers.runtime_model import Layers, Pair
from tests.runtime.conftest import Folder

OPTION = "decode_backend=latency_specialized"


@pytest.fixture(scope="module")
def pair(folder: Folder) -> Pair:
    return Pair(folder(Layers((0,))), max_rows=1, max_context=64, max_tokens=64)


def target(pair: Pair, group: RecordedGroup | None = None, **changes: Any) -> Any:
    """The pair's backbone with `changes`, on a host of its own that records what a rank votes."""
    real = pair.backbone
    host = AnsweringHost(tp_group=group or RecordedGroup())
    host.emulated_stream = real.host.emulated_stream  # type: ignore[method-assign]
    names = ("config", "layers", "norm", "attention_class", "aux_layers", "mtp_hidden_buffer", "stock")
    return SimpleNamespace(host=host, **({name: getattr(real, name) for name in names} | changes))


def refused(asked: Any) -> str:
    with pytest.raises(UnsupportedTarget) as caught:
        SpecializedDecode.for_target(asked, DecodeConfig(), torch.zeros(8, 64))
    message = str(caught.value)
    assert OPTION in message
    return message


def hidden_size(pair: Pair, width: int) -> Any:
    return dataclasses.replace(pair.backbone.config, hidden_size=width)


@pytest.mark.parametrize("name", ["plain", "flashmla_sparse", "flashinfer_sparse"])
def test_known_attention_classes(pair: Pair, name: str) -> None:
    group = RecordedGroup()
    executor = SpecializedDecode.for_target(
        target(pair, group, attention_class=name), DecodeConfig(), torch.zeros(8, 64)
    )
    assert len(executor.layers) == 1
    assert group.votes == [1], "capability is agreed once"


@pytest.mark.parametrize("name", ["", "rocm_aiter", "FlashMLA", "triton_mla"])
def test_unknown_attention_class(pair: Pair, name: str) -> None:
    group = RecordedGroup()
    message = refused(target(pair, group, attention_class=name))
    assert f"attention class: found {name}, expected one of plain, flashmla_sparse, flashinfer_sparse" in message
    assert group.votes == [0]


def test_no_layers(pair: Pair) -> None:
    group = RecordedGroup()
    assert "layers: found none, expected at least one" in refused(target(pair, group, layers=[]))
    assert group.votes == [0]


@pytest.mark.parametrize("width", [1, 31, 33, 48, 5136])
def test_widths(pair: Pair, width: int) -> None:
    group = RecordedGroup()
    message = refused(target(pair, group, config=hidden_size(pair, width)))
    assert f"hidden size: found {width}, expected a multiple of 32" in message
    assert group.votes == [0]


@pytest.mark.parametrize("capability", [(7, 0), (8, 0), (8, 9), (11, 0), (12, 0)])
def test_other_gpus(pair: Pair, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Some GPU")
    group = RecordedGroup()
    message = refused(target(pair, group, norm=SimpleNamespace(device=torch.device("cuda", 0))))
    assert f"GPU: found Some GPU (compute capability {capability[0]}.{capability[1]})" in message
    assert "expected Hopper (9.x) or Blackwell (10.x)" in message
    assert group.votes == [0]


def test_another_rank_refuses(pair: Pair) -> None:
    """This rank could run: it votes so, and refuses with the others."""
    group = RecordedGroup(others=0)
    assert "another rank of the TP group cannot run it" in refused(target(pair, group))
    assert group.votes == [1]


def test_own_reasons_come_before_another_ranks(pair: Pair) -> None:
    message = refused(target(pair, RecordedGroup(others=0), attention_class="other"))
    assert "attention class: found other" in message
    assert "another rank" not in message


def test_all_reasons_in_one_message(pair: Pair) -> None:
    message = refused(target(pair, attention_class="other", layers=[], config=hidden_size(pair, 40)))
    for reason in ("attention class: found other", "hidden size: found 40", "layers: found none"):
        assert reason in message


def test_nothing_is_built_before_the_ranks_agree(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpecializedDecode, "__init__", lambda *arguments: pytest.fail("built before the vote"))
    refused(target(pair, RecordedGroup(others=0)))


@pytest.mark.parametrize("jit_warmup", [True, False])
def test_warm_up_runs_where_asked_for(pair: Pair, monkeypatch: pytest.MonkeyPatch, jit_warmup: bool) -> None:
    warmed: list[SpecializedDecode] = []
    monkeypatch.setattr("specialized_decode.runtime.executor.warm_up", warmed.append)
    config = DecodeConfig(jit_warmup=jit_warmup)
    executor = SpecializedDecode.for_target(target(pair), config, torch.zeros(8, 64))
    assert warmed == ([executor] if jit_warmup else [])
    assert executor.config is config


def test_defaults() -> None:
    assert DecodeConfig() == DecodeConfig(autotune=False, jit_warmup=True)
