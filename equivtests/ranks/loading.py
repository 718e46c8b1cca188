"""From "package.module:Class" to an adapter class or a model of a user's own, with errors that say what to correct."""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType
from typing import TypeVar

from equivtests.adapters.adapter import Adapter
from equivtests.errors import AdapterError, EquivtestsError, ModelError
from equivtests.own import Loaded, OwnModel, known, loaded, register

T = TypeVar("T")

EXTRAS = {
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "jax": "jax",
    "lightning_fabric": "fabric",
    "transformers": "accelerate",
}
"""The extra of this package that brings a framework, by the module that is missing without it."""


def load_adapter(spec: str) -> type[Adapter]:
    """The class that `spec` names. Raises AdapterError with one line."""
    return _load(spec, Adapter, f"adapter {spec!r}", AdapterError)


def load_model(spec: str) -> Loaded:
    """A user's own model, made and registered. For names that the user gave, never for those that a file holds.

    Raises ModelError with one line.
    """
    if known(spec):
        return loaded(spec)
    found = _load(spec, OwnModel, f"model {spec!r}", ModelError)
    try:
        return register(spec, found())
    except Exception as error:
        raise ModelError(f"{spec} cannot be made without arguments: {type(error).__name__}: {error}") from error


def _load(spec: str, base: type[T], what: str, error: type[EquivtestsError]) -> type[T]:
    module_name, colon, class_name = spec.partition(":")
    if not (colon and module_name and class_name.isidentifier()):
        raise error(f"{what}: expected 'package.module:Class', such as 'my_project.certify:My{base.__name__}'")
    module = _import(module_name, what, error)
    found = getattr(module, class_name, None)
    if found is None:
        raise error(f"{what}: module {module_name} has no {class_name!r}; {_offer(module, base)}")
    if not (isinstance(found, type) and issubclass(found, base)):
        raise error(f"{what}: {class_name} is no subclass of {base.__name__}; {_offer(module, base)}")
    return found


def _import(name: str, what: str, kind: type[EquivtestsError]) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        text = (str(error).splitlines() or [""])[0]
        hint = f"; looked in {', '.join(p or '.' for p in sys.path[:3])}, …" if _missing(error, name) else _extra(error)
        raise kind(f"{what}: cannot import {name}: {type(error).__name__}: {text}{hint}") from error


def _extra(error: Exception) -> str:
    extra = EXTRAS.get(error.name or "") if isinstance(error, ModuleNotFoundError) else None
    return f"; pip install 'equivtests[{extra}]'" if extra else ""


def _missing(error: Exception, name: str) -> bool:
    """Whether the named module itself (and not one that it imports) was not found."""
    return isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")


def _offer(module: ModuleType, base: type) -> str:
    classes = [n for n, c in inspect.getmembers(module, inspect.isclass) if issubclass(c, base) and c is not base]
    plural = "adapters" if base is Adapter else "models"
    return f"{plural} there: {', '.join(classes)}" if classes else f"it holds no subclass of {base.__name__}"
