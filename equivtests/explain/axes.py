"""Along which axis of the mesh copies of one tensor part ways, and which rank's part of it is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from equivtests.cases.parameters import initial
from equivtests.explain.parts import close
from equivtests.judge.assemble import equal_bits
from equivtests.judge.check import Check
from equivtests.judge.checks import applied_once, truth_at
from equivtests.judge.forward import by_microbatch, chosen_rows, length_of, name_of, truth_and_distances
from equivtests.judge.view import View
from equivtests.record.observation import Observation, Place

Lines = Iterator[str]

AXES = ("tp", "cp", "pp", "ep", "dp")
ENTERS = {"weight update": "weight", "optimizer state": "state", "buffer": "buffer"}
SHOWN = {
    "initial weights": "weight",
    "clip coefficient": "clip",
    "learning rate": "lr",
    "dropout mask": "mask",
    "routing": "routed",
}


def shown_of(view: View, check: Check) -> list[Observation]:
    """The observations that a check of one tensor or number is about."""
    update = check.update + (check.quantity in ENTERS)
    kind = ENTERS.get(check.quantity) or SHOWN.get(check.quantity, check.quantity)
    if kind in ("output", "mask"):
        fed = by_microbatch(view, kind, update)
        return next((parts for key, parts in fed.items() if name_of(key) == check.name), [])
    return view.parts.get((kind, update), {}).get(check.name, [])


def axes_of(view: View, name: str = "") -> list[str]:
    """The axes that have more than one rank; the copies of an expert lie along edp, not along dp and cp."""
    axes = [axis for axis in AXES if view.case.layout.degree(axis) > 1]
    expert = ".experts." in name and view.case.layout.ep > 1
    return [axis for axis in axes if axis not in ("cp", "dp")] + ["edp"] if expert else axes


@dataclass(frozen=True)
class Copies:
    """Copies of one part of a tensor, on ranks that differ in one coordinate only."""

    place: Place
    ranks: tuple[int, ...]
    arrays: tuple[np.ndarray, ...]


def copies_along(view: View, shown: list[Observation], axis: str) -> Iterator[Copies]:
    """All sets of copies along an axis; of a partial value, the parts are no copies of each other."""
    groups: dict[object, list[Observation]] = {}
    for o in shown:
        group = view.case.layout.group(o.rank, axis)
        groups.setdefault((group, o.place.box, o.place.interval, o.microbatch), []).append(o)
    for members in groups.values():
        if len({o.place.replica for o in members}) == len(members) > 1:
            arrays = tuple(o.values().astype(np.float64) for o in members)
            yield Copies(members[0].place, tuple(o.rank for o in members), arrays)


def axes_that_differ(view: View, check: Check) -> Lines:
    """Where copies disagree: along which axes they do, and along which they agree."""
    shown = shown_of(view, check)
    differ, agree = [], []
    for axis in axes_of(view, check.name):
        sets = list(copies_along(view, shown, axis))
        apart = [c for c in sets if not all(equal_bits(c.arrays[0], other) for other in c.arrays[1:])]
        if apart:
            differ.append(f"{axis} (ranks {', '.join(map(str, apart[0].ranks))})")
        elif sets:
            agree.append(axis)
    if differ and (view.case.layout.splits or agree):
        yield f"copies differ along {' and '.join(differ)}" + (f", and agree along {', '.join(agree)}" if agree else "")


def reduction_missing(view: View, check: Check) -> Lines:
    """Is the sum, or the mean, of the copies along one axis right everywhere?"""
    truth = truth_at(view, check.update).values.get(check.name)
    if truth is None or not view.case.layout.splits:
        return
    for axis in axes_of(view, check.name):
        sets = list(copies_along(view, shown_of(view, check), axis))
        apart = any(not equal_bits(c.arrays[0], other) for c in sets for other in c.arrays[1:])
        for word, combine in (("sum", np.sum), ("mean", np.mean)):
            if apart and all(close(combine(c.arrays, axis=0), region(truth.numpy(), c.place), view) for c in sets):
                yield f"the {word} over {axis} is right: the reduction over {axis} is missing"
                return


def region(whole: np.ndarray, place: Place) -> np.ndarray:
    """The part of a whole tensor that lies at a place."""
    if place.box is not None:
        return whole[tuple(slice(*side) for side in place.box)]
    if place.interval is not None:
        return whole.reshape(-1)[slice(*place.interval)]
    return whole


def wrong_parts(view: View, check: Check) -> Lines:
    """Where a tensor is cut over ranks: whose part of it is wrong?"""
    expected = expected_of(view, check)
    shown = [o for o in shown_of(view, check) if not o.place.partial]
    if expected is None or len({(o.place.box, o.place.interval) for o in shown}) < 2:
        return
    wrong = {o.rank for o in shown if not fits(view, o, expected)}
    right = {o.rank for o in shown} - wrong
    if not wrong or not right:
        return
    for axis in axes_of(view):
        at = {rank: view.case.layout.at(rank)[axis] for rank in wrong | right}
        coordinates = {at[rank] for rank in wrong}
        if not coordinates & {at[rank] for rank in right}:
            listed = ", ".join(map(str, sorted(coordinates)))
            yield f"only the part of {axis} rank {listed} is wrong (ranks {', '.join(map(str, sorted(wrong)))})"
            return
    yield f"only the parts of ranks {', '.join(map(str, sorted(wrong)))} are wrong"


def fits(view: View, o: Observation, expected: np.ndarray) -> bool:
    values, wanted = o.values().astype(np.float64), region(expected, o.place)
    return values.size == wanted.size and close(values.reshape(wanted.shape), wanted, view)


def expected_of(view: View, check: Check) -> np.ndarray | None:
    """The whole tensor that a check expects: an initial weight, an output, a gradient, or a weight after the step."""
    if check.quantity == "initial weights":
        return initial(view.case).get(check.name)
    if check.quantity == "gradient":
        truth = truth_at(view, check.update).values.get(check.name)
        return None if truth is None else truth.numpy()
    if check.quantity == "output":
        return expected_output(view, check)
    if check.quantity == "weight update":
        stepped = applied_once(view, check.update)[0].get(check.name)
        return None if stepped is None else stepped.double().numpy()
    return None


def expected_output(view: View, check: Check) -> np.ndarray | None:
    """What the model has to put out for the micro-batch of a check."""
    truth, _ = truth_and_distances(view, check.update)
    fed = (key for key in by_microbatch(view, "output", check.update) if name_of(key) == check.name)
    found = next(fed, None)
    if found is None:
        return None
    _, data, microbatch = found
    return truth[chosen_rows(view, check.update, data, microbatch)][:, : length_of(view, microbatch)]


# ---------------------------------------------------------------------------------------------- parts of sequences


def wrong_positions(view: View, check: Check) -> Lines:
    """Where sequences are cut over ranks: whose positions of an output are wrong?"""
    expected, shown = expected_output(view, check), shown_of(view, check)
    if view.case.layout.cp == 1 or expected is None:
        return
    wrong: dict[int, list[int]] = {}
    for o in shown:
        start = o.place.box[1][0] if o.place.box else 0
        wanted = region(expected, o.place)
        for i in range(wanted.shape[1]):
            if not close(o.values()[:, i].astype(np.float64), wanted[:, i], view):
                wrong.setdefault(view.case.layout.at(o.rank)["cp"], []).append(start + i)
    for rank, positions in sorted(wrong.items()):
        yield f"cp rank {rank} is wrong at positions {', '.join(map(str, sorted(set(positions))))} of its sequences"


def one_mask_for_all(view: View, check: Check) -> Lines:
    """Did ranks draw one and the same mask for different tokens?"""
    layout = view.case.layout
    shown = [o for o in view.observations("mask", check.update) if o.array.size]
    for axis in axes_of(view):
        for group in layout.partition(axis):
            masks = {o.rank: o for o in reversed(shown) if o.rank in group and (o.microbatch or 0) == 0}
            arrays = [o.array for o in masks.values()]
            differ = len({(layout.data_rank(o.rank), o.place.box) for o in masks.values()}) == len(masks) > 1
            if differ and all(equal_bits(arrays[0], other) for other in arrays[1:]):
                listed = ", ".join(map(str, sorted(masks)))
                yield f"ranks {listed} drew one and the same mask along {axis}, for different tokens"
                return


def counts_along(view: View, check: Check) -> Lines:
    """Do the counts of the ranks along an axis add up to the window's?"""
    shown = {o.rank: int(o.array) for o in view.observations("tokens", check.update)}
    wanted = view.case.tokens(check.update)
    for axis in axes_of(view):
        groups = view.case.layout.partition(axis)
        if all(sum(shown.get(rank, 0) for rank in group) == wanted for group in groups):
            yield f"the counts add up to the window's over {axis}: each rank counted what it holds"


# ---------------------------------------------------------------------------------------------- norms over axes


def counted_along(view: View, check: Check) -> Lines:
    """Does the norm count what is whole along an axis once per rank, or leave out parts of what is cut along it?"""
    if view.case.optimizer.clip_norm != "2" or not check.observed:
        return
    seen = float(check.observed) ** 2
    for axis in axes_of(view):
        whole, parts = squares_along(view, check.update, axis)
        ranks = len(parts)
        if near(seen, ranks * whole + sum(parts)):
            yield f"what is whole along {axis} is counted {ranks} times, once per rank"
        for rank, part in enumerate(parts):
            if part < sum(parts) and near(seen, whole + part):
                yield f"of what is cut along {axis}, only the part of {axis} rank {rank} is counted"


def squares_along(view: View, update: int, axis: str) -> tuple[float, list[float]]:
    """Squares of the gradient: of tensors that are whole along an axis, and of the parts of the others by coordinate."""
    whole, parts = 0.0, [0.0] * view.case.layout.degree(axis)
    for name in view.names("gradient", update):
        shown = view.parts[("gradient", update)][name]
        found = {(o.place.box, o.place.interval, view.case.layout.at(o.rank)[axis]): o for o in shown}
        places = {(box, interval) for box, interval, _ in found}
        if len(places) == 1 and len(found) == len(parts):
            tensor = view.whole("gradient", name, update)
            whole += 0.0 if tensor is None else float((tensor.values.astype(np.float64) ** 2).sum())
            continue
        for (_, _, at), o in found.items():
            parts[at] += float((o.values().astype(np.float64) ** 2).sum())
    return whole, parts


def near(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-4 * max(abs(a), abs(b))


# ---------------------------------------------------------------------------------------------- what can still be said


def first_wrong_on_the_way_back(view: View, check: Check) -> Lines:
    """Seen from the loss, down to which parameter are gradients right?"""
    truth = truth_at(view, check.update).values
    order = [name for name in reversed(list(view.expectation.weights[0])) if name in truth]
    shown = {name: view.whole("gradient", name, check.update) for name in order}
    fit = [w is not None and not w.problem and close(w.values, truth[n].numpy(), view) for n, w in shown.items()]
    if any(fit) and not all(fit):
        first = fit.index(False)
        rest = f"; {sum(fit[first:])} of the {len(fit) - first - 1} after it are right" if first + 1 < len(fit) else ""
        yield f"on the way back from the loss, {first} gradients are right before that of {order[first]}{rest}"


def split_along(view: View, check: Check) -> Lines:
    """Which axes can be at fault, where nothing more is known."""
    splits = [axis for axis in axes_of(view) if axis in view.case.layout.splits]
    if splits and "disagree" not in check.detail and check.quantity not in ("collectives", "bytes"):
        agreed = "ranks agree on it; " if check.observed else ""
        yield f"{agreed}the model is split along {' and '.join(splits)}"
