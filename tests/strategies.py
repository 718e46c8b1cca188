"""Hypothesis strategies for cases: all families, features, optimizers and precisions, in irregular windows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st

from equivtests.cases.case import (
    DOUBLE,
    FEATURES,
    Case,
    Layout,
    LossScale,
    Model,
    Optimizer,
    Precision,
    Semantics,
    Windows,
)
from equivtests.cases.staleness import Staleness
from equivtests.cases.windows import window_of
from equivtests.reference.versions import RULES

FAMILIES = ("chain", "linear", "mlp", "gated_mlp", "gpt", "moe")
SINGLE = Precision()
BFLOAT16 = Precision("float32", "bfloat16", "float32")
FLOAT16_WIRE = Precision("float32", "float32", "float16")
SCALED = Precision(loss_scale=LossScale())
PRECISIONS = (SINGLE, DOUBLE, BFLOAT16, FLOAT16_WIRE, SCALED)
SIMPLE_OPTIMIZERS = (Optimizer(lr=0.5), Optimizer("momentum", lr=0.125, momentum=0.75, weight_decay=0.0625))


def features_of(family: str) -> list[str]:
    return sorted(feature for feature, families in FEATURES.items() if family in families)


@st.composite
def models(draw: st.DrawFn, families: Iterable[str] = FAMILIES, leave_out: Iterable[str] = ()) -> Model:
    """A tiny model of any family with any of its features."""
    family = draw(st.sampled_from(tuple(families)))
    usable = [f for f in features_of(family) if f not in leave_out]
    features = draw(st.sets(st.sampled_from(usable), max_size=4)) if usable else set()
    if family in ("gpt", "moe"):
        return draw(decoders(family, features))
    return Model(
        family,
        width=draw(st.integers(1, 7)),
        depth=draw(st.integers(1 + (family == "mlp" and "frozen" in features), 3)),
        inputs=draw(st.integers(2, 5)),
        outputs=draw(st.integers(1, 3)),
        length=draw(st.integers(8, 9)),
        features=tuple(sorted(features)),
    )


@st.composite
def decoders(draw: st.DrawFn, family: Any, features: set[str]) -> Model:
    """A gpt or moe with these features: any number of heads that share keys and values, any number of experts."""
    heads = draw(st.integers(1, 4))
    kv_heads = [0, 1] if "shared_kv" in features else [0, *(n for n in range(1, heads + 1) if heads % n == 0)]
    # a norm over the two features of a narrow head knows signs only
    size = draw(st.integers(2 + (heads == 1 or "qk_norm" in features), 4))
    experts = draw(st.integers(2, 4)) if family == "moe" else 0
    return Model(
        family,
        width=heads * size,
        depth=draw(st.integers(1, 2)),
        vocabulary=draw(st.integers(13, 15)),
        length=draw(st.integers(4 if "packed" in features else 3, 5)),
        features=tuple(sorted(features)),
        heads=heads,
        kv_heads=draw(st.sampled_from(kv_heads)),
        experts=experts,
        top_k=draw(st.integers(1, max(1, experts))),
        capacity=draw(st.integers(0, 3)) if experts else 0,
    )


@st.composite
def windows(draw: st.DrawFn, ranks: int, length: int, updates: int, used: bool = False) -> Windows:
    """Token counts with empty rows, empty micro-batches, ranks without rows and unequal numbers of micro-batches.

    used: every window has a valid token.
    """
    rows = st.lists(st.integers(0, length), max_size=2).map(tuple)
    rank = st.lists(rows, max_size=2).map(tuple)
    window = st.lists(rank, min_size=ranks, max_size=ranks).map(tuple)
    if used:
        window = window.map(lambda w: w if any(n for r in w for m in r for n in m) else (((length, 1),), *w[1:]))
    return tuple(draw(st.lists(window, min_size=updates, max_size=updates)))


@st.composite
def optimizers(draw: st.DrawFn, magnitude: float = 1.0) -> Optimizer:
    """`magnitude`: of the gradients, which learning rate and clip threshold follow."""
    name = draw(st.sampled_from(("sgd", "momentum", "adam", "adamw")))
    clip = draw(st.sampled_from((None, 2.0**-8, 0.25, 1e6)))
    adaptive = name in ("adam", "adamw")
    return Optimizer(
        name,
        lr=2.0**-6 if adaptive else draw(st.sampled_from((0.125, 0.5))) / magnitude,
        momentum=draw(st.sampled_from((0.5, 0.75))) if name == "momentum" else 0.0,
        eps=2.0**-12,
        weight_decay=draw(st.sampled_from((0.0, 0.0625, 0.5))) * (1.0 if adaptive else magnitude),
        decay_vectors=draw(st.booleans()),
        schedule=draw(st.sampled_from(((1.0,), (0.5, 1.0, 0.25)))),
        clip=None if clip is None else clip * magnitude,
        clip_norm=draw(st.sampled_from(("2", "inf"))),
    )


@st.composite
def cases(
    draw: st.DrawFn,
    families: Iterable[str] = FAMILIES,
    leave_out: Iterable[str] = (),
    precisions: Iterable[Precision] = PRECISIONS,
    worlds: Iterable[int] = (1, 2, 3, 4),
    updates: int = 3,
    used: bool = False,
    lengths: bool = False,
) -> Case:
    """Any small case; `leave_out`: features that are not drawn, `used`: no window is empty.

    lengths: micro-batches of a gpt may have sequence lengths of their own.
    """
    model = draw(models(families, leave_out))
    ranks = draw(st.sampled_from(tuple(worlds)))
    drawn = draw(windows(ranks, model.length, draw(st.integers(1, updates)), used))
    magnitude = draw(st.sampled_from((1.0, 2.0**-20)))
    several = draw(st.lists(st.integers(2, model.length), max_size=3)) if lengths and model.family == "gpt" else []
    drawn = shortened(drawn, several) if several else drawn
    divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
    return Case(
        "drawn",
        model,
        drawn,
        Layout(ranks, draw(st.sampled_from(divisors))),
        draw(optimizers(magnitude)),
        draw(st.sampled_from(tuple(precisions))),
        accumulation=max(1, *(len(rank) for window in drawn for rank in window)),
        magnitude=magnitude,
        seed=draw(st.integers(0, 50)),
        lengths=tuple(several),
    )


def shortened(drawn: Windows, lengths: list[int]) -> Windows:
    """Counts of valid tokens that fit the length of their micro-batch."""
    return tuple(
        tuple(
            tuple(tuple(min(n, lengths[k % len(lengths)]) for n in rows) for k, rows in enumerate(micros))
            for micros in window
        )
        for window in drawn
    )


@st.composite
def semantics(draw: st.DrawFn) -> Semantics:
    """Any contract."""
    fields = {f.name: f.type for f in dataclasses.fields(Semantics)}
    values = {
        "denominator": ("window", "microbatch", "rank", "rank-microbatch", "rows"),
        "auxiliary": ("window", "microbatch", "rank", "rank-microbatch", "rows"),
        "reduction": ("mean", "sum", "local"),
        "accumulation": ("all", "last"),
        "clip_scope": ("global", "none"),
        "decay": ("declared", "all", "none"),
        "master": ("none", "float32"),
    }
    assert {*values, "staleness"} == set(fields)
    chosen = {name: draw(st.sampled_from(choices)) for name, choices in values.items()}
    return Semantics(**chosen, staleness=draw(staleness()))


def staleness() -> st.SearchStrategy[Staleness]:
    """Any rule that does not name the windows of a case."""
    few = st.integers(0, 3)
    drains = st.lists(st.integers(0, 1), max_size=2).map(tuple)
    schemes = st.sampled_from(sorted(RULES))
    return st.builds(Staleness, versions=schemes, drains=drains, delay=few) | st.builds(Staleness, period=few)


def samples_of(case: Case) -> list[int]:
    """Ids of all samples of a case, in reading order."""
    feeds = [window_of(case, update, rank) for update in range(case.updates) for rank in range(case.layout.dp)]
    return [int(i) for window in feeds for micro in window.microbatches for i in micro.ids]
