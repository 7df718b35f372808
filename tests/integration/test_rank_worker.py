"""The plugin and the worker extension of the two-GPU script, under vLLM's interfaces."""

import multiprocessing
import os
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.models.registry import ModelRegistry
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from tests.gpu import worker_plugin
from tests.gpu.rank_worker import EXTENSION, RankWorker, row_hashes


def test_the_extension_takes_no_name_of_vllms_worker() -> None:
    assert resolve_obj_by_qualname(EXTENSION) is RankWorker
    names = [name for name in dir(RankWorker) if not name.startswith("__")]
    assert names == ["tests_count", "tests_memory", "tests_stall", "tests_take", "tests_watch"]
    assert not any(hasattr(Worker, name) for name in names)


def test_hidden_states_are_hashed(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(GPUModelRunner, "execute_model", GPUModelRunner.execute_model)
    model = SimpleNamespace(compute_logits=lambda hidden: hidden + 1)
    sampler = SimpleNamespace(logits_processors=[type("Recorder", (), {"take": lambda self: {}})()])
    worker: Any = RankWorker()
    worker.rank, worker.model_runner = 1, SimpleNamespace(model=model, sampler=sampler)
    assert worker.tests_watch() == os.getpid()
    rows = torch.randn(2, 8).bfloat16()
    assert torch.equal(model.compute_logits(rows), rows + 1)
    saved = torch.load(worker.tests_take(str(tmp_path)))
    assert torch.equal(saved["hidden"], row_hashes(rows))
    assert len(torch.load(worker.tests_take(str(tmp_path)))["hidden"]) == 0
    assert worker.tests_count() == (0, {})


@pytest.mark.parametrize(("name", "lacks"), [("VllmWorker-1", True), ("VllmWorker-0", False), ("MainProcess", False)])
def test_only_the_named_rank_lacks(monkeypatch: pytest.MonkeyPatch, name: str, lacks: bool) -> None:
    registered: dict[str, str] = {}
    monkeypatch.setattr(ModelRegistry, "register_model", registered.__setitem__)
    monkeypatch.setattr(multiprocessing.current_process(), "_name", name)
    monkeypatch.setenv(worker_plugin.LACKING, "1")
    monkeypatch.setenv(worker_plugin.REFUSED_SETTING, "")
    worker_plugin.register()
    assert (os.environ[worker_plugin.REFUSED_SETTING] == "1") == lacks
    assert registered["DeepseekV41ForCausalLM"] == worker_plugin.TEXT_MODEL


def test_a_refusing_rank_tells_how_long_it_took(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from specialized_decode.integration import config
    from specialized_decode.integration.plugin import _config

    def refusing(vllm_config: Any) -> Any:
        raise config.UnsupportedDeployment("lacking")

    monkeypatch.setattr(config, "deployment_config", refusing)
    worker_plugin.time_check(1)
    asked = SimpleNamespace(additional_config={"decode_backend": "latency_specialized"})
    with pytest.raises(config.UnsupportedDeployment, match="lacking"):
        _config(lambda vllm_config: None)(asked)
    assert re.fullmatch(r"rank 1: refused after 0\.\d+ s\n", capsys.readouterr().out)


def test_one_rank_can_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its executor's steps begin with a wait, which its worker sets; the other rank's do not."""
    from specialized_decode.runtime.executor import SpecializedDecode
    from tests.gpu.stall import stall_steps

    said: list[str] = []

    class Stall:
        def wait(self) -> None:
            said.append("wait")

        def begin(self) -> None:
            said.append("begin")

    monkeypatch.setattr(SpecializedDecode, "__init__", lambda self: said.append("built"))
    monkeypatch.setattr(SpecializedDecode, "run", lambda self, *args: said.append(f"run {args}"))
    stall_steps(Stall)
    executor: Any = SpecializedDecode()  # type: ignore[call-arg]
    executor.run(1, 2)
    worker: Any = RankWorker()
    worker.model_runner = SimpleNamespace(model_state=SimpleNamespace(executor=executor))
    assert worker.tests_stall()
    assert said == ["built", "wait", "run (1, 2)", "begin"]
    worker.model_runner.model_state.executor = SimpleNamespace()
    assert not worker.tests_stall()
