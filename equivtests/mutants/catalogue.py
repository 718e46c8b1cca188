"""All mutants: importing this module fills `MUTANTS`."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

MODULES = ("loss", "data", "ddp", "norms", "zero", "restore", "wire")

for name in MODULES:
    if find_spec(f"equivtests.mutants.{name}"):
        import_module(f"equivtests.mutants.{name}")
