"""The vLLM plugin: hooks into vLLM's DeepSeek-V4.1 model once that is imported, and serves the option that asks for us.

vLLM calls `register` in each of its processes, before it knows the model. So this module imports nothing of vLLM or
torch, and `register` does no more than name the modules to wait for. All that can fail does so later, in the model's
constructor, where it stops the engine: vLLM only logs a plugin that fails to load.
"""

import functools
import importlib.abc
import importlib.machinery
import logging
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

MODEL = "vllm.models.deepseek_v41.nvidia.model"
LOGGERS = "vllm.v1.metrics.loggers"
BACKENDS = ("auto", "latency_specialized")
# Marks a hook, so that a second `register` changes nothing.
_HOOKED = "_specialized_decode_hooked"


def register() -> None:
    """The `vllm.general_plugins` entry point. May be called any number of times in a process."""
    for name, hook in HOOKS.items():
        # A module that is being imported has no hook points yet; its loader hooks into it.
        if name in sys.modules and not isinstance(getattr(sys.modules[name], "__loader__", None), _HookingLoader):
            hook(sys.modules[name])
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for the modules in HOOKS, whose import it leaves to the other finders, and hooks into what they load."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in HOOKS:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _HookingLoader(spec.loader)
                return spec
        return None


class _HookingLoader(importlib.abc.Loader):
    """Loads a module by its own loader, which it hands back to the module, and hooks into it."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        self.loader.exec_module(module)
        module.__spec__.loader = module.__loader__ = self.loader
        HOOKS[module.__name__](module)


def hook_model(module: Any) -> None:
    """Puts the option's handling into vLLM's model module: its check of the configuration, its builder, its state.

    Without the option, and with `auto`, each hook calls vLLM's own. Where vLLM lacks a hook point, only building its
    model with the option fails.
    """
    if getattr(module, _HOOKED, False):
        return
    setattr(module, _HOOKED, True)
    model: Any = getattr(module, "DeepseekV41LLMForCausalLM", None)
    names = ("build_specialized_decode", "get_model_state_cls")
    missing = [name for name in names if not hasattr(model, name)]
    if not hasattr(module, "specialized_decode_config"):
        missing.append("specialized_decode_config")
    if not missing:
        module.specialized_decode_config = _config(module.specialized_decode_config)
        model.__init__ = _init(model.__init__)
        model.build_specialized_decode = _build(model.build_specialized_decode)
        model.get_model_state_cls = _model_state_cls(model.get_model_state_cls)
    elif model is not None:
        model.__init__ = _refusing(model.__init__, f"{MODEL} has no {', '.join(missing)}")
    else:
        logger.warning("decode_backend: found no DeepseekV41LLMForCausalLM in %s; the option is not served", MODEL)


def hook_loggers(module: Any) -> None:
    """Lets vLLM's Prometheus logger show the steps that the executor took, where it was asked for."""
    from specialized_decode.integration import metrics

    metrics.hook_loggers(module, lambda vllm_config: _options(vllm_config).get("decode_backend") == BACKENDS[1])


# What to hook into, by module.
HOOKS = {MODEL: hook_model, LOGGERS: hook_loggers}


def backend(vllm_config: Any) -> str:
    """The `decode_backend` of a VllmConfig's additional_config, `auto` where there is none.

    Raises ValueError for any value but those of BACKENDS.
    """
    value = _options(vllm_config).get("decode_backend", "auto")
    if value not in BACKENDS:
        raise ValueError(f"additional_config: decode_backend: found {value!r}, expected one of {', '.join(BACKENDS)}")
    return str(value)


# The executor's switches in additional_config, and their defaults.
# Reference ops are for checks.
SWITCHES = {"decode_kernels": True, "decode_reference_ops": False, "decode_prepared_weights": True}


def switches(vllm_config: Any) -> dict[str, Any]:
    """The values of SWITCHES: of decode_kernels the families asked for, of the others a bool.

    Raises ValueError for any other value, or for what reads weights without them. Of kernels that nobody asked for,
    those that read prepared weights go with them.
    """
    options = _options(vllm_config)
    values = {name: options.get(name, default) for name, default in SWITCHES.items()}
    if values["decode_prepared_weights"] is False and "decode_kernels" not in options:
        values["decode_kernels"] = ["boundary"]
    from specialized_decode.runtime.kernels import kernel_families

    for name, value in values.items():
        if name == "decode_kernels":
            try:
                values[name] = kernel_families(value)
            except ValueError as error:
                raise ValueError(f"additional_config: {name}: {error}") from None
        elif not isinstance(value, bool):
            raise ValueError(f"additional_config: {name}: found {value!r}, expected true or false")
    readers = ["decode_reference_ops"] if values["decode_reference_ops"] else []
    readers += [f"decode_kernels ({name})" for name in ("attention", "moe") if name in values["decode_kernels"]]
    if readers and not values["decode_prepared_weights"]:
        raise ValueError(f"additional_config: decode_prepared_weights: found False, which {readers[0]} reads")
    return values


def _options(vllm_config: Any) -> Mapping[str, Any]:
    # vLLM allows an object of a platform's own here.
    options = vllm_config.additional_config
    return options if isinstance(options, Mapping) else {}


def _config(stock: Any) -> Any:
    """Around `specialized_decode_config(vllm_config)`: what the model keeps as its configuration, None for its own."""

    @functools.wraps(stock)
    def specialized_decode_config(vllm_config: Any) -> Any:
        if backend(vllm_config) == "auto":
            return stock(vllm_config)
        import dataclasses

        from specialized_decode.integration.config import deployment_config

        values = switches(vllm_config)
        return dataclasses.replace(
            deployment_config(vllm_config),
            kernels=values["decode_kernels"],
            stock=not values["decode_reference_ops"],
            prepared_weights=values["decode_prepared_weights"],
        )

    return specialized_decode_config


def _init(stock: Any) -> Any:
    """Around the model's constructor: the model is not loaded yet."""

    @functools.wraps(stock)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        if _ours(self.specialized_decode_config):
            from specialized_decode.integration.bind import prepare_weights

            prepare_weights(self)

    return __init__


def _build(stock: Any) -> Any:
    @functools.wraps(stock)
    def build_specialized_decode(self: Any) -> Any:
        if not _ours(self.specialized_decode_config):
            return stock(self)
        from specialized_decode.integration.bind import build_executor

        self.specialized_decode = build_executor(self)
        return self.specialized_decode

    return build_specialized_decode


def _model_state_cls(stock: Any) -> Any:
    @functools.wraps(stock)
    def get_model_state_cls(self: Any) -> Any:
        if not _ours(self.specialized_decode_config):
            return stock(self)
        from specialized_decode.integration.model_state import SpecializedDecodeModelState

        return SpecializedDecodeModelState

    return get_model_state_cls


def _ours(config: Any) -> bool:
    """Whether a model's configuration is the executor's; None is told without an import."""
    if config is None:
        return False
    from specialized_decode.runtime import DecodeConfig

    return isinstance(config, DecodeConfig)


def _refusing(stock: Any, reason: str) -> Any:
    """Around the model's constructor, in a vLLM without our hook points."""

    @functools.wraps(stock)
    def __init__(self: Any, *args: Any, vllm_config: Any, **kwargs: Any) -> None:
        if backend(vllm_config) != "auto":
            raise RuntimeError(f"decode_backend=latency_specialized cannot run in this vLLM: {reason}")
        stock(self, *args, vllm_config=vllm_config, **kwargs)

    return __init__
