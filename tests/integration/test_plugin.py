"""The plugin's hooks in vLLM's real model module: when they are put in, and what they do for each value."""

import dataclasses
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from specialized_decode.integration import plugin
from specialized_decode.runtime import KERNELS, DecodeConfig
from tests.integration import vllm_model

ROOT = Path(__file__).absolute().parents[2]
# A process of its own, set up as this one is.
SET_UP = """
import importlib, inspect, sys
from pathlib import Path
import tests.integration.conftest as conftest
conftest.pytest_configure()
from specialized_decode.integration import plugin
"""
HOOKED = """
def state():
    module = sys.modules[plugin.MODEL]
    model = module.DeepseekV41LLMForCausalLM
    hooks = (module.specialized_decode_config, model.build_specialized_decode, model.get_model_state_cls)
    return module, [inspect.unwrap(hook) is not hook for hook in hooks], [
        hasattr(inspect.unwrap(hook), "__wrapped__") for hook in hooks]
"""


def run(script: str) -> str:
    result = subprocess.run([sys.executable, "-c", SET_UP + script], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


def test_register_imports_nothing() -> None:
    """In every vLLM process: a millisecond, and neither vLLM nor torch."""
    script = (
        "import sys, time; start = time.perf_counter(); from specialized_decode.integration.plugin import register; "
        "register(); spent = time.perf_counter() - start; print([m for m in ('torch', 'vllm', 'triton', 'numpy') "
        "if m in sys.modules], spent)"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    modules, spent = result.stdout.rsplit(maxsplit=1)
    assert modules == "[]"
    assert float(spent) < 0.2


def test_hooks_wait_for_the_import() -> None:
    """Registered, twice, before vLLM's model is imported: looked up, then imported, by whoever asks first."""
    out = run(
        HOOKED
        + """
plugin.register(); plugin.register()
assert sum(type(finder).__name__ == "_Finder" for finder in sys.meta_path) == 1
assert plugin.MODEL not in sys.modules
importlib.util.find_spec(plugin.MODEL)
from vllm.models.deepseek_v41.nvidia.vl_model import DeepseekV41ForCausalLM
module, hooked, twice = state()
assert hooked == [True] * 3 and twice == [False] * 3, (hooked, twice)
assert DeepseekV41ForCausalLM.get_model_state_cls.__globals__["DeepseekV41LLMForCausalLM"] is (
    module.DeepseekV41LLMForCausalLM)
# The module is as its own loader leaves it.
assert type(module.__loader__).__name__ == "SourceFileLoader" and module.__spec__.loader is module.__loader__
assert "class DeepseekV4DecoderLayer" in inspect.getsource(module)
plugin.register()
assert state()[1:] == ([True] * 3, [False] * 3)
print("hooked")
"""
    )
    assert out.splitlines()[-1] == "hooked"


def test_hooks_into_an_imported_model() -> None:
    out = run(
        HOOKED
        + """
importlib.import_module(plugin.MODEL)
before = sys.modules[plugin.MODEL].specialized_decode_config
plugin.register(); plugin.register()
module, hooked, twice = state()
assert hooked == [True] * 3 and twice == [False] * 3
assert inspect.unwrap(module.specialized_decode_config) is before
print("hooked")
"""
    )
    assert out.splitlines()[-1] == "hooked"


def test_a_failed_import_is_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What waits for a module goes on waiting when its import fails, and leaves other modules alone."""
    (tmp_path / "waited_for.py").write_text("import os\nif 'FAIL' in os.environ:\n    raise ImportError('not yet')\n")
    (tmp_path / "other.py").write_text("")
    hooked: list[ModuleType] = []
    monkeypatch.setattr(plugin, "HOOKS", {"waited_for": hooked.append})
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    plugin.register()
    monkeypatch.setenv("FAIL", "1")
    with pytest.raises(ImportError, match="not yet"):
        __import__("waited_for")
    assert hooked == []
    monkeypatch.delenv("FAIL")
    module = __import__("waited_for")
    assert hooked == [module]
    assert type(__import__("other").__loader__).__name__ == "SourceFileLoader"
    for name in ("waited_for", "other"):
        del sys.modules[name]


@pytest.fixture
def model_module() -> Any:
    import vllm.models.deepseek_v41.nvidia.model as module

    plugin.register()
    return module


def asked(options: Any) -> Any:
    return SimpleNamespace(additional_config=options)


@pytest.mark.parametrize("options", [{}, {"decode_backend": "auto"}, {"decode_kernels": True}, {"other": 1}])
def test_without_the_option_vllm_decides(
    model_module: Any, engine_config: Callable[..., Any], options: Mapping[str, Any]
) -> None:
    """Absent or auto: vLLM's own answer, which is none, and its own model state."""
    config = engine_config(additional_config=dict(options))
    found = model_module.specialized_decode_config(config)
    assert found is None
    assert found == model_module.specialized_decode_config.__wrapped__(config)
    from vllm.models.deepseek_v41.nvidia.model_state import DeepseekV41ModelState

    model = SimpleNamespace(specialized_decode_config=found)
    assert model_module.DeepseekV41LLMForCausalLM.get_model_state_cls(model) is DeepseekV41ModelState


def test_an_option_that_is_no_mapping_is_vllms(model_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """additional_config may be an object of a platform's own; it asks for nothing."""
    seen: list[Any] = []
    monkeypatch.setattr(model_module, "specialized_decode_config", plugin._config(seen.append))
    config = asked(object())
    assert model_module.specialized_decode_config(config) is None
    assert seen == [config]


@pytest.mark.parametrize("value", ["latency-specialized", "AUTO", "", None, True, 1, ["auto"]])
def test_other_values_are_refused_by_name(model_module: Any, engine_config: Callable[..., Any], value: object) -> None:
    with pytest.raises(ValueError) as caught:
        model_module.specialized_decode_config(engine_config(additional_config={"decode_backend": value}))
    assert f"decode_backend: found {value!r}, expected one of auto, latency_specialized" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "switched"),
    [
        ({}, {"kernels": KERNELS}),
        ({"decode_kernels": True}, {"kernels": KERNELS}),
        ({"decode_kernels": False}, {}),
        ({"decode_kernels": ["boundary", "moe"]}, {"kernels": frozenset({"boundary", "moe"})}),
        ({"decode_kernels": []}, {}),
        ({"decode_reference_ops": True}, {"stock": False, "kernels": KERNELS}),
        ({"decode_prepared_weights": False}, {"prepared_weights": False, "kernels": frozenset({"boundary"})}),
    ],
)
def test_the_option_asks_for_the_executor(
    model_module: Any, monkeypatch: pytest.MonkeyPatch, options: Mapping[str, Any], switched: dict[str, Any]
) -> None:
    """After the deployment check, whose answer is the model's configuration, with what the switches ask for."""
    from specialized_decode.integration import config as check

    checked: list[Any] = []

    def deployment_config(config: Any) -> DecodeConfig:
        checked.append(config)
        return DecodeConfig(autotune=True)

    monkeypatch.setattr(check, "deployment_config", deployment_config)
    config = asked({"decode_backend": "latency_specialized", **options})
    found = model_module.specialized_decode_config(config)
    assert found == dataclasses.replace(DecodeConfig(autotune=True), **switched)
    assert checked == [config]
    from vllm.models.deepseek_v41.nvidia.model_state import DeepseekV41ModelState

    from specialized_decode.integration.model_state import SpecializedDecodeModelState

    state = model_module.DeepseekV41LLMForCausalLM.get_model_state_cls(SimpleNamespace(specialized_decode_config=found))
    assert state is SpecializedDecodeModelState
    assert issubclass(state, DeepseekV41ModelState)


def test_an_unsupported_deployment_stops_the_model(model_module: Any, engine_config: Callable[..., Any]) -> None:
    """vLLM's own constructor asks, before it builds anything."""
    from specialized_decode.integration.config import UnsupportedDeployment

    config = engine_config(enforce_eager=True)
    with vllm_model.one_rank(config), pytest.raises(UnsupportedDeployment, match="CUDA graphs"):
        model_module.DeepseekV41LLMForCausalLM(vllm_config=config)


@pytest.mark.parametrize("name", plugin.SWITCHES)
@pytest.mark.parametrize("value", ["yes", 1, None])
def test_switches_are_bools(model_module: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> None:
    from specialized_decode.integration import config as check

    monkeypatch.setattr(check, "deployment_config", lambda config: DecodeConfig())
    with pytest.raises(ValueError, match=f"{name}: found .*, expected true(,| or) false"):
        model_module.specialized_decode_config(asked({"decode_backend": "latency_specialized", name: value}))


@pytest.mark.parametrize("names", [["mHC"], ["boundary", 1], "boundary"])
def test_kernels_are_asked_for_by_name(model_module: Any, monkeypatch: pytest.MonkeyPatch, names: object) -> None:
    from specialized_decode.integration import config as check

    monkeypatch.setattr(check, "deployment_config", lambda config: DecodeConfig())
    with pytest.raises(ValueError) as caught:
        model_module.specialized_decode_config(
            asked({"decode_backend": "latency_specialized", "decode_kernels": names})
        )
    assert f"decode_kernels: found {names!r}, expected true, false or a list of attention, boundary, moe" in str(
        caught.value
    )


@pytest.mark.parametrize(
    ("reader", "name"),
    [
        ({"decode_reference_ops": True, "decode_kernels": False}, "decode_reference_ops"),
        ({"decode_kernels": True}, r"decode_kernels \(attention\)"),
        ({"decode_kernels": ["boundary", "moe"]}, r"decode_kernels \(moe\)"),
    ],
)
def test_some_switches_need_prepared_weights(
    model_module: Any, monkeypatch: pytest.MonkeyPatch, reader: dict[str, object], name: str
) -> None:
    from specialized_decode.integration import config as check

    monkeypatch.setattr(check, "deployment_config", lambda config: DecodeConfig())
    options = {**reader, "decode_prepared_weights": False}
    with pytest.raises(ValueError, match=f"decode_prepared_weights: found False, which {name} reads"):
        model_module.specialized_decode_config(asked({"decode_backend": "latency_specialized", **options}))


def test_the_builder_sets_the_models_executor(model_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's forward asks what lies in `specialized_decode`; the logits stay vLLM's."""
    from specialized_decode.integration import bind

    executor = object()
    monkeypatch.setattr(bind, "build_executor", lambda model: executor)
    model = SimpleNamespace(specialized_decode_config=DecodeConfig(), logits_processor="vLLM's")
    assert model_module.DeepseekV41LLMForCausalLM.build_specialized_decode(model) is executor
    assert model.specialized_decode is executor
    assert model.logits_processor == "vLLM's"


class Stub:
    """Another vLLM's model, which has none of the hook points."""

    def __init__(self, *, vllm_config: Any) -> None:
        self.built = True


def test_a_vllm_without_hook_points_refuses_the_option_alone() -> None:
    module = ModuleType(plugin.MODEL)
    module.DeepseekV41LLMForCausalLM = type("DeepseekV41LLMForCausalLM", (Stub,), {})  # type: ignore[attr-defined]
    plugin.hook_model(module)
    assert module.DeepseekV41LLMForCausalLM(vllm_config=asked({})).built
    assert module.DeepseekV41LLMForCausalLM(vllm_config=asked({"decode_backend": "auto"})).built
    with pytest.raises(RuntimeError) as caught:
        module.DeepseekV41LLMForCausalLM(vllm_config=asked({"decode_backend": "latency_specialized"}))
    for name in ("build_specialized_decode", "get_model_state_cls", "specialized_decode_config"):
        assert name in str(caught.value)


def test_a_vllm_without_the_model_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    module = ModuleType(plugin.MODEL)
    plugin.hook_model(module)
    assert "is not served" in caplog.text
