"""Explaining the first difference of a run. Everything here is computed from the record; nothing is guessed from names."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterator

import numpy as np

from equivtests.cases.case import Case, Semantics
from equivtests.judge.check import Check
from equivtests.judge.checks import applied_under, truth_at
from equivtests.judge.view import View
from equivtests.reference import update as one
from equivtests.reference.expectation import smallest_unit

MEANING = {
    ("denominator", "window"): "the loss is divided by the valid tokens of the whole window",
    ("denominator", "microbatch"): "each micro-batch is divided by its own tokens over all ranks, then averaged",
    ("denominator", "rank"): "each rank divides by its own valid tokens, then ranks are averaged",
    ("denominator", "rank-microbatch"): "a mean of means: each micro-batch of each rank is divided by its own tokens",
    ("denominator", "rows"): "means of micro-batches are weighted by their rows instead of their tokens",
    ("auxiliary", "window"): "the auxiliary loss is divided by the valid tokens of the window instead of its rows",
    ("auxiliary", "microbatch"): "the auxiliary loss is divided by each micro-batch's tokens over all ranks",
    ("auxiliary", "rank"): "the auxiliary loss is divided by each rank's own tokens",
    ("auxiliary", "rank-microbatch"): "the auxiliary loss is divided by each micro-batch's own tokens",
    ("auxiliary", "rows"): "the auxiliary loss is weighted by rows of micro-batches",
    ("reduction", "sum"): "gradients are added over ranks without the division by W",
    ("reduction", "mean"): "gradients are averaged over ranks",
    ("accumulation", "last"): "only the last micro-batch counts; earlier ones are overwritten",
    ("accumulation", "all"): "all micro-batches count",
    ("clip_scope", "none"): "gradients are not clipped although the case asks for it",
    ("decay", "all"): "every parameter decays, vectors too",
    ("decay", "none"): "no parameter decays",
    ("empty_window", "step"): "an empty window makes an optimizer step",
}
"""Plain words for the values of Semantics fields."""


def diagnose(view: View, check: Check) -> list[str]:
    """Lines that explain a failed check: what ranks hold, a simple factor, another semantics."""
    lines = list(disagreement(view, check))
    if check.quantity in ("loss", "gradient"):
        lines += list(uniform_factor(view, check)) + list(other_semantics(view, check.update))
    if check.quantity == "weight update":
        lines += list(other_decay(view, check))
    if check.quantity in ("norm", "clip coefficient", "learning rate", "loss scale", "step"):
        lines += list(scalar_factor(view, check))
    return lines


# ---------------------------------------------------------------------------------------------- ranks


def disagreement(view: View, check: Check) -> Iterator[str]:
    """Where copies differ: is their sum or mean right, does every rank hold its own part?"""
    if check.quantity != "gradient" or "disagree" not in check.detail:
        return
    truth = truth_at(view, check.update).values[check.name].numpy()
    copies = copies_of(view, check.name, check.update)
    if len(copies) < 2:
        return
    stacked = np.stack([copies[rank] for rank in sorted(copies)])
    if close(stacked.mean(axis=0), truth, view):
        yield "the ranks' mean is right: the reduction is missing"
    elif close(stacked.sum(axis=0), truth, view):
        yield "the ranks' sum is right: the reduction is missing"
    own = [rank for rank, value in sorted(copies.items()) if close(value, local_part(view, check, rank), view)]
    if own:
        yield f"ranks {own} hold W times their own part of the gradient: it was not reduced on them"


def copies_of(view: View, name: str, update: int) -> dict[int, np.ndarray]:
    """Whole copies of a tensor by rank."""
    shown = view.parts.get(("gradient", update), {}).get(name, [])
    return {o.rank: o.values().astype(np.float64) for o in shown if o.place.size == math.prod(o.place.shape)}


def local_part(view: View, check: Check, rank: int) -> np.ndarray:
    found = gradients_under(view, check.update, view.expectation.semantics, rank).values.get(check.name)
    return np.zeros(()) if found is None else found.numpy()


def gradients_under(view: View, update: int, semantics: Semantics, rank: int | None = None) -> one.Gradients:
    weights = {n: w.double() for n, w in view.tensors("weight", update).items()}
    draw = view.expectation.steps[update].steps
    return one.gradients(view.case, semantics, update, draw, weights, only_rank=rank)


def close(value: np.ndarray, truth: np.ndarray, view: View) -> bool:
    """Equal up to rounding, with room for a few ill-conditioned elements."""
    if value.shape != truth.shape:
        return False
    norm = float(np.linalg.norm(truth))
    return bool(np.linalg.norm(value - truth) <= 64 * smallest_unit(view.case) * max(norm, 1e-30))


# ---------------------------------------------------------------------------------------------- factors


def factors(case: Case, update: int) -> dict[str, float]:
    """Numbers that a wrong factor is usually made of, by their name."""
    window, total = case.windows[update], case.tokens(update)
    short = max((len(rank) for rank in window), default=1) or 1
    scaling = case.precision.loss_scale
    base = {
        "W": case.layout.dp,
        "K": case.accumulation,
        "k (micro-batches of this window)": short,
        "T (valid tokens)": total,
        "R (replicas)": case.layout.replicate,
        "S (shards)": case.layout.shard,
        "W·K": case.layout.dp * case.accumulation,
        "√W": math.sqrt(case.layout.dp),
        "√R": math.sqrt(case.layout.replicate),
        "loss scale": scaling.initial if scaling else 1.0,
        "2": 2.0,
    }
    found = {name: float(value) for name, value in base.items() if value > 1}
    found |= {f"1/{name}": 1 / value for name, value in found.items()}
    if short < case.accumulation:
        found["k/K (short window)"] = short / case.accumulation
        found["K/k (short window)"] = case.accumulation / short
    return found | {"0": 0.0, "-1": -1.0}


def named_factor(case: Case, update: int, value: float, tolerance: float = 1e-3) -> str:
    """ " = W" and the like if the value is a simple factor of this case, else ""."""
    names = [n for n, f in factors(case, update).items() if abs(value - f) <= tolerance * max(abs(f), 1e-6)]
    return f" = {' = '.join(names)}" if names else ""


def uniform_factor(view: View, check: Check) -> Iterator[str]:
    """One factor on the loss, on all gradients, or on the tensor that failed."""
    truth = truth_at(view, check.update)
    if check.quantity == "loss":
        whole = view.whole("loss", "loss", check.update)
        if whole is not None and truth.loss:
            ratio = float(whole.values) / truth.loss
            yield f"observed / expected loss = {ratio:.6g}{named_factor(view.case, check.update, ratio)}"
        return
    shown = {n: w.numpy().astype(np.float64) for n, w in view.tensors("gradient", check.update).items()}
    expected = {n: g.numpy() for n, g in truth.values.items() if n in shown and shown[n].shape == tuple(g.shape)}
    everything = fit([shown[n] for n in expected], list(expected.values()), view)
    single = fit([shown[check.name]], [expected[check.name]], view) if check.name in expected else None
    for factor, what in ((everything, "every gradient"), (single, f"the gradient of {check.name}")):
        if factor is not None and abs(factor - 1) > 1e-6:
            yield f"{what} is {factor:.6g} times the expected one{named_factor(view.case, check.update, factor)}"
            return


def fit(observed: list[np.ndarray], expected: list[np.ndarray], view: View) -> float | None:
    """The factor f with observed = f · expected up to rounding, or None."""
    if not expected:
        return None
    o, e = (np.concatenate([x.reshape(-1) for x in xs]) for xs in (observed, expected))
    power = float(e @ e)
    if power == 0 or not np.isfinite(o).all():
        return None
    factor = float(o @ e) / power
    return factor if np.linalg.norm(o - factor * e) <= 256 * smallest_unit(view.case) * np.linalg.norm(o) + 1e-30 else None


def scalar_factor(view: View, check: Check) -> Iterator[str]:
    try:
        expected, observed = float(check.expected), float(check.observed)
    except ValueError:
        return
    if expected and math.isfinite(observed):
        ratio = observed / expected
        yield f"observed / expected = {ratio:.6g}{named_factor(view.case, check.update, ratio)}"


# ---------------------------------------------------------------------------------------------- semantics


def alternatives(semantics: Semantics) -> Iterator[tuple[str, str, Semantics]]:
    """Every semantics that differs in one decision."""
    hints = typing.get_type_hints(Semantics)
    for field in dataclasses.fields(Semantics):
        for value in typing.get_args(hints[field.name]):
            if value != getattr(semantics, field.name):
                yield field.name, value, dataclasses.replace(semantics, **{field.name: value})


def other_semantics(view: View, update: int) -> Iterator[str]:
    """The single decisions under which the observed gradients would be right."""
    shown = {n: w.numpy().astype(np.float64) for n, w in view.tensors("gradient", update).items()}
    if not shown or not view.names("weight", update):
        return
    for field, value, semantics in alternatives(view.expectation.semantics):
        if field not in ("denominator", "auxiliary", "reduction", "accumulation") or value == "local":
            continue
        found = gradients_under(view, update, semantics).values
        if set(found) == set(shown) and all(close(shown[n], g.numpy(), view) for n, g in found.items()):
            yield f"the gradients are those of `{field} = {value}`: {MEANING.get((field, value), '')}"


def other_decay(view: View, check: Check) -> Iterator[str]:
    """Another decay rule, or no clipping, under which the observed weights would be right."""
    shown = {n: w.numpy() for n, w in view.tensors("weight", check.update + 1).items()}
    for field, value, semantics in alternatives(view.expectation.semantics):
        if field not in ("decay", "clip_scope"):
            continue
        found, _ = applied_under(view, check.update, semantics)
        if all(n in shown and close(shown[n].astype(np.float64), w.double().numpy(), view) for n, w in found.items()):
            yield f"the weights are those of `{field} = {value}`: {MEANING.get((field, value), '')}"
    before = {n: w.numpy() for n, w in view.tensors("weight", check.update).items()}
    if all(np.array_equal(shown.get(n), w) for n, w in before.items()):
        yield "no weight moved at all: the optimizer step is missing"
