"""The cases that mutants of split models are planted on: each a small situation in which the mistake shows.

Windows are valid tokens by [update][data rank][micro-batch][row].
"""

from __future__ import annotations

from typing import Any

from equivtests.cases.case import Case, Model, Optimizer, Windows
from equivtests.cases.grid import MOMENTUM, RAGGED, SGD, longest
from equivtests.cases.layout import layout_of
from equivtests.mutants.situations import CLIP


def split_situation(
    name: str, label: str, model: Model, windows: Windows, optimizer: Optimizer = SGD, **options: Any
) -> Case:
    """A case on the layout of a label. Raises ValueError if it is none."""
    layout = layout_of(label)
    if layout is None:
        raise ValueError(f"situation {name}: {label!r} is no layout")
    return Case(name, model, windows, layout, optimizer, accumulation=longest(windows), **options)


# ---------------------------------------------------------------------------------------------- sequences cut over ranks

ONE_DATA_RANK: Windows = ((((8, 3), (5, 8)),), (((2, 8), (7,)),))
TWO_DATA_RANKS: Windows = ((((8, 3), (5,)), ((7, 2), (8,))),)

SMALL = Model("gpt", depth=1, features=("bias",))
SPLIT_SEQUENCE = split_situation("split-sequence", "cp2", SMALL, ONE_DATA_RANK)
SPLIT_IN_FOUR = split_situation("split-in-four", "cp4", SMALL, ONE_DATA_RANK)
SPLIT_BESIDE_DATA = split_situation("split-beside-data", "dp2-cp2", SMALL, TWO_DATA_RANKS)
SPLIT_DOCUMENTS = split_situation("split-documents", "cp2", Model("gpt", depth=1, features=("packed",)), ONE_DATA_RANK)
SPLIT_DROPOUT = split_situation("split-dropout", "cp2", Model("gpt", depth=1, features=("dropout",)), ONE_DATA_RANK)
SPLIT_TWO_HEADS = split_situation(
    "split-two-heads", "cp2", Model("gpt", depth=1, features=("extra_head",)), ONE_DATA_RANK
)
SPLIT_STAGES = split_situation("split-stages", "cp2-pp2", Model("gpt", depth=2), ONE_DATA_RANK)
SPLIT_HEADS_TOO = split_situation(
    "split-heads-too", "cp2-tp2", Model("gpt", depth=1, features=("qk_norm",)), ONE_DATA_RANK
)
SPLIT_EXPERTS_TOO = split_situation(
    "split-experts-too", "cp2-ep2", Model("moe", depth=1, experts=4, capacity=2, features=("balance",)), ONE_DATA_RANK
)

# ---------------------------------------------------------------------------------------------- dropout on tensor ranks

SPREAD_DROPOUT = split_situation("spread-dropout", "tp2", Model("gpt", depth=1, features=("dropout",)), ONE_DATA_RANK)
SPREAD_DROPOUT_DATA = split_situation(
    "spread-dropout-data", "dp2-tp2", Model("gpt", depth=1, features=("dropout",)), TWO_DATA_RANKS
)

# ---------------------------------------------------------------------------------------------- stages

FOUR_MICRO: Windows = (
    (((8, 3), (1, 5), (4, 6), (7, 2)),),
    (((2, 8), (6, 1), (5, 5), (3, 3)),),
)
FOUR_BY_TWO: Windows = (
    (((8, 3), (1, 5), (4, 6), (7, 2)), ((4, 4), (6, 8), (1, 1), (3, 2))),
    (((2, 8), (6, 1), (5, 5), (3, 3)), ((7, 7), (8, 1), (2, 4), (1, 6))),
)
LONG_AND_SHORT: Windows = ((((4, 3), (1, 5), (2, 4), (7, 2)),), (((2, 4), (6, 1), (3, 1), (3, 8)),))

TWO_LAYERS = Model("gpt", width=8, depth=2, features=("bias",))
FOUR_LAYERS = Model("gpt", width=8, depth=4, features=("bias",))
TIED_ENDS = Model("gpt", width=8, depth=2, features=("bias", "tied"))
TIED_FOUR = Model("gpt", width=8, depth=4, features=("bias", "tied"))
CLIP_STAGES = Optimizer("sgd", lr=0.5, clip=2.0**-4)

STAGED = split_situation("staged", "pp2", TWO_LAYERS, FOUR_MICRO)
STAGED_BESIDE_DATA = split_situation("staged-beside-data", "dp2-pp2", TWO_LAYERS, FOUR_BY_TWO)
STAGED_LENGTHS = split_situation("staged-lengths", "pp2", TWO_LAYERS, LONG_AND_SHORT, lengths=(4, 8))
STAGED_VIRTUAL = split_situation("staged-virtual", "pp2v2", FOUR_LAYERS, FOUR_MICRO)
STAGED_TIED = split_situation("staged-tied", "pp2", TIED_ENDS, FOUR_MICRO)
STAGED_TIED_DATA = split_situation("staged-tied-data", "dp2-pp2", TIED_ENDS, FOUR_BY_TWO)
STAGED_TIED_VIRTUAL = split_situation("staged-tied-virtual", "pp2v2", TIED_FOUR, FOUR_MICRO)
STAGED_CLIPPED = split_situation("staged-clipped", "pp4", FOUR_LAYERS, FOUR_MICRO, CLIP_STAGES)
TENSOR_TIED = split_situation("tensor-tied", "tp2", Model("gpt", depth=1, features=("bias", "tied")), ONE_DATA_RANK)

# ---------------------------------------------------------------------------------------------- layers cut over ranks

SPREAD = split_situation("spread", "tp2", SMALL, ONE_DATA_RANK)
SPREAD_IN_FOUR = split_situation(
    "spread-in-four", "tp4", Model("gpt", depth=1, heads=4, features=("bias",)), ONE_DATA_RANK
)
SPREAD_BESIDE_DATA = split_situation("spread-beside-data", "dp2-tp2", SMALL, TWO_DATA_RANKS)
SPREAD_HEAD_NORMS = split_situation(
    "spread-head-norms", "tp2", Model("gpt", depth=1, features=("qk_norm",)), ONE_DATA_RANK
)
SPREAD_SHARED_HEAD = split_situation(
    "spread-shared-head", "tp2", Model("gpt", depth=1, features=("bias", "shared_kv")), ONE_DATA_RANK
)
SPREAD_SMOOTHED = split_situation(
    "spread-smoothed", "tp2", Model("gpt", depth=1, features=("smoothing",)), ONE_DATA_RANK
)
SPREAD_CLIPPED = split_situation(
    "spread-clipped", "dp2-tp2", Model("gpt", depth=1, features=("bias", "qk_norm")), TWO_DATA_RANKS, CLIP
)

# ---------------------------------------------------------------------------------------------- experts cut over ranks

FOUR_DATA_RANKS: Windows = ((((8, 3),), ((5, 4),), ((1, 1),), ((6, 2),)), (((2,),), ((7, 7),), ((3,),), ((4, 8),)))
FOUR_BY_THREE: Windows = ((((8, 3), (1,), (2,)), ((5,), (7, 2), (4,)), ((3,), (4,), (5, 1)), ((6,), (8, 8), (7,))),)

MIXTURE = Model("moe", depth=1, experts=4, top_k=2, features=("bias",))
MIXED = split_situation("mixed", "dp4-ep2", MIXTURE, FOUR_DATA_RANKS)
MIXED_IN_FOUR = split_situation("mixed-in-four", "dp4-ep4", MIXTURE, FOUR_DATA_RANKS)
MIXED_CLIPPED = split_situation("mixed-clipped", "dp4-ep2", MIXTURE, FOUR_DATA_RANKS, CLIP)
MIXED_BALANCED = split_situation(
    "mixed-balanced", "dp4-ep4", Model("moe", depth=1, experts=4, features=("balance",)), FOUR_BY_THREE
)
MIXED_LIMITED = split_situation(
    "mixed-limited", "dp4-ep4", Model("moe", depth=1, experts=4, capacity=3), FOUR_DATA_RANKS
)
MIXED_IDLE = split_situation(
    "mixed-idle", "dp4-ep4", Model("moe", depth=1, vocabulary=16, experts=6, features=("bias",)), RAGGED, MOMENTUM
)
