"""The grid of runs that are stale by design: mini-batches that overlap in pipelines, and gradients that reach servers.

With P stages they have at least P + 2 updates, other data in each, and rates that drive the schemes apart.
"""

from __future__ import annotations

from dataclasses import replace

from equivtests.cases.case import DOUBLE, Model, Optimizer, Precision, Windows
from equivtests.cases.grid import Tier
from equivtests.cases.layout import Layout
from equivtests.cases.split_grid import BIAS, CHAIN, PER_STAGE, SplitRow, split

# Valid tokens by [update][rank][micro-batch][row]; rows of at most 8 tokens.
ONE_EACH: Windows = tuple(
    # eight updates of one micro-batch
    (((first, second),),)
    for first, second in ((8, 3), (1, 5), (7, 2), (4, 4), (0, 8), (6, 1), (2, 5), (3, 7))
)
ONE_PER_RANK: Windows = tuple(
    # six updates of one micro-batch on each of two data ranks
    (((a, b),), ((c,),))
    for a, b, c in ((8, 3, 5), (1, 5, 8), (7, 2, 4), (0, 0, 6), (4, 8, 1), (2, 6, 7))
)
GROUPS: Windows = tuple(
    # six updates of five, four, five, … micro-batches
    ((*(((k + u) % 8 + 1, (3 * k + u) % 9) for k in range(4)), *(((u + 2,),) if u % 2 == 0 else ())),)
    for u in range(6)
)
GROUPS_PER_RANK: Windows = tuple(
    # five updates of two micro-batches on each of two data ranks
    tuple(tuple(((r + 3 * k + u) % 9, (5 * r + k + 2 * u) % 8 + 1) for k in range(2)) for r in range(2))
    for u in range(5)
)


def arrivals(workers: int, servers: int, rounds: int) -> Windows:
    """Windows of one micro-batch each, that the workers feed by turns; servers, the last ranks, feed nothing."""
    found = []
    for number in range(workers * rounds):
        rows = ((3 * number) % 8 + 1, (5 * number + 2) % 9)
        mine = number % workers
        found.append(tuple((rows,) if rank == mine else () for rank in range(workers + servers)))
    return tuple(found)


MLP = Model("mlp", width=6, depth=PER_STAGE, features=BIAS)
DEEP_MLP = Model("mlp", width=6, depth=8, features=BIAS)
GPT = Model("gpt", width=8, depth=PER_STAGE, vocabulary=16, features=BIAS)
TIED = replace(GPT, features=("bias", "tied"))
SERVED = Model("gpt", depth=1, features=BIAS)

FAST = Optimizer("sgd", lr=0.5)
SLOW = Optimizer("sgd", lr=0.125)
SWINGING = Optimizer("momentum", lr=0.25, momentum=0.75, weight_decay=0.0625)
COUPLED = Optimizer("adam", lr=2.0**-5, weight_decay=0.0625, eps=2.0**-12)
DECOUPLED = Optimizer(
    "adamw", lr=2.0**-5, weight_decay=0.125, decay_vectors=False, eps=2.0**-12, schedule=(0.5, 1.0, 0.75)
)
CLIPPED = Optimizer("momentum", lr=0.5, momentum=0.5, clip=0.25)


def stale(kind: str, name: str, tier: Tier, why: str, layouts: str, model: Model, windows: Windows,
          optimizer: Optimizer = FAST, precision: Precision = Precision()) -> SplitRow:  # fmt: skip
    """A row of cases made for asynchronous runs of a kind (`Case.asynchronous`)."""
    row = split(name, tier, why, layouts, model, windows, optimizer, precision)
    return replace(row, make=lambda layout, seed: row.make(layout, seed).replace(asynchronous=kind))


def _pipeline(*arguments: object, **options: object) -> SplitRow:
    return stale("pipeline", *arguments, **options)  # type: ignore[arg-type]


def _server(*arguments: object, **options: object) -> SplitRow:
    return stale("server", *arguments, **options)  # type: ignore[arg-type]


STALE_GRID: tuple[SplitRow, ...] = (
    _pipeline("stale-chain", "quick", "the smallest pipeline", "pp4 pp3 | pp2", CHAIN, ONE_EACH, SLOW),
    _pipeline("stale-gpt", "quick", "a transformer, no-decay groups, a schedule", "pp4 | pp2 pp3", GPT, ONE_EACH, DECOUPLED),
    _pipeline("stale-mlp", "default", "momentum and decay, float64", "pp3 pp2 | pp4", MLP, ONE_EACH, SWINGING, DOUBLE),
    _pipeline("stale-deep", "default", "several layers per stage", "pp2 | pp3 pp4", DEEP_MLP, ONE_EACH, FAST),
    _pipeline("stale-adam", "default", "Adam with coupled decay", "pp3 | pp4", GPT, ONE_EACH, COUPLED),
    _pipeline("stale-data", "default", "stages in two copies", "dp2-pp2", DEEP_MLP, ONE_PER_RANK, SWINGING),
    _pipeline("stale-clip", "default", "clipping by the norm of all stages", "pp3 | pp2 pp4", GPT, ONE_EACH, CLIPPED),
    _pipeline("stale-tied", "default", "the embedding is also the head, on another stage", "pp3 | pp2 pp4", TIED, ONE_EACH,
              SWINGING),
    _pipeline("stale-groups", "quick", "groups of micro-batches", "pp4 | pp2 pp3", GPT, GROUPS, DECOUPLED),
    _pipeline("stale-groups-mlp", "default", "groups, momentum and decay, float64", "pp3 | pp2 pp4", MLP, GROUPS, SWINGING,
              DOUBLE),
    _pipeline("stale-groups-clip", "default", "groups, clipped, tied", "pp3 | pp2 pp4", TIED, GROUPS, CLIPPED),
    _pipeline("stale-groups-data", "default", "groups, two copies", "dp2-pp2", DEEP_MLP, GROUPS_PER_RANK, SWINGING),
    _server("arrivals-mlp", "quick", "three workers and a server", "w4", replace(MLP, depth=2), arrivals(3, 1, 3)),
    _server("arrivals-gpt", "default", "two workers and two servers, AdamW", "w4", SERVED, arrivals(2, 2, 4), DECOUPLED),
    _server("arrivals-momentum", "default", "momentum and decay, float64", "w4", replace(MLP, depth=2),
            arrivals(3, 1, 3), SWINGING, DOUBLE),
    _server("arrivals-adam", "default", "three workers and a server, Adam", "w4", SERVED, arrivals(3, 1, 3), COUPLED),
)  # fmt: skip

STALE_RESTORE_CASES: dict[str, Tier] = {
    "stale-chain-pp4": "default",  # with stashing four passes are in flight, and one activation between each two stages
    "stale-mlp-pp3": "default",  # momentum
    "stale-data-dp2-pp2": "nightly",
    "stale-gpt-pp3": "nightly",  # AdamW, a schedule
    "stale-tied-pp3": "nightly",
    "stale-groups-mlp-pp3": "default",  # both buffers
    "stale-groups-pp4": "nightly",
    "stale-groups-clip-pp3": "nightly",
    "arrivals-gpt-w4": "default",  # a gradient of a window after the save is on its way
    "arrivals-momentum-w4": "default",  # and of one before it
}
"""Of these, the cases that are also saved in the middle and restored in fresh ranks, and from which tier on."""

REPLAY_CASES: dict[str, Tier] = {
    "arrivals-adam-w4": "quick",
    "arrivals-gpt-w4": "default",
}
"""The cases that are also run in any order, and again in the order that this was. No branch is near, whatever the order."""


def workers_of(layout: Layout, windows: Windows) -> tuple[int, ...]:
    """The ranks that some window feeds; the others are servers."""
    return tuple(rank for rank in range(layout.dp) if any(window[rank] for window in windows))
