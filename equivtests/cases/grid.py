"""The grid: the table of cases that every strategy runs, by tier. A new case is one line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from equivtests.cases.case import DOUBLE, Case, Layout, LossScale, Model, Optimizer, Precision, Semantics, Windows
from equivtests.errors import CaseError

Tier = Literal["quick", "default", "nightly"]
TIERS: tuple[Tier, ...] = ("quick", "default", "nightly")

# Valid tokens by [update][rank][micro-batch][row]; four ranks, rows of at most 8 tokens. What each breaks:
UNEQUAL: Windows = (
    # different rows and tokens on every rank and micro-batch; a micro-batch without a valid token; a short last window
    (((8, 3), (1,)), ((5,), (7, 2)), ((0, 0), (4,)), ((6,), (8, 8))),
    (((2,), (8,)), ((7, 7), (3,)), ((5,), (1,)), ((8,), (6, 4))),
    (((3, 8),), ((6,),), ((1,),), ((8, 5),)),
)
RAGGED: Windows = (
    # unequal numbers of micro-batches; a rank without rows; a rank without a valid token
    (((8,), (3, 2), (1,), (7,)), ((5, 5),), (), ((0,), (0, 0))),
    (((4,),), ((8,), (2,), (6,)), ((3,), (7,)), ((1, 8),)),
    (((6, 6),), (), ((2,),), ((8,), (5,))),
)
EMPTY: Windows = (
    # a globally empty window between two others
    (((8,),), ((3,),), ((5,),), ((2,),)),
    (((0,),), ((0, 0),), ((0,),), ((0,),)),
    (((1,),), ((7,),), ((6,),), ((4,),)),
)
POWERS: Windows = (
    # token total a power of two, unequal on ranks: the exact lane
    (((8, 2), (3,)), ((1,), (7, 4)), ((0,), (2,)), ((4,), (1,))),
)
ONE_UPDATE: Windows = ((((8, 3),), ((5,),), ((1, 1),), ((6,),)),)

REAL_LINEAR = Model("linear", features=("bias",))
ODD_MLP = Model("mlp", width=7, depth=3, inputs=5, outputs=3, features=("bias",))
GPT = Model("gpt", depth=1, features=("bias",))
SGD = Optimizer("sgd", lr=0.5)
ADAMW = Optimizer("adamw", lr=2.0**-6, weight_decay=0.125, decay_vectors=False, eps=2.0**-12, schedule=(0.5, 1.0, 0.25))


def fold(windows: Windows, ranks: int) -> Windows:
    """The same rows on fewer ranks: rank r takes what ranks r, r + ranks, … had, as further micro-batches."""
    return tuple(
        tuple(tuple(micro for source in window[r::ranks] for micro in source) for r in range(ranks))
        for window in windows
    )


def longest(windows: Windows) -> int:
    return max(len(rank) for window in windows for rank in window)


@dataclass(frozen=True)
class Row:
    """One line of the grid. `make(world, seed)` builds the case; worlds: the world sizes it is run at."""

    name: str
    tier: Tier
    why: str
    make: Callable[[int, int], Case]
    worlds: tuple[int, ...] = (4,)


def case(
    name: str,
    model: Model,
    windows: Windows,
    optimizer: Optimizer = SGD,
    precision: Precision = Precision(),
    replicate: int = 1,
    magnitude: float = 1.0,
    semantics: Semantics = Semantics(),
) -> Callable[[int, int], Case]:
    """A maker of the case for any world size that `replicate` divides."""

    def make(world: int, seed: int) -> Case:
        folded = fold(windows, world)
        return Case(
            f"{name}-w{world}" + (f"-s{seed}" if seed else ""), model, folded, Layout(world, replicate), optimizer,
            precision, longest(folded), magnitude, seed, semantics,
        )  # fmt: skip

    return make


def row(name: str, tier: Tier, why: str, worlds: tuple[int, ...], *arguments: object, **options: object) -> Row:
    return Row(name, tier, why, case(name, *arguments, **options), worlds)  # type: ignore[arg-type]


MOMENTUM = Optimizer("momentum", lr=0.125, momentum=0.75, weight_decay=0.0625)
ADAM = Optimizer("adam", lr=2.0**-6, weight_decay=0.0625, eps=2.0**-12)
CLIPPED = Optimizer("sgd", lr=0.5, clip=0.25)
CLIPPED_INF = Optimizer("adamw", lr=2.0**-6, weight_decay=0.125, eps=2.0**-12, clip=0.0625, clip_norm="inf")
TINY = 2.0**-20
CLIPPED_TINY = Optimizer("momentum", lr=2.0**16, momentum=0.5, clip=2.0**-22)
BF16 = Precision("float32", "bfloat16", "float32")
FP16_WIRE = Precision("float32", "float32", "float16")
DYADIC = Model("mlp", width=4, depth=2, inputs=3, outputs=2, features=("bias",), numbers="dyadic")
ALL_GPT = Model("gpt", depth=2, features=("bias", "qk_norm", "shared_kv", "tied"))

GRID: tuple[Row, ...] = (
    row("linear-sgd", "quick", "one linear layer, unequal tokens, three updates", (4, 1), REAL_LINEAR, UNEQUAL),
    row("gpt-adamw", "quick", "no-decay groups, schedule, short last window", (4, 2), GPT, UNEQUAL, ADAMW),
    row("exact-mlp", "quick", "tolerance zero", (4, 2), DYADIC, POWERS, Optimizer(lr=0.25)),
    row("mlp-ragged-clip", "default", "odd sizes, ranks without rows, clipping by norm", (4, 3), ODD_MLP, RAGGED, CLIPPED),
    row("mlp-momentum-double", "default", "float64", (4,), ODD_MLP, UNEQUAL, MOMENTUM, DOUBLE),
    row("gpt-tied-adam", "default", "tied head, shared keys and values, norms on both", (4,), ALL_GPT, RAGGED, ADAM),
    row("gpt-empty-window", "default", "a window without a valid token", (4,), GPT, EMPTY, ADAMW),
    row("linear-clip-tiny", "default", "gradients near 1e-6, clipped", (4,), REAL_LINEAR, UNEQUAL, CLIPPED_TINY,
        magnitude=TINY),
    row("mlp-hsdp", "default", "shards in two copies", (4,), ODD_MLP, UNEQUAL, MOMENTUM, replicate=2),
    row("mlp-hsdp-one-shard", "default", "a mesh whose shard axis has size 1", (4,), ODD_MLP, RAGGED, CLIPPED, replicate=4),
    row("linear-bf16", "default", "bfloat16 compute over float32 weights", (4,), REAL_LINEAR, UNEQUAL, SGD, BF16),
    row("mlp-fp16-wire", "default", "gradients compressed to float16", (4,), ODD_MLP, UNEQUAL, SGD, FP16_WIRE),
    row("mlp-unused", "default", "an absent gradient is not zero", (4,), Model("mlp", features=("bias", "unused")), UNEQUAL,
        Optimizer("adamw", lr=2.0**-6, weight_decay=0.5, eps=2.0**-12)),
    row("gpt-conditional", "default", "a branch that only the first micro-batches use", (4,),
        Model("gpt", depth=1, features=("conditional",)), RAGGED, ADAMW),
    row("gpt-auxiliary", "default", "a second head and a z-loss with denominators of their own", (4,),
        Model("gpt", depth=1, features=("extra_head", "z_loss")), UNEQUAL, SGD),
    row("mlp-pairs", "default", "a loss over pairs of samples on different ranks", (4,),
        Model("mlp", features=("pairs",)), UNEQUAL, SGD),
    row("mlp-running", "default", "running statistics", (4,), Model("mlp", features=("running",)), RAGGED, SGD),
    row("mlp-batch-norm", "default", "statistics over the rows of all ranks", (4,),
        Model("mlp", features=("batch_norm", "bias")), RAGGED, MOMENTUM),
    row("mlp-loss-scale", "default", "dynamic loss scaling and clipping", (4,), ODD_MLP, UNEQUAL,
        Optimizer("adamw", lr=2.0**-6, clip=0.25, eps=2.0**-12), Precision(loss_scale=LossScale())),
    row("moe", "default", "a mixture of experts with its balance loss", (4,),
        Model("moe", depth=1, experts=4, top_k=2, features=("balance", "bias")), RAGGED, ADAMW),
    row("gpt-dropout", "default", "dropout, the same on any layout", (4,), Model("gpt", depth=1, features=("dropout",)),
        UNEQUAL, ADAMW),
    row("chain-sgd", "nightly", "the smallest model with depth", (4,), Model("chain", depth=4), UNEQUAL),
    row("exact-linear-double", "nightly", "tolerance zero in float64, one update", (4,),
        Model("linear", numbers="dyadic", features=("bias",)), POWERS, Optimizer(lr=0.25), DOUBLE),
    row("linear-transposed", "nightly", "a weight that is not contiguous", (4,),
        Model("linear", features=("bias", "transposed")), UNEQUAL, MOMENTUM),
    row("gpt-frozen", "nightly", "a weight that is not trained", (4, 3), Model("gpt", depth=1, features=("frozen",)),
        UNEQUAL, ADAMW),
    row("gpt-clip-inf", "nightly", "clipping by the largest element", (4, 3), ALL_GPT, RAGGED, CLIPPED_INF),
    row("gpt-double", "nightly", "a transformer in float64", (4,), ALL_GPT, UNEQUAL, ADAMW, DOUBLE),
    row("gpt-one-update", "nightly", "one update only", (4, 3, 2, 1), GPT, ONE_UPDATE, ADAM),
    row("span-microbatch", "nightly", "token totals of micro-batches", (4,), GPT, UNEQUAL, SGD,
        semantics=Semantics(denominator="microbatch")),
    row("span-rank", "nightly", "token totals of ranks", (4,), GPT, UNEQUAL, SGD, semantics=Semantics(denominator="rank")),
    row("span-rank-microbatch", "nightly", "means of means, where a case asks for them", (4,), GPT, UNEQUAL, SGD,
        semantics=Semantics(denominator="rank-microbatch")),
    row("span-rows", "nightly", "means weighted by rows", (4,), GPT, UNEQUAL, SGD, semantics=Semantics(denominator="rows")),
)  # fmt: skip


def own_grid(spec: str, length: int, rate: float) -> tuple[Row, ...]:
    """The cases of a user's own model. length: its most valid tokens of a sample; rate: at which plain SGD trains it."""
    model = Model("own", own=spec, length=length)

    def own(
        name: str, tier: Tier, why: str, worlds: tuple[int, ...], windows: Windows, *rest: object, **more: int
    ) -> Row:
        return row(f"own-{name}", tier, why, worlds, model, scaled(windows, length), *rest, **more)

    sgd = Optimizer("sgd", lr=rate)
    momentum = Optimizer("momentum", lr=rate / 4, momentum=0.75, weight_decay=0.0625)
    adamw = replace(ADAMW, lr=rate / 8)
    clipped = Optimizer("sgd", lr=rate * 2.0**10, clip=2.0**-10)  # below any gradient: an update has the norm `rate`
    return (
        own("sgd", "quick", "unequal tokens, three updates", (4, 1), UNEQUAL, sgd),
        own("adamw", "quick", "no-decay groups, schedule, short last window", (4, 2), UNEQUAL, adamw),
        own("ragged-clip", "default", "ranks without rows, clipping by norm", (4, 3), RAGGED, clipped),
        own("momentum-double", "default", "float64", (4,), UNEQUAL, momentum, DOUBLE),
        own("empty-window", "default", "a window without a valid token", (4,), EMPTY, adamw),
        own("hsdp", "default", "shards in two copies, clipping by norm", (4,), UNEQUAL, clipped, replicate=2),
        own("one-update", "nightly", "one update only", (4, 3, 2, 1), ONE_UPDATE, replace(ADAM, lr=rate / 8)),
    )


def scaled(windows: Windows, length: int) -> Windows:
    """Counts of valid tokens for samples of another length than 8, rounded up: none stays none."""
    return tuple(
        tuple(tuple(tuple(-(-n * length // 8) for n in rows) for rows in micros) for micros in window)
        for window in windows
    )


OWN_RESTORE_CASES: dict[str, Tier] = {"own-adamw-w4": "default", "own-adamw-w2": "nightly"}

RESTORE_CASES: dict[str, Tier] = {
    "linear-sgd-w1": "quick",
    "gpt-dropout-w4": "default",  # AdamW, a schedule, dropout
    "mlp-loss-scale-w4": "default",
    "mlp-hsdp-w4": "default",
    "mlp-fp16-wire-w4": "default",
    "gpt-adamw-w4": "nightly",
    "gpt-adamw-w2": "nightly",
    "linear-bf16-w4": "nightly",
}
"""Cases that are also saved in the middle and restored in fresh ranks, and from which tier on."""

LEDGER_CASES: dict[str, Tier] = {
    "gpt-adamw-w2": "quick",
    "gpt-adamw-w4": "default",  # the same number of micro-batches on every rank; a layer and the root, a vocabulary of 13
    "mlp-hsdp-w4": "default",  # shards in two copies
    "linear-bf16-w4": "default",  # weights gathered in bfloat16
    "mlp-fp16-wire-w4": "default",  # gradients reduced in float16
    "gpt-tied-adam-w4": "nightly",  # ranks filled up with empty micro-batches; two layers, tied weights in the root
    "mlp-momentum-double-w4": "nightly",  # 8 bytes per element; no size that four ranks divide
    # rows of `split_grid.SPLIT_GRID`
    "linear-tp4": "default",
    "gpt-tp4": "nightly",
    "gpt-dp2-tp2": "default",  # groups of two kinds and the same size
    "gpt-auxiliary-tp4": "nightly",  # pieces of three losses
    "gpt-odd-tp2": "nightly",  # three heads and a vocabulary of 13
    "gpt-cp4": "default",
    "gpt-dp2-cp2": "nightly",
    "gpt-odd-lengths-cp4": "nightly",  # parts of sequences are padded; a rank without a position
    "moe-dp4-ep4": "nightly",
    "moe-dp4-ep2": "default",  # experts in two copies
    "moe-capacity-dp4-ep2": "nightly",  # dropped tokens travel nowhere
    "gpt-pp4": "nightly",
    "gpt-dp2-pp2": "default",
    "gpt-lengths-pp4": "nightly",
    "gpt-tied-pp4": "default",  # a parameter of both ends
    "gpt-virtual-pp2v2": "nightly",  # two stages per rank
    "gpt-virtual-dp2-pp2v2": "nightly",
    "gpt-tp2-pp2": "default",
    "gpt-cp2-tp2": "nightly",
    "gpt-cp2-pp2": "nightly",
}
"""Cases in which what travels and what is kept is counted, too, and from which tier on.

They have several micro-batches and sizes that do not divide.
None of them clips (fully_shard reduces the norms of all parameters as one vector, which the ledger would take for a
payload) or has parameters of one element (broadcast one by one, the ledger would take them for scalars), and in all of
them every parameter is trained and used (how frameworks treat others is not part of an algorithm's form).
"""


def includes(tier: Tier, needed: Tier | None) -> bool:
    """Whether a tier holds what is run from the tier `needed` on (None: never)."""
    return needed is not None and TIERS.index(needed) <= TIERS.index(tier)


def cases(
    tier: Tier, nproc: int, seed: int = 0, grid: tuple[Row, ...] | None = None, exactly: bool = False
) -> Iterator[Case]:
    """The cases of a tier (and of the tiers below it) whose world fits in `nproc`, smallest tiers first.

    grid: other rows than those of the suite. exactly: every row on `nproc` ranks, no fewer.
    """
    for line in GRID if grid is None else grid:
        if includes(tier, line.tier):
            for world in worlds_of(line, nproc, exactly):
                yield line.make(world, seed)


def worlds_of(line: Row, nproc: int, exactly: bool = False) -> tuple[int, ...]:
    """The worlds of a row that fit in `nproc`, and `nproc` itself in the place of those that do not."""
    worlds = {world for world in line.worlds if world <= nproc and not exactly}
    if nproc in line.worlds or (max(line.worlds) > nproc or exactly) and folds(line.make(line.worlds[0], 0), nproc):
        worlds.add(nproc)
    return tuple(sorted(worlds, key=[*line.worlds, nproc].index))


def folds(case: Case, world: int) -> bool:
    """Whether a row's data may be fed by any number of ranks: not if they lie in copies, or add up exactly in halves."""
    return case.layout.replicate == 1 and (not case.exact or world & (world - 1) == 0)


def tier_of(table: dict[str, Tier], row: str) -> Tier | None:
    """From which tier on a case ("gpt-adamw-w4") is run in a chapter; another world counts as its row's own.

    Models that are split ("gpt-tp4") are run on the layouts that are listed, and no others.
    """
    listed = {f"{line.name}-w{world}" for line in GRID for world in line.worlds}
    name = row.rpartition("-w")[0]
    if row in table or row in listed or not name:
        return table.get(row)
    return min((t for n, t in table.items() if n.rpartition("-w")[0] == name), key=TIERS.index, default=None)


def too_large(
    tier: Tier, nproc: int, grid: tuple[Row, ...] | None = None, exactly: bool = False
) -> list[tuple[str, int]]:
    """(case name, world) of the cases of a tier that need more ranks than `nproc`.

    exactly: only where the row cannot be run on `nproc` ranks either.
    """
    rows = [line for line in (GRID if grid is None else grid) if includes(tier, line.tier)]
    left = [line for line in rows if not (exactly and worlds_of(line, nproc, exactly))]
    return [(f"{line.name}-w{w}", w) for line in left for w in line.worlds if w > nproc]


MOST_RANKS = 64


def named(name: str, grid: tuple[Row, ...] = GRID) -> Case:
    """The case of a name, ROW-wWORLD or ROW-wWORLD-sSEED, at any world size that the row can be made for.

    Raises CaseError if there is none.
    """
    match = re.fullmatch(r"(.+)-w([1-9]\d?)(?:-s(\d{1,9}))?", name)
    line = next((line for line in grid if match and line.name == match[1]), None)
    if match is None or line is None or int(match[2]) > MOST_RANKS:
        such = f"ROW-wWORLD such as {grid[0].name}-w2" + (" or ROW-LAYOUT such as gpt-tp4" if grid is GRID else "")
        words = f"write {such} (rows: `equivtests list`), or the path of a case file"
        raise CaseError(f"no case {name!r}: {words}")
    return line.make(int(match[2]), int(match[3] or 0))
