"""Plain words for the rules of an update."""

from __future__ import annotations

from dataclasses import fields

from equivtests.cases.case import Semantics

MEANING = {
    ("denominator", "window"): "the loss is divided by the valid tokens of the whole window",
    ("denominator", "microbatch"): "each micro-batch is divided by its own tokens over all ranks, then averaged",
    ("denominator", "rank"): "each rank divides by its own valid tokens, then ranks are averaged",
    ("denominator", "rank-microbatch"): "a mean of means: each micro-batch of each rank is divided by its own tokens",
    ("denominator", "rows"): "means of micro-batches are weighted by their rows instead of their tokens",
    ("auxiliary", "window"): "the auxiliary loss is averaged over the rows of the window",
    ("auxiliary", "microbatch"): "the auxiliary loss is divided by each micro-batch's tokens over all ranks",
    ("auxiliary", "rank"): "the auxiliary loss is divided by each rank's own tokens",
    ("auxiliary", "rank-microbatch"): "the auxiliary loss is divided by each micro-batch's own tokens",
    ("auxiliary", "rows"): "the auxiliary loss is weighted by rows of micro-batches",
    ("reduction", "sum"): "gradients are added over ranks without the division by W",
    ("reduction", "mean"): "gradients are averaged over ranks",
    ("accumulation", "last"): "only the last micro-batch counts; earlier ones are overwritten",
    ("accumulation", "all"): "all micro-batches count",
    ("clip_scope", "global"): "gradients are clipped by the norm of the whole model",
    ("clip_scope", "none"): "gradients are not clipped although the case asks for it",
    ("decay", "declared"): "parameters decay as the case says",
    ("decay", "all"): "every parameter decays, vectors too",
    ("decay", "none"): "no parameter decays",
    ("master", "none"): "the optimizer steps the weights themselves",
    ("master", "float32"): "the optimizer steps a float32 copy of the weights",
}
"""Plain words for the values of Semantics fields."""


def in_words(semantics: Semantics) -> list[str]:
    """What differs from one device's rules, each as `field = value: plain words`."""
    plain = [
        f"{f.name} = {value}: {MEANING[f.name, value]}"
        for f in fields(semantics)
        if f.name != "staleness" and (value := getattr(semantics, f.name)) != f.default
    ]
    return [*plain, *semantics.staleness.in_words()]
