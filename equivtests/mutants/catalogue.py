"""All mutants: importing this module fills `MUTANTS`."""

from __future__ import annotations

from equivtests.mutants import context, data, ddp, drift, loss, norms, restore, unsplit, wire, zero

MODULES = (loss, data, ddp, norms, zero, restore, wire, drift, unsplit, context)
