"""The cases that mutants are planted on: each a small situation in which the mistake shows.

Windows are valid tokens by [update][rank][micro-batch][row].
"""

from __future__ import annotations

from typing import Any

from equivtests.cases.case import Case, Layout, LossScale, Model, Optimizer, Precision, Windows
from equivtests.cases.grid import GPT, REAL_LINEAR, SGD, longest


def situation(name: str, model: Model, windows: Windows, optimizer: Optimizer = SGD, **options: Any) -> Case:
    """A case with as many ranks, and as many micro-batches, as its windows have."""
    replicate = options.pop("replicate", 1)
    layout = Layout(len(windows[0]), replicate)
    return Case(name, model, windows, layout, optimizer, accumulation=longest(windows), **options)


# ---------------------------------------------------------------------------------------------- loss, data, reduction

ONE_RANK: Windows = ((((8, 3), (1,), (5, 2)),), (((2,), (7, 7), (4,)),))
SPREAD: Windows = ((((8,),), ((3,),), ((5,),), ((1,),)), (((2,),), ((7,),), ((6,),), ((4,),)))
THREES: Windows = ((((8, 3), (1,), (6,)), ((5,), (7, 2), (4, 4))), (((2,), (8,), (3,)), ((7, 7), (3,), (1,))))
EVEN: Windows = ((((4,), (4,)), ((4,), (4,)), ((4,), (4,)), ((4,), (4,))),)
TAIL: Windows = (*THREES, (((3, 8), (5,)), ((6,), (2,))))
ROWS: Windows = ((((8, 1, 1), (6,)), ((5, 5), (7, 2, 2))), (((2,), (8, 8)), ((7, 1), (3,))))
MESH: Windows = ((((8, 3), (1,), (2,)), ((5,), (7, 2), (4,)), ((3,), (4,), (5, 1)), ((6,), (8, 8), (7,))),)

TINY_MLP = Model("mlp", width=6, features=("bias",))
AUXILIARY = Model("gpt", depth=1, features=("bias", "z_loss"))
TWO_HEADS = Model("gpt", depth=1, features=("bias", "extra_head"))

ACCUMULATED = situation("one-rank-accumulated", REAL_LINEAR, ONE_RANK)
SPREAD_OVER_RANKS = situation("spread-over-ranks", GPT, SPREAD)
TWO_BY_THREE = situation("two-by-three", REAL_LINEAR, THREES)
TWO_BY_THREE_MLP = situation("two-by-three-mlp", TINY_MLP, THREES)
TWO_BY_THREE_GPT = situation("two-by-three-gpt", GPT, THREES)
EVEN_TOKENS = situation("even-tokens", REAL_LINEAR, EVEN)
SHORT_TAIL = situation("short-tail", TINY_MLP, TAIL)
UNEQUAL_ROWS = situation("unequal-rows", REAL_LINEAR, ROWS)
ODD_ROWS = situation("odd-rows", TINY_MLP, ((((8, 1), ()), ((5, 2), (7,))), (((2, 3), (8,)), ((7,), (3, 6)))))
TWO_BY_TWO_MESH = situation("two-by-two-mesh", TINY_MLP, MESH, replicate=2)
Z_LOSS = situation("z-loss", AUXILIARY, THREES)
SECOND_HEAD = situation("second-head", TWO_HEADS, THREES)
BALANCED = situation("balanced", Model("moe", depth=1, experts=4, features=("balance",)), THREES)

# ---------------------------------------------------------------------------------------------- synchronization

FOURS: Windows = ((((8, 3),), ((5,),), ((1, 1),), ((6,),)), (((2,),), ((7, 7),), ((3,),), ((4, 8),)))
ONE_IDLE: Windows = ((((8,),), ((0,),), ((5,),), ((3, 6),)), (((2,),), ((7,),), ((6,),), ((0,),)))

EARLY_BRANCH = situation("early-branch", Model("mlp", width=6, features=("bias", "conditional")), THREES)
UNUSED_ONCE = situation("unused-once", Model("mlp", width=6, features=("bias", "unused")), FOURS[:1])
RUNNING = situation("running", Model("mlp", width=6, features=("running",)), FOURS)
IDLE_RANK = situation("idle-rank", TINY_MLP, ONE_IDLE)
BATCH_NORM = situation("batch-norm", Model("mlp", width=6, features=("batch_norm", "bias")), FOURS)
PAIRS = situation("pairs", Model("mlp", width=6, features=("bias", "pairs")), FOURS)
LARGE_GRADIENTS = situation(
    "large-gradients", REAL_LINEAR, FOURS, Optimizer("sgd", lr=2.0**-18),
    precision=Precision("float32", "float32", "float16"), magnitude=2.0**15,
)  # fmt: skip


# ---------------------------------------------------------------------------------------------- norms, shards, restore

CLIP = Optimizer("sgd", lr=0.5, clip=2.0**-4)
ADAM_PLAIN = Optimizer("adam", lr=2.0**-6, eps=2.0**-12)
ADAM_SCHEDULE = Optimizer("adam", lr=2.0**-6, eps=2.0**-12, schedule=(0.25, 0.5, 1.0, 0.75))
NO_VECTOR_DECAY = Optimizer("adamw", lr=2.0**-6, weight_decay=0.5, decay_vectors=False, eps=2.0**-12)
SCALED = Precision(loss_scale=LossScale())

PAIR: Windows = ((((8, 3), (1,)), ((5,), (7, 2))), (((2,), (8,)), ((7, 7), (3,))))
ONE_PASS: Windows = (*PAIR, (((3, 8),), ((6,),)))
HALVES: Windows = (*THREES, (((3, 8), (5,), (2,)), ((6,), (2,), (7, 1))), (((4,), (8, 5), (6,)), ((1, 7), (3,), (8,))))
FOUR_RANKS: Windows = SPREAD + ((((3, 8),), ((6,),), ((1,),), ((8, 5),)),)
QK_NORM = Model("gpt", depth=1, features=("bias", "qk_norm"))
SQUARE = Model("mlp", width=5, inputs=5, outputs=5)

CLIPPED_SHARDS = situation("clipped-shards", TINY_MLP, PAIR, CLIP)
CLIPPED_COPIES = situation("clipped-copies", TINY_MLP, MESH, CLIP, replicate=2)
CLIPPED_SCALED = situation("clipped-scaled", TINY_MLP, PAIR, CLIP, precision=SCALED)
SHARDS = situation("shards", TINY_MLP, PAIR)
SHARDS_ADAM = situation("shards-adam", TINY_MLP, PAIR, ADAM_PLAIN)
COPIES_WITHOUT_SHARDS = situation("copies-without-shards", TINY_MLP, THREES, replicate=2)
LAST_IN_ONE_PASS = situation("last-in-one-pass", TINY_MLP, ONE_PASS)
OUT_OF_ORDER = situation("out-of-order", QK_NORM, PAIR)
VECTORS_WITHOUT_DECAY = situation("vectors-without-decay", GPT, PAIR, NO_VECTOR_DECAY)
EMPTY_SHARD = situation("empty-shard", Model("chain", depth=3), SPREAD, ADAM_PLAIN)
MIDDLE = situation("middle", TINY_MLP, HALVES, ADAM_SCHEDULE)
MIDDLE_SGD = situation("middle-sgd", TINY_MLP, HALVES)
MIDDLE_SQUARE = situation("middle-square", SQUARE, HALVES, ADAM_PLAIN)
MIDDLE_DROPOUT = situation("middle-dropout", Model("gpt", depth=1, features=("dropout",)), HALVES)
MIDDLE_SCALED = situation("middle-scaled", TINY_MLP, HALVES, precision=SCALED)
MIDDLE_RUNNING = situation("middle-running", Model("mlp", features=("running",)), HALVES)
MIDDLE_UNEVEN = situation("middle-uneven", TINY_MLP, FOUR_RANKS, ADAM_PLAIN)
GROWING_SCALE = situation("growing-scale", TINY_MLP, ONE_PASS, precision=SCALED)
CLIPPED_THREES = situation("clipped-threes", TINY_MLP, THREES, CLIP)
FOUR_RANKS_MLP = situation("four-ranks", TINY_MLP, MESH)

LOOSE = situation("loose-clip", TINY_MLP, PAIR, Optimizer("sgd", lr=0.5, clip=0.5))
UNUSED_IN_BETWEEN: Windows = (PAIR[0], (((), (8,)), ((), (3,))), PAIR[1])
BRANCH_UNUSED = situation("branch-unused-once", Model("mlp", features=("conditional",)), UNUSED_IN_BETWEEN, ADAM_PLAIN)
DROPOUT = situation("dropout", Model("gpt", depth=1, features=("dropout",)), PAIR)
TIED = situation("tied", Model("gpt", depth=1, vocabulary=13, features=("bias", "tied")), PAIR)
