"""The cases that mutants of split models are planted on: each a small situation in which the mistake shows.

Windows are valid tokens by [update][data rank][micro-batch][row].
"""

from __future__ import annotations

from typing import Any

from equivtests.cases.case import Case, Model, Optimizer, Windows
from equivtests.cases.grid import SGD, longest
from equivtests.cases.layout import layout_of


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
SPLIT_TWO_HEADS = split_situation("split-two-heads", "cp2", Model("gpt", depth=1, features=("extra_head",)), ONE_DATA_RANK)
SPLIT_Z_LOSS = split_situation("split-z-loss", "cp2", Model("gpt", depth=1, features=("z_loss",)), ONE_DATA_RANK)
SPLIT_STAGES = split_situation("split-stages", "cp2-pp2", Model("gpt", depth=2), ONE_DATA_RANK)
SPLIT_HEADS_TOO = split_situation("split-heads-too", "cp2-tp2", Model("gpt", depth=1, features=("qk_norm",)), ONE_DATA_RANK)

# ---------------------------------------------------------------------------------------------- dropout on tensor ranks

SPREAD_DROPOUT = split_situation("spread-dropout", "tp2", Model("gpt", depth=1, features=("dropout",)), ONE_DATA_RANK)
SPREAD_DROPOUT_DATA = split_situation(
    "spread-dropout-data", "dp2-tp2", Model("gpt", depth=1, features=("dropout",)), TWO_DATA_RANKS
)
