"""Explaining the first difference of a run. Everything here is computed from the record, nothing guessed from names."""

from __future__ import annotations

import dataclasses
import itertools
import math
import typing
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from equivtests.cases.case import Semantics
from equivtests.cases.meaning import MEANING
from equivtests.cases.staleness import SCHEME_MEANING, Staleness
from equivtests.explain.arrivals import (
    applied_otherwise,
    arrived,
    dropped_counted,
    of_another_version,
    rate_of_late,
)
from equivtests.explain.axes import (
    axes_that_differ,
    counted_along,
    counts_along,
    first_wrong_on_the_way_back,
    one_mask_for_all,
    reduction_missing,
    split_along,
    wrong_parts,
    wrong_positions,
)
from equivtests.explain.delayed import another_window
from equivtests.explain.factors import factor_on_gradients, factor_on_loss, factor_on_scalar, named_factor
from equivtests.explain.local import averaged_state, other_average, reduced_gradient
from equivtests.explain.microbatches import factors_of_microbatches, targets_of_another, wrong_stages
from equivtests.explain.parts import (
    Arrays,
    across_ranks,
    close,
    flat,
    hidden_mean,
    multiple,
    observed,
    of_rows,
    of_term,
    part,
)
from equivtests.judge.check import Check
from equivtests.judge.checks import applied_once, applied_under, truth_at
from equivtests.judge.feeds import fed
from equivtests.judge.local import averages
from equivtests.judge.truth import seen_by
from equivtests.judge.view import View
from equivtests.reference import update as one
from equivtests.reference.forward import Weights
from equivtests.reference.rows import rows_of, token_coefficients
from equivtests.reference.versions import RULES, made_before

Lines = Iterator[str]

TERMS = {
    "extra": "the second head's loss",
    "z": "the z-loss",
    "balance": "the balance loss of the router",
    "pairs": "the loss over pairs",
}
SPANS = {
    "window": "divided by the valid tokens of the window",
    "samples": "divided by the rows of the window",
    "microbatch": "divided by the tokens of each micro-batch over all ranks, then averaged",
    "rank": "divided by each rank's own tokens, then averaged",
    "rank-microbatch": "divided by the own tokens of each micro-batch of each rank, then averaged",
}
FLOAT16_MAX = 65504.0


def diagnose(view: View, check: Check) -> list[str]:
    """Lines that explain a failed check: what ranks hold, a simple factor, another semantics."""
    apart = "disagree" in check.detail
    table = APART if apart else TOGETHER
    tried = (*((axes_that_differ,) if apart else ()), *table.get(check.quantity, ()))
    return [line for explanation in (*tried, split_along) for line in explanation(view, check)]


# ---------------------------------------------------------------------------------------------- samples and counts


def fed_by_ranks(view: View, check: Check) -> Lines:
    """Did ranks feed the same samples, or was a remainder dropped?"""
    shown = fed(view.case, view.observations("inputs", check.update)).samples(view.case.model)
    wanted = set(rows_of(view.case, check.update).ids.tolist())
    ranks = Counter(i for samples in shown.values() for i in samples)
    shared = sorted(i for i, n in ranks.items() if n > 1)
    if len(shown) > 1 and shown.get(0) and all(samples == shown[0] for samples in shown.values()):
        yield "every rank fed the same samples: they are not split over ranks"
    elif shared:
        yield f"samples {shared} were fed by more than one rank: the ranks' slices overlap"
    missing = wanted - set(ranks)
    if missing and not shared and set(ranks) <= wanted:
        yield f"{len(missing)} of {len(wanted)} samples of the window were dropped"


def counted_by_ranks(view: View, check: Check) -> Lines:
    """Did every rank count its own tokens only?"""
    shown = {o.rank: int(o.array) for o in view.observations("tokens", check.update)}
    own = [sum(n for micro in rank for n in micro) for rank in view.case.windows[check.update]]
    if shown and all(count == own[rank] for rank, count in shown.items()):
        yield "each rank counted its own tokens: their sum is right, the reduction over ranks is missing"
    elif len(set(shown.values())) == 1:
        yield from factor_on_scalar(view, check)


def steps_made(view: View, check: Check) -> Lines:
    """Did the optimizer step more than once in this window?"""
    before, after = (view.whole("step", "step", update) for update in (check.update, check.update + 1))
    made = 1 if before is None or after is None else int(after.values) - int(before.values)
    if made > 1:
        name = named_factor(view.case, check.update, made)
        yield f"the optimizer made {made}{name} steps in this window instead of 1"


# ---------------------------------------------------------------------------------------------- ranks that disagree


def copies_of(view: View, kind: str, name: str, update: int) -> dict[int, np.ndarray]:
    """Whole copies of a tensor by rank."""
    shown = view.parts.get((kind, update), {}).get(name, [])
    return {o.rank: o.values().astype(np.float64) for o in shown if o.place.size == math.prod(o.place.shape)}


def not_reduced(view: View, check: Check) -> Lines:
    """Where gradients differ: is their sum or mean right, does every rank hold its own part?"""
    truth = truth_at(view, check.update).values[check.name].numpy()
    copies = copies_of(view, "gradient", check.name, check.update)
    if len(copies) < 2 or view.case.layout.splits:
        return
    stacked = np.stack([copies[rank] for rank in sorted(copies)])
    if close(stacked.mean(axis=0), truth, view):
        yield "the ranks' mean is right: the reduction is missing"
    elif close(stacked.sum(axis=0), truth, view):
        yield "the ranks' sum is right: the reduction is missing"
    lines = list(own_parts(view, check, copies))
    yield from lines or partly_reduced(view, check, copies)


def own_parts(view: View, check: Check, copies: dict[int, np.ndarray]) -> Lines:
    """Ranks that hold a multiple of their own part; ranks without any part say nothing."""
    rows, world = rows_of(view.case, check.update), view.case.layout.dp
    holders: dict[str, list[int]] = {}
    for rank, copy in sorted(copies.items()):
        mine = of_rows(view, check.update, rows.rank == rank)[check.name] / world
        factor = multiple(view, copy.reshape(-1), mine.reshape(-1), float(np.linalg.norm(copy)))
        name = named_factor(view.case, check.update, factor).removeprefix(" = ") if factor else ""
        if name:
            holders.setdefault(f"{name} times", []).append(rank)
        elif factor and abs(factor - 1) < 1e-3:
            holders.setdefault("just", []).append(rank)
    for times, ranks in holders.items():
        yield f"ranks {ranks} hold {times} their own part of the gradient: it was not reduced on them"


def partly_reduced(view: View, check: Check, copies: dict[int, np.ndarray]) -> Lines:
    """Which micro-batches were reduced, if the others are each rank's own."""
    rows, world = rows_of(view.case, check.update), view.case.layout.dp
    numbers = sorted(set(rows.micro.tolist()))
    if not 1 < len(numbers) <= 8:
        return
    fed = [(rank, k) for rank in copies for k in numbers]
    own = {(r, k): of_rows(view, check.update, (rows.rank == r) & (rows.micro == k))[check.name] for r, k in fed}
    mean = {k: sum(own[r, k] for r in copies) / world for k in numbers}
    for size in range(1, len(numbers)):
        for reduced in itertools.combinations(numbers, size):
            expected = {r: sum(mean[k] if k in reduced else own[r, k] for k in numbers) for r in copies}
            if all(close(value, np.asarray(expected[rank]), view) for rank, value in copies.items()):
                rest = [k for k in numbers if k not in reduced]
                yield f"micro-batches {list(reduced)} were reduced over ranks, micro-batches {rest} were not"
                return


def weights_kept(view: View, check: Check) -> Lines:
    """Ranks whose weights did not move while others' did."""
    before, after = (copies_of(view, "weight", check.name, update) for update in (check.update, check.update + 1))
    kept = sorted(rank for rank, value in after.items() if rank in before and np.array_equal(before[rank], value))
    if kept and len(kept) < len(after):
        yield f"ranks {kept} kept the weights they had, the others moved"


def statistics_of(view: View, check: Check) -> Lines:
    """Whose rows a running mean follows."""
    before = view.whole("buffer", check.name, check.update)
    rows = rows_of(view.case, check.update)
    if before is None:
        return
    start = before.values.astype(np.float64)
    means = {r: hidden_mean(view, check.update, rows, rows.rank == r) for r in range(view.case.layout.dp)}
    alone = {r: start + 0.25 * (mean - start) for r, mean in means.items() if mean is not None}
    copies = copies_of(view, "buffer", check.name, check.update + 1)
    if len(copies) > 1 and all(r in alone and close(value, alone[r], view) for r, value in copies.items()):
        yield "every rank's value follows its own rows: it was not reduced over ranks"
    for rank, value in alone.items():
        if copies and all(close(copy, value, view) for copy in copies.values()):
            yield f"every rank's value follows the rows of rank {rank} alone"


# ---------------------------------------------------------------------------------------------- one loss term


def one_term(view: View, check: Check) -> Lines:
    """Is all right but one term of the loss, which has another denominator or a factor?"""
    shown = observed(view, check.update)
    truth = {n: g.numpy() for n, g in truth_at(view, check.update).values.items()}
    names = [n for n in truth if n in shown]
    everything, expected = flat(shown, names), flat(truth, names)
    for term in terms_of(view):
        rest = everything - expected + flat(of_term(view, check.update, term), names)
        found = []
        for span, arrays in spans_of(view, check.update, term):
            factor = multiple(view, rest, flat(arrays, names), float(np.linalg.norm(everything)))
            if factor is not None and factor > 0:
                named = bool(named_factor(view.case, check.update, factor))
                found.append((not named and abs(factor - 1) > 1e-3, abs(math.log(factor)), factor, span))
        for _, distance, factor, span in sorted(found)[:1]:
            name = named_factor(view.case, check.update, factor)
            words = [f"it is {SPANS[span]}"] if span else []
            words += [f"it counts {factor:.6g}{name} times"] if distance > 1e-3 else []
            yield f"all is right but {TERMS[term]}: {', and '.join(words)}"


def terms_of(view: View) -> list[str]:
    """Loss terms of the case beside the main one."""
    features = {"extra": "extra_head", "z": "z_loss", "balance": "balance", "pairs": "pairs"}
    return [term for term, feature in features.items() if view.case.model.has(feature)]


def spans_of(view: View, update: int, term: str) -> Iterator[tuple[str, Arrays]]:
    """(span, gradients) of one term under every denominator; pairs have one only ("")."""
    if term == "pairs":
        yield "", of_term(view, update, term)
        return
    rows = rows_of(view.case, update)
    for span in SPANS:
        factors = np.full(len(rows), 1 / len(rows)) if span == "samples" else token_coefficients(rows, span)
        yield span, part(view, update, factors, factors, term)


def missing_cross_terms(view: View, check: Check) -> Lines:
    """Is some of the gradient between samples of different ranks missing?"""
    if not view.case.model.has("pairs"):
        return
    shown = observed(view, check.update)
    truth = {n: g.numpy() for n, g in truth_at(view, check.update).values.items()}
    names = [n for n in truth if n in shown]
    difference = flat(truth, names) - flat(shown, names)
    across = flat(across_ranks(view, check.update), names)
    missing = multiple(view, difference, across, float(np.linalg.norm(flat(truth, names))))
    if missing is not None:
        yield f"{missing:.6g} of the gradient between samples on different ranks is missing, all else is right"


# ---------------------------------------------------------------------------------------------- the size of an error


def not_finite(view: View, check: Check) -> Lines:
    """Could the sum over ranks overflow in half precision?"""
    whole = view.whole("gradient", check.name, check.update)
    truth = truth_at(view, check.update).values.get(check.name)
    if whole is None or truth is None or np.isfinite(whole.values).all():
        return
    total = view.case.layout.dp * float(truth.abs().max())
    yield f"{int((~np.isfinite(whole.values)).sum())} of {whole.values.size} elements are not finite"
    if view.case.precision.reduce == "float16" and total > FLOAT16_MAX >= total / view.case.layout.dp:
        yield f"the sum over ranks, W times the gradient, is {total:.6g}: more than float16 holds ({FLOAT16_MAX:g})"


def like_a_rounding(view: View, check: Check) -> Lines:
    """Is the error that of a lower precision than the case's?"""
    shown = observed(view, check.update).get(check.name)
    truth = truth_at(view, check.update).values.get(check.name)
    if shown is None or truth is None or shown.shape != tuple(truth.shape) or not np.isfinite(shown).all():
        return
    size = float(truth.norm())
    error = float(np.linalg.norm(shown - truth.numpy())) / size if size else 0.0
    for dtype, least, most in (("float16", 2.0**-14, 2.0**-10), ("bfloat16", 2.0**-10, 2.0**-7)):
        if least < error <= most:
            yield f"the relative error is {error:.2g}: the size of a rounding to {dtype}"


# ---------------------------------------------------------------------------------------------- semantics


def alternatives(semantics: Semantics, fields: tuple[str, ...]) -> Iterator[tuple[str, str, Semantics]]:
    """Every semantics that differs in one of these decisions."""
    hints = typing.get_type_hints(Semantics)
    for field in fields:
        for value in typing.get_args(hints[field]):
            if value != getattr(semantics, field) and value != "local":
                yield field, value, dataclasses.replace(semantics, **{field: value})


def other_semantics(view: View, check: Check) -> Lines:
    """The single decisions under which the observed gradients would be right."""
    shown = observed(view, check.update)
    if not shown or not view.names("weight", check.update):
        return
    weights = {n: w.double() for n, w in seen_by(view, check.update).forward.items()}
    draw, truth = made_before(view.case, check.update), truth_at(view, check.update).values
    for field, value, semantics in alternatives(
        view.expectation.semantics, ("denominator", "auxiliary", "reduction", "accumulation")
    ):
        found = one.gradients(view.case, semantics, check.update, draw, weights).values
        if same(found, truth, view):
            continue  # this case cannot tell the two apart
        if same_as_shown(found, shown, view):
            yield f"the gradients are those of `{field} = {value}`: {MEANING[field, value]}"


def other_versions(view: View, check: Check) -> Lines:
    """The schemes of weight versions under which the observed gradients would be right."""
    rule, shown = view.expectation.semantics.staleness, observed(view, check.update)
    if not view.case.asynchronous and rule == Staleness():
        return
    for name in (name for name in RULES if name != rule.versions):
        other = dataclasses.replace(rule, versions=name, table=(), arrivals=())
        used, draw = seen_by(view, check.update, other), made_before(view.case, check.update)
        found = one.gradients(
            view.case, view.expectation.semantics, check.update, draw, used.forward, backward=used.backward
        ).values
        if not same(found, truth_at(view, check.update).values, view) and same_as_shown(found, shown, view):
            yield f"the gradients are those of `versions = {name}`: {SCHEME_MEANING[name]}"


def same_as_shown(found: Weights, shown: dict[str, np.ndarray], view: View) -> bool:
    return set(found) == set(shown) and all(close(shown[n], g.numpy(), view) for n, g in found.items())


def same(found: Weights, truth: Weights, view: View) -> bool:
    """Whether two sets of gradients are equal up to rounding."""
    return set(found) == set(truth) and all(close(found[n].numpy(), g.numpy(), view) for n, g in truth.items())


def other_rule(view: View, check: Check) -> Lines:
    """Another decay rule, no clipping, or a copy in another precision, under which the observed weights would be right."""
    if averages(view, check.update):
        return
    shown = {n: w.double() for n, w in view.tensors("weight", check.update + 1).items()}
    declared, _ = applied_once(view, check.update)
    for field, value, semantics in alternatives(view.expectation.semantics, ("decay", "clip_scope", "master")):
        found, _ = applied_under(view, check.update, semantics)
        differs = any(not w.equal(declared[n]) for n, w in found.items())
        if differs and all(n in shown and close(shown[n].numpy(), w.double().numpy(), view) for n, w in found.items()):
            yield f"the weights are those of `{field} = {value}`: {MEANING[field, value]}"
    before = view.tensors("weight", check.update)
    if all(n in shown and shown[n].equal(w.double()) for n, w in before.items()):
        yield "no weight moved at all: the optimizer step is missing"


Explanation = Callable[[View, Check], Lines]

TOGETHER: dict[str, tuple[Explanation, ...]] = {
    "step": (dropped_counted, factor_on_scalar),
    "arrivals": (arrived,),
    "loss scale": (factor_on_scalar,),
    "samples": (fed_by_ranks,),
    "tokens": (counted_by_ranks, counts_along),
    "dropout mask": (one_mask_for_all,),
    "output": (wrong_parts, wrong_positions),
    "loss": (factor_on_loss, other_versions, of_another_version, steps_made, other_semantics, one_term, targets_of_another),
    "gradient": (
        wrong_parts, factor_on_gradients, reduced_gradient, other_versions, of_another_version, steps_made,
        other_semantics, one_term, missing_cross_terms, not_finite, like_a_rounding, factors_of_microbatches, wrong_stages,
        first_wrong_on_the_way_back,
    ),
    "initial weights": (wrong_parts,),
    "norm": (factor_on_scalar, counted_along),
    "clip coefficient": (factor_on_scalar,),
    "learning rate": (rate_of_late, factor_on_scalar),
    "weight update": (wrong_parts, other_average, another_window, applied_otherwise, other_rule),
    "optimizer state": (averaged_state,),
    "buffer": (statistics_of,),
}  # fmt: skip
"""What to try on a quantity that is wrong, and alike on all ranks."""

APART: dict[str, tuple[Explanation, ...]] = {
    "gradient": (reduction_missing, not_reduced),
    "weight update": (weights_kept,),
    "buffer": (statistics_of,),
}
"""What to try where ranks disagree."""
