"""From "package.module:Class" to the adapter class, with errors that say what to correct."""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType

from equivtests.adapters.adapter import Adapter
from equivtests.errors import AdapterError


def load_adapter(spec: str) -> type[Adapter]:
    """The class that `spec` names. Raises AdapterError with one line."""
    module_name, colon, class_name = spec.partition(":")
    if not (colon and module_name and class_name.isidentifier()):
        raise AdapterError(f"adapter {spec!r}: expected 'package.module:Class', such as 'my_project.certify:MyAdapter'")
    module = _import(spec, module_name)
    found = getattr(module, class_name, None)
    if found is None:
        raise AdapterError(f"adapter {spec!r}: module {module_name} has no {class_name!r}; {_offer(module)}")
    if not (isinstance(found, type) and issubclass(found, Adapter)):
        raise AdapterError(f"adapter {spec!r}: {class_name} is no subclass of Adapter; {_offer(module)}")
    return found


def _import(spec: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        text = (str(error).splitlines() or [""])[0]
        hint = f"; looked in {', '.join(p or '.' for p in sys.path[:3])}, …" if _missing(error, name) else ""
        raise AdapterError(f"adapter {spec!r}: cannot import {name}: {type(error).__name__}: {text}{hint}") from error


def _missing(error: Exception, name: str) -> bool:
    """Whether the adapter's own module (and not one that it imports) was not found."""
    return isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")


def _offer(module: ModuleType) -> str:
    classes = [n for n, c in inspect.getmembers(module, inspect.isclass) if issubclass(c, Adapter) and c is not Adapter]
    return f"adapters there: {', '.join(classes)}" if classes else "it holds no subclass of Adapter"
