"""All mutants: importing this module fills `MUTANTS`."""

from __future__ import annotations

from equivtests.mutants import (
    context,
    data,
    ddp,
    drift,
    expert,
    ledger_split,
    loss,
    norms,
    pipeline,
    recompute,
    restore,
    statistics,
    stock,
    stock_collectives,
    tensor,
    tied,
    unsplit,
    wire,
    zero,
)

MODULES = (
    *(loss, data, ddp, norms, zero, restore, wire, drift, statistics),
    *(unsplit, tensor, context, expert, recompute, pipeline, tied, stock, stock_collectives, ledger_split),
)
