"""The grid of models that are split across ranks: situations, each on several layouts. A new one is one line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from equivtests.cases.case import DOUBLE, Case, Model, Optimizer, Precision, Semantics, Windows
from equivtests.cases.grid import ADAM, ADAMW, CLIPPED, MOMENTUM, RAGGED, SGD, Tier, fold, includes, longest
from equivtests.cases.layout import Layout, layout_of


@dataclass(frozen=True)
class SplitRow:
    """One situation. `make(layout, seed)` builds the case; layouts: the labels that it is run at; more: also, at night."""

    name: str
    tier: Tier
    why: str
    make: Callable[[Layout, int], Case]
    layouts: tuple[str, ...]
    more: tuple[str, ...] = ()


def split(
    name: str,
    tier: Tier,
    why: str,
    layouts: str,
    model: Model,
    windows: Windows,
    optimizer: Optimizer = SGD,
    precision: Precision = Precision(),
    semantics: Semantics = Semantics(),
    lengths: tuple[int, ...] = (),
    stages: tuple[int, ...] = (),
) -> SplitRow:
    """A row. layouts: labels, by spaces, those behind "|" for the nightly tier alone.

    model: of depth PER_STAGE, it has as many layers as the layout has stages. windows: of as many data ranks as the
    largest of the layouts has; fewer feed more each.
    """
    usual, _, more = layouts.partition("|")

    def make(layout: Layout, seed: int) -> Case:
        folded = fold(windows, layout.dp)
        laid = replace(layout, stages=stages)
        fitted = model if model.depth else replace(model, depth=layout.stage_count)
        return Case(
            f"{name}-{layout.label}" + (f"-s{seed}" if seed else ""), fitted, folded, laid, optimizer, precision,
            longest(folded), 1.0, seed, semantics, lengths=lengths,
        )  # fmt: skip

    return SplitRow(name, tier, why, make, tuple(usual.split()), tuple(more.split()))


# Valid tokens by [update][rank][micro-batch][row]; rows of at most 8 tokens. What each breaks:
TWO: Windows = (
    # two data ranks (one feeds all four micro-batches): unequal tokens, a row and a micro-batch without a valid token
    (((8, 3), (1, 5)), ((0, 0), (7, 2))),
    (((2, 8), (6, 1)), ((7, 7), (0, 3))),
)
UNEVEN: Windows = (
    # unequal rows, unequal numbers of micro-batches, a rank without a valid token
    (((8, 3), (1,), (2, 6, 4)), ((5,), (7, 2))),
    (((0,), (0, 0)), ((4, 4, 1), (8,), (3,))),
)
ONES: Windows = (
    # rows of one valid token: every rank but one of those that share a sequence has none
    (((1,), (1,)), ((1,), (8,))),
    (((1, 1), (2,)), ((7,), (1,))),
)
SHORT: Windows = (
    # of every two micro-batches the first has sequences of four tokens
    (((4, 3), (1, 5)), ((0, 0), (7, 2))),
    (((2, 4), (6, 1)), ((3, 1), (0, 8))),
)
ODD: Windows = (
    # of every two micro-batches the first has sequences of three tokens, the second of seven
    (((3, 2), (1, 5)), ((0, 0), (7, 2))),
    (((2, 3), (6, 1)), ((3, 1), (0, 7))),
)
FOUR: Windows = (
    # four data ranks, two micro-batches each
    (((8, 3), (1,)), ((5,), (7, 2)), ((0, 0), (4,)), ((6,), (8, 8))),
    (((2,), (8,)), ((7, 7), (3,)), ((5,), (1,)), ((8,), (6, 4))),
)
STAGED: Windows = (
    # eight micro-batches on one data rank, four on each of two, of two rows each
    (((8, 3), (1, 5), (0, 0), (7, 2)), ((4, 4), (6, 8), (1, 1), (3, 2))),
    (((2, 8), (6, 1), (5, 5), (0, 3)), ((7, 7), (8, 0), (2, 4), (1, 6))),
)
FEW: Windows = (
    # fewer micro-batches than four stages: three, then two
    (((8, 3), (1, 5), (7, 2)),),
    (((2, 8), (6, 1)),),
)
POWERS: Windows = (
    # a token total that is a power of two: the exact lane
    (((8, 2), (3, 1)), ((7, 4), (0, 7))),
)

PER_STAGE = 0
BIAS = ("bias",)
LINEAR = Model("linear", inputs=8, outputs=8, features=BIAS)
TRANSPOSED = Model("linear", inputs=5, outputs=3, features=("bias", "transposed"))
ODD_LINEAR = Model("linear", inputs=5, outputs=3, features=BIAS)
MLP = Model("mlp", width=8, depth=3, inputs=8, outputs=4, features=BIAS)
ODD_MLP = Model("mlp", width=7, depth=3, inputs=5, outputs=3, features=BIAS)
DEEP_MLP = Model("mlp", width=6, depth=8, features=BIAS)
DYADIC = Model("mlp", width=4, depth=2, inputs=4, outputs=4, features=BIAS, numbers="dyadic")
GATED = Model("gated_mlp", width=8, features=BIAS)
GPT = Model("gpt", width=16, heads=4, depth=1, vocabulary=16, features=BIAS)
ODD_GPT = Model("gpt", width=12, heads=3, depth=1, vocabulary=13, features=BIAS)
GROUPED = Model(
    "gpt", width=16, heads=4, kv_heads=2, depth=2, vocabulary=16, features=("bias", "gated", "qk_norm", "tied")
)
SHARED = Model("gpt", width=16, heads=4, depth=1, vocabulary=16, features=("bias", "qk_norm", "shared_kv"))
AUXILIARY = Model(
    "gpt", width=16, heads=4, depth=1, vocabulary=16, features=("bias", "extra_head", "smoothing", "z_loss")
)
DROPPED = Model("gpt", width=16, heads=4, depth=PER_STAGE, vocabulary=16, features=("bias", "dropout"))
PACKED = Model("gpt", width=16, heads=4, depth=1, vocabulary=16, features=("bias", "packed"))
TALL = Model("gpt", width=8, heads=4, depth=PER_STAGE, vocabulary=16, features=BIAS)
WIDE_DEEP = Model("gpt", width=16, heads=4, depth=PER_STAGE, vocabulary=16, features=BIAS)
DEEP = Model("gpt", width=8, depth=PER_STAGE, vocabulary=16, features=BIAS)
TIED = Model("gpt", width=8, depth=PER_STAGE, vocabulary=16, features=("bias", "tied"))
TURNED = Model("gpt", width=8, depth=2, vocabulary=16, features=BIAS)
EIGHT = Model("gpt", width=8, depth=8, vocabulary=16, features=())
EXPERTS = Model("moe", width=8, depth=1, vocabulary=16, experts=4, top_k=2, features=("balance", "bias"))
LIMITED = Model("moe", width=8, depth=1, vocabulary=16, experts=4, capacity=2, features=("balance",))
IDLE = Model("moe", width=8, depth=1, vocabulary=16, experts=6, features=BIAS)
RICH = Model(
    "moe",
    width=8,
    vocabulary=16,
    experts=5,
    top_k=2,
    capacity=4,
    features=("balance", "bias", "dropout", "extra_head", "gated", "qk_norm", "smoothing", "tied", "z_loss"),
)
ALL_DEEP = Model(
    "gpt",
    width=16,
    heads=4,
    depth=4,
    vocabulary=16,
    features=(
        "bias",
        "dropout",
        "extra_head",
        "gated",
        "packed",
        "qk_norm",
        "shared_kv",
        "smoothing",
        "tied",
        "z_loss",
    ),
)
CHAIN = Model("chain", depth=4)

TP = "tp4 dp2-tp2"
CP = "cp4 dp2-cp2"
EP = "dp4-ep4 dp4-ep2"
PP = "pp4 dp2-pp2"
TP_PP = "tp2-pp2 dp2-tp2-pp2"
CLIPPED_TINY = Optimizer("momentum", lr=0.25, momentum=0.5, clip=0.125)
FLAT = Optimizer("adam", lr=2.0**-6, eps=2.0**-12)

SPLIT_GRID: tuple[SplitRow, ...] = (
    split("linear", "quick", "one linear layer", "tp4 dp2-tp2 | tp2", LINEAR, TWO),
    split("gpt", "quick", "a transformer, no-decay groups, a schedule", f"{TP} {CP} {PP} tp2-pp2 cp2-tp2 cp2-pp2",
          WIDE_DEEP, TWO, ADAMW),
    split("moe", "quick", "a mixture of experts with its balance loss", f"{EP} dp2-cp2-ep2", EXPERTS, FOUR, ADAMW),
    split("linear-odd", "default", "sizes that the ranks do not divide", "dp2-tp2 | tp2", ODD_LINEAR, UNEVEN),
    split("exact-mlp", "default", "tolerance zero", "dp2-tp2 dp2-pp2 | tp2 pp2", DYADIC, POWERS, Optimizer(lr=0.25)),
    split("mlp", "default", "depth, momentum and decay", "dp2-tp2 | tp4 pp2 dp2-pp2", MLP, TWO, MOMENTUM),
    split("mlp-odd-clip", "default", "sizes that do not divide, clipping", "dp2-tp2 | tp2", ODD_MLP, UNEVEN, CLIPPED),
    split("gated", "default", "a gated MLP, float64", "tp4 | dp2-tp2", GATED, TWO, MOMENTUM, DOUBLE),
    split("linear-transposed", "default", "a weight that is not contiguous", "tp2 | dp2-tp2", TRANSPOSED, UNEVEN, MOMENTUM),
    split("gpt-odd", "default", "three heads and a vocabulary of 13", "tp2 | dp2-tp2", ODD_GPT, UNEVEN, ADAM),
    split("gpt-grouped", "default", "grouped heads with norms, gated, tied, clipped",
          "dp2-tp2 dp2-tp2-pp2 cp2-tp2 | tp4 cp4 dp2-cp2 tp2-pp2", GROUPED, TWO,
          CLIPPED_TINY),
    split("gpt-shared", "default", "one key/value head for all ranks", "tp4 | dp2-tp2 cp2-tp2", SHARED, UNEVEN, ADAM),
    split("gpt-auxiliary", "default", "smoothing, a second head, a z-loss", "tp4 cp4 | dp2-tp2 dp2-cp2", AUXILIARY, TWO),
    split("gpt-dropout", "default", "dropout, the same on any layout",
          "dp2-tp2 dp2-cp2 | tp4 cp4 pp4 dp2-pp2 cp2-tp2 cp2-pp2", DROPPED, TWO,
          ADAMW),
    split("gpt-packed", "default", "several documents in a row", "cp4 | tp4 dp2-tp2 dp2-cp2 cp2-tp2", PACKED, TWO),
    split("gpt-ones", "default", "ranks whose part of a sequence has no valid token", "cp4 | dp2-cp2 cp2-tp2", GPT, ONES),
    split("gpt-lengths", "default", "sequences whose length changes inside a window",
          "dp2-pp2 | tp4 dp2-tp2 cp4 dp2-cp2 pp4 cp2-pp2", TALL, SHORT,
          lengths=(4, 8)),
    split("gpt-odd-lengths", "default", "sequences that ranks do not divide; a rank without a position",
          "cp4 | dp2-cp2 cp2-tp2", PACKED, ODD, lengths=(3, 7)),
    split("moe-capacity", "default", "experts that drop tokens", "dp4-ep4 dp2-cp2-ep4 | dp4-ep2", LIMITED, FOUR),
    split("moe-idle", "default", "experts, and a rank, that no token goes to, and a rank without rows",
          "dp4-ep2 | dp4-ep4", IDLE, RAGGED, MOMENTUM),
    split("moe-clip", "default", "two mixtures with all features, clipping", "dp4-ep2 cp2-ep2 | dp4-ep4 dp2-ep2", RICH, FOUR,
          CLIPPED_TINY),
    split("chain", "default", "the smallest model with depth", "pp4 | pp2", CHAIN, STAGED),
    split("gpt-tied", "default", "the embedding is also the head, on another stage", "pp4 | dp2-pp2 tp2-pp2", TIED,
          STAGED, ADAM),
    split("gpt-clip", "default", "clipping by the norm of all stages", "dp2-pp2 | pp4 tp2-pp2", DEEP, STAGED, CLIPPED),
    split("gpt-uneven-stages", "default", "stages of unequal numbers of layers", "pp4", DEEP, STAGED, stages=(0, 2, 1, 1)),
    split("mlp-virtual", "default", "two stages per pipeline rank", "dp2-pp2v2 | pp2v2", DEEP_MLP, STAGED),
    split("gpt-virtual", "default", "two stages per pipeline rank, tied", "pp2v2 tp2-pp2v2 | dp2-pp2v2", TIED, STAGED, ADAM),
    split("gpt-few", "default", "fewer micro-batches than stages", "pp4", DEEP, FEW),
    split("gpt-all", "default", "stages and all features, unequal micro-batches", "dp2-pp2 | pp4 tp2-pp2", ALL_DEEP, UNEVEN,
          ADAMW),
    split("gpt-turned", "default", "a mesh in another rank order", "dp2-tp2-by-tp-dp dp2-pp2-by-dp-pp dp2-cp2-by-cp-dp",
          TURNED, TWO),
    split("gpt-three", "default", "three axes", "dp2-tp2-pp2 dp2-cp2-tp2 dp2-cp2-pp2", TURNED, TWO, CLIPPED_TINY),
    split("gpt-copies", "default", "shards in two copies, beside tensor ranks", "dp4r2-tp2", TURNED, FOUR, CLIPPED_TINY),
    split("linear-double", "nightly", "float64", "tp4 dp2-tp2", LINEAR, TWO, MOMENTUM, DOUBLE),
    split("gpt-eight", "nightly", "eight layers", "pp4v2 pp2v2", EIGHT, STAGED, ADAMW, DOUBLE),
    split("gpt-double", "nightly", "float64", f"{TP} {CP} {PP} {TP_PP} cp2-tp2 cp2-pp2", TIED, TWO, FLAT, DOUBLE),
)  # fmt: skip

SPLIT_RESTORE_CASES: dict[str, Tier] = {
    "gpt-dropout-dp2-cp2": "default",
    "gpt-dropout-cp2-pp2": "nightly",
    "gpt-dropout-cp2-tp2": "nightly",
    "moe-clip-cp2-ep2": "nightly",
    "gpt-tied-pp4": "default",  # Adam; a tied embedding on two ranks
    "gpt-dropout-dp2-pp2": "nightly",
    "gpt-tied-tp2-pp2": "nightly",
    "gpt-virtual-pp2v2": "nightly",
    "gpt-virtual-tp2-pp2v2": "nightly",
}
"""Of these, the cases that are also saved in the middle and restored in fresh ranks, and from which tier on."""


def split_cases(
    tier: Tier, nproc: int, seed: int = 0, exactly: bool = False, grid: tuple[SplitRow, ...] = SPLIT_GRID
) -> Iterator[Case]:
    """The cases of a tier, and of the tiers below it, whose layout fits in `nproc` ranks (exactly: needs just as many)."""
    for line in grid:
        if includes(tier, line.tier):
            for layout in layouts_of(line, tier):
                if layout.world == nproc or (layout.world < nproc and not exactly):
                    yield line.make(layout, seed)


def split_too_large(tier: Tier, nproc: int, grid: tuple[SplitRow, ...] = SPLIT_GRID) -> Iterator[tuple[str, Layout]]:
    """(case name, layout) of the cases of a tier that need more ranks than `nproc`."""
    for line in grid:
        if includes(tier, line.tier):
            yield from ((f"{line.name}-{lay.label}", lay) for lay in layouts_of(line, tier) if lay.world > nproc)


def layouts_of(line: SplitRow, tier: Tier = "nightly") -> list[Layout]:
    """The layouts of a row in a tier. Raises ValueError for a label that is none."""
    labels = line.layouts + (line.more if tier == "nightly" else ())
    found = {label: layout_of(label) for label in labels}
    wrong = [label for label, layout in found.items() if layout is None]
    if wrong:
        raise ValueError(f"row {line.name}: {wrong[0]!r} is no layout")
    return [layout for layout in found.values() if layout is not None]


def split_named(name: str, grid: tuple[SplitRow, ...] = SPLIT_GRID) -> Case | None:
    """The case ROW-LAYOUT or ROW-LAYOUT-sSEED, or None if there is no such row. A row can be made for any layout that fits.

    Raises CaseError for a layout that does not.
    """
    plain, _, seed = name.rpartition("-s") if re.search(r"-s\d{1,9}$", name) else (name, "", "0")
    for line in grid:
        label = plain.removeprefix(f"{line.name}-")
        layout = layout_of(label)
        known = layout is not None and (layout.splits or label in line.layouts + line.more)
        if known and layout is not None and label == layout.label:
            return line.make(layout, int(seed))
    return None
