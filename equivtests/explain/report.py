"""A failed run in words: what differs first, by how much, what would explain it, and how to see it again."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from equivtests.explain.diagnose import diagnose
from equivtests.judge.check import Check, Judgement, Verdict
from equivtests.judge.local import averages, of_worker
from equivtests.judge.tolerance import UPDATE_BOUND
from equivtests.judge.view import View
from equivtests.ranks.job import Failure
from equivtests.record.observation import KINDS

if TYPE_CHECKING:
    from equivtests.chapters.run import Run


def explain(run: Run, view: View, judgement: Judgement) -> list[str]:
    """Lines about the first difference of a judged run."""
    check = judgement.first
    if check is None:
        return []
    lines = [headline(run, check), *(f"  {line}" for line in details(view, check))]
    lines += [f"  {line}" for line in diagnose(*of_worker(view, check))]
    others = sum(c.verdict is check.verdict for c in judgement.checks) - 1
    if others:
        lines.append(f"  {others} more checks of this update did not pass; what follows from the first is not listed")
    return [*lines, f"  reproduce: {reproduce(run)}"]


def headline(run: Run, check: Check) -> str:
    named = check.quantity == "bytes" or check.name not in (check.quantity, "ids", *KINDS)
    where = f"{check.quantity} of {check.name}" if named else check.quantity
    differ = "differ" if check.quantity.endswith("s") and check.quantity != "loss" else "differs"
    words = f"{differ} first" if check.verdict is Verdict.FAIL else "cannot be told from rounding"
    return f"{run.strategy.name} on {run.case.name}: update {check.update}: {where} {words}"


def details(view: View, check: Check) -> list[str]:
    """Expected and observed values, rank and ratio, in one or two lines."""
    lines = []
    if check.detail and not check.expected:
        lines.append(check.detail)
    if check.expected:
        where = f" at {check.detail}" if check.detail.startswith("element") else ""
        lines.append(f"expected {check.expected}, observed {check.observed}{where}")
        if check.detail and not where:
            lines.append(check.detail)
    if check.rank is not None:
        lines.append(f"first seen on rank {check.rank}")
    if 0 < check.ratio < float("inf"):
        unit = "rounding radius" if check.resolution else "unit"
        lines.append(f"error / {unit} = {check.ratio:.3g}, allowed {allowed(view, check):g}")
    return lines


def allowed(view: View, check: Check) -> float:
    own = check.quantity in ("weight update", "optimizer state")
    mean = check.quantity == "weight update" and averages(of_worker(view, check)[0], check.update)
    return 0.0 if own and view.bitwise and not mean else UPDATE_BOUND if own else view.threshold


def reproduce(run: Run) -> str:
    """One command line that runs just this case again."""
    if run.command:
        return run.command
    builtin = run.adapter.startswith(("equivtests.adapters.textbook.", "equivtests.adapters.native."))
    adapter = "" if builtin else f"--adapter {run.adapter} "
    seeded = re.search(r"-s(\d+)$", run.case.name)
    seed = f"--seed {seeded[1]} " if seeded else ""
    expression = f"[{run.id}] and {run.chapter}"
    model = f"--model {run.case.model.own} " if run.case.model.own else ""
    selection = f"--nproc {run.case.layout.world} --tier nightly {adapter}{model}{seed}--pyargs equivtests"
    return f'python -m pytest {selection} -k "{expression}"'


def explain_failure(run: Run, failure: Failure) -> list[str]:
    """Lines about a run that broke: what happened to which rank, and where every rank stood."""
    lines = [f"{run.strategy.name} on {run.case.name}: {failure.message}"]
    for rank, stack in sorted(failure.stacks.items()):
        lines += [f"  rank {rank}:", *(f"    {line}" for line in stack.rstrip().splitlines()[-12:])]
    for rank, last in sorted(failure.last_collectives.items()):
        lines.append(f"  last collectives of rank {rank}: {', '.join(last[-3:]) or 'none'}")
    return [*lines, f"  reproduce: {reproduce(run)}"]
