"""The contract: every internal of vLLM that this package uses, as data, and its comparison with the installed vLLM.

vLLM promises no stability for any of them, so only the tested version is accepted, unless another is allowed by name.
`check` reads vLLM's sources and objects; it needs no GPU and starts nothing.
"""

import ast
import dataclasses
import functools
import importlib
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from enum import Enum
from types import ModuleType
from typing import Any

from specialized_decode.integration.internals import CONTRACT, Internal

TESTED = "0.33.0"
# Set to the installed version, it allows a vLLM other than TESTED.
ALLOW = "SPECIALIZED_DECODE_ALLOW_VLLM"


def check(contract: Sequence[Internal] | None = None) -> list[str]:
    """How the installed vLLM deviates, a line each; none where it is as tested. By default of all of CONTRACT."""
    return [line for internal in (CONTRACT if contract is None else contract) for line in _deviations(internal)]


def _deviations(internal: Internal) -> Iterator[str]:
    try:
        found = _resolve(internal.module, internal.name)
    except (AttributeError, ImportError) as error:
        yield f"{internal}: not found ({error})"
        return
    if internal.signature is not None:
        signature = _signature(found)
        if signature != internal.signature:
            yield f"{internal}: found signature {signature}, expected {internal.signature}"
    if internal.attributes:
        absent = sorted(set(internal.attributes) - _attributes(found))
        if absent:
            yield f"{internal}: has no {', '.join(absent)}"
    if internal.calls:
        uncalled = sorted(set(internal.calls) - set(_calls(found)))
        if uncalled:
            yield f"{internal}: does not call {', '.join(uncalled)}"
    if internal.value is not None and found != internal.value:
        yield f"{internal}: found {found!r}, expected {internal.value!r}"


def _resolve(module: str, name: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in name.split(".") if name else ():
        found = getattr(found, part)
    return found


def _signature(found: Any) -> str:
    """Parameters and defaults without annotations, such as (self, x, *, y=1)."""
    bare = inspect.Signature.empty
    parameters = inspect.signature(inspect.unwrap(found)).parameters.values()
    return str(inspect.Signature([parameter.replace(annotation=bare) for parameter in parameters]))


def _attributes(found: Any) -> set[str]:
    """What an object, the instances of a class, or a module have."""
    if isinstance(found, ModuleType):
        # vllm.envs answers for its variables in __getattr__, and lists them.
        return set(dir(found)) | set(getattr(found, "environment_variables", ()))
    if not isinstance(found, type):
        return set(dir(found))
    names = set(dir(found)) | set(getattr(found, "__annotations__", ()))
    if issubclass(found, Enum):
        return names | set(found.__members__)
    if dataclasses.is_dataclass(found):
        names |= {field.name for field in dataclasses.fields(found)}
    for base in found.__mro__:
        if base.__module__.startswith("vllm."):
            names |= _assigned(base)
    return names


@functools.cache
def _assigned(cls: type) -> frozenset[str]:
    """The names that a class's own methods assign to self, or register as parameters and buffers."""
    names = set()
    for node in ast.walk(_parse(cls)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            names.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_self(node.func.value):
            registers = node.func.attr in ("register_buffer", "register_parameter", "register_module")
            if registers and node.args and isinstance(node.args[0], ast.Constant):
                names.add(str(node.args[0].value))
    return frozenset(names)


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _calls(found: Any) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(_parse(inspect.unwrap(found))) if isinstance(node, ast.Call)}


def _parse(found: Any) -> ast.Module:
    return ast.parse(textwrap.dedent(inspect.getsource(found)))
