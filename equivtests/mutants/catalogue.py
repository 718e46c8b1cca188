"""All mutants: importing this module fills `MUTANTS`."""

from __future__ import annotations

from equivtests.mutants import (
    async_server,
    context,
    data,
    ddp,
    delayed,
    drift,
    expert,
    ledger_split,
    local,
    loss,
    norms,
    pipeline,
    recompute,
    restore,
    stale_pipeline,
    statistics,
    stock,
    stock_collectives,
    synchronizers,
    tensor,
    tied,
    unsplit,
    wire,
    zero,
)

MODULES = (
    *(loss, data, ddp, norms, zero, restore, wire, drift, statistics, synchronizers, async_server, local, delayed),
    *(
        unsplit,
        tensor,
        context,
        expert,
        recompute,
        pipeline,
        stale_pipeline,
        tied,
        stock,
        stock_collectives,
        ledger_split,
    ),
)
