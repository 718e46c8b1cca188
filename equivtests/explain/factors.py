"""Simple factors: numbers that a wrong scale is usually made of, by name."""

from __future__ import annotations

import math
from collections.abc import Iterator

from equivtests.cases.case import Case
from equivtests.cases.layout import Layout
from equivtests.explain.parts import close, flat, multiple, observed
from equivtests.judge.check import Check
from equivtests.judge.checks import truth_at
from equivtests.judge.view import View


def factors(case: Case, update: int) -> dict[str, float]:
    """Numbers that say something about this case, and their inverses."""
    layout, short = case.layout, max((len(rank) for rank in case.windows[update]), default=1) or 1
    scaling = case.precision.loss_scale
    meshed = layout.replicate > 1
    base = {
        **degrees(layout),
        "K": case.accumulation,
        "k (micro-batches of this window)": short if short < case.accumulation else 1,
        "T (valid tokens)": case.tokens(update),
        "R (replicas)": layout.replicate,
        "S (shards)": layout.shard if meshed else 1,
        "W·K": layout.dp * case.accumulation if layout.dp > 1 and case.accumulation > 1 else 1,
        "W²": layout.dp**2,
        "loss scale": scaling.initial if scaling else 1,
    }
    found = {name: float(value) for name, value in base.items() if value > 1}
    found |= {f"1/{name}": 1 / value for name, value in found.items()}
    if short < case.accumulation:
        found["k/K (short window)"] = short / case.accumulation
        found["K/k (short window)"] = case.accumulation / short
    return found


def degrees(layout: Layout) -> dict[str, int]:
    """The numbers of ranks along the axes; W is over how many gradients are averaged."""
    if not layout.splits:
        return {"W": layout.dp}
    axes = {axis: layout.degree(axis) for axis in ("tp", "cp", "pp", "ep", "dp", "edp")}
    if layout.ep == 1:
        del axes["edp"]
    return axes | {"W": layout.dp * layout.cp, "world": layout.world}


def plain_factors(case: Case) -> dict[str, float]:
    """Numbers that are named only where no other name fits."""
    roots = {f"√{name}": math.sqrt(n) for name, n in degrees(case.layout).items()}
    base = {**roots, "√R": math.sqrt(case.layout.replicate), "2": 2.0}
    found = {name: value for name, value in base.items() if value > 1}
    return found | {f"1/{name}": 1 / value for name, value in found.items()} | {"0": 0.0, "-1": -1.0}


def named_factor(case: Case, update: int, value: float, tolerance: float = 1e-3) -> str:
    """ " = W" and the like if the value is a simple factor of this case, else ""."""

    def names(table: dict[str, float]) -> list[str]:
        return [n for n, f in table.items() if abs(value - f) <= tolerance * max(abs(f), 1e-6)]

    found = names(factors(case, update)) or names(plain_factors(case))
    return f" = {' = '.join(found)}" if found else ""


def factor_on_loss(view: View, check: Check) -> Iterator[str]:
    """Observed over expected loss."""
    whole, truth = view.whole("loss", "loss", check.update), truth_at(view, check.update).loss
    if whole is not None and truth:
        ratio = float(whole.values) / truth
        yield f"observed / expected loss = {ratio:.6g}{named_factor(view.case, check.update, ratio)}"


def factor_on_gradients(view: View, check: Check) -> Iterator[str]:
    """One factor on all gradients, or on the tensor that failed."""
    shown = observed(view, check.update)
    truth = {n: g.numpy() for n, g in truth_at(view, check.update).values.items()}
    names = [n for n, g in truth.items() if n in shown and shown[n].shape == g.shape]
    wrong = [n for n in names if not close(shown[n], truth[n], view)]
    alike = f"every gradient that is wrong ({len(wrong)} of {len(names)} tensors, {check.name} among them)"
    candidates = (
        (names, "every gradient"),
        (wrong if len(wrong) > 1 else [], alike),
        ([n for n in names if n == check.name], f"the gradient of {check.name}"),
    )
    for chosen, what in candidates:
        left, right = flat(shown, chosen), flat(truth, chosen)
        factor = multiple(view, left, right, float((left @ left) ** 0.5)) if chosen else None
        if factor is not None and abs(factor - 1) > 1e-6:
            yield f"{what} is {factor:.6g} times the expected one{named_factor(view.case, check.update, factor)}"
            return


def factor_on_scalar(view: View, check: Check) -> Iterator[str]:
    """Observed over expected value of a check of one number."""
    try:
        expected, seen = float(check.expected), float(check.observed)
    except ValueError:
        return
    if expected and math.isfinite(seen):
        ratio = seen / expected
        yield f"observed / expected = {ratio:.6g}{named_factor(view.case, check.update, ratio)}"
