"""A run and its result: the unit in which the size of the suite is counted."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from equivtests.adapters.adapter import Claims, KnownDivergence, Strategy
from equivtests.cases.case import Case, Semantics
from equivtests.cases.meaning import in_words
from equivtests.explain.report import reproduce
from equivtests.judge.check import Check, Judgement, Verdict
from equivtests.own import claim
from equivtests.ranks.job import Failure, Job, Seating
from equivtests.record.observation import Record
from equivtests.reference.versions import indistinguishable

Chapter = Literal["update", "restore", "replay", "ledger"]
COUNTED = ("collectives", "bytes")  # what the ledger chapter judges, and no other


@dataclass(frozen=True)
class Run:
    """One (strategy, case) in one chapter. adapter: "package.module:Class".

    command: what repeats just this run, where that is not a selection of the suite's own grid.
    """

    chapter: Chapter
    adapter: str
    strategy: Strategy
    case: Case
    seating: Seating = Seating()
    command: str = ""

    def job(self, **changes: Any) -> Job:
        """What ranks have to do; `changes`: fields of the job."""
        return Job(self.adapter, self.strategy.name, self.case, self.seating, **changes)

    @property
    def id(self) -> str:
        return f"{self.strategy.name}-{self.case.name}"

    @property
    def contract(self) -> Semantics:
        """The rule that the run is judged by. A checkpoint that drains a pipeline is a part of it."""
        declared = self.strategy.contract(self.case)
        if self.chapter != "restore" or not self.strategy.drains:
            return declared
        return replace(declared, staleness=replace(declared.staleness, drains=(self.case.save_after,)))

    @property
    def cannot_tell(self) -> list[str]:
        """Schemes of weight versions that the case is too short, or has too few stages, to tell from the declared one."""
        stale = self.case.asynchronous == "pipeline" and self.contract.staleness.versions != "newest"
        return [str(name) for name in indistinguishable(self.case, self.contract)] if stale else []

    @property
    def caveats(self) -> list[str]:
        """What a verdict on this run says less than others, for the end of its explanation."""
        return [f"  {words}"] if (words := claim(self.case.model.own)) else []

    @property
    def known(self) -> KnownDivergence | None:
        """The declared divergence that this case shows in this chapter, if any."""
        from fnmatch import fnmatch

        ledger = self.chapter == "ledger"
        known = (k for k in self.strategy.known if fnmatch(self.case.name, k.case))
        return next((k for k in known if k.quantity == "error" or (k.quantity in COUNTED) == ledger), None)


def seating_of(claims: Claims) -> Seating:
    """What an adapter needs of the ranks it runs on."""
    return Seating(claims.isolation == "case", claims.group, tuple(claims.preload))


@dataclass
class Result:
    """What became of a run. `explanation`: lines for a reader who does not know the code."""

    run: Run
    verdict: Verdict
    judgement: Judgement = field(default_factory=Judgement)
    failure: Failure | None = None
    explanation: list[str] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    confirmed: bool | None = None
    comparable: bool = True

    @property
    def first(self) -> Check | None:
        return self.judgement.first

    def divergence(self) -> dict[str, Any] | None:
        """What is declared of a run that differs as declared, and the command that shows it."""
        known = self.run.known
        if self.verdict is not Verdict.KNOWN or known is None:
            return None
        told = {name: getattr(known, name) for name in ("quantity", "reason", "link", "documented")}
        return told | {"command": reproduce(self.run)}

    def summary(self) -> dict[str, Any]:
        """Plain data of a result, as it stands in the certificate."""
        first = self.first
        return {
            "chapter": self.run.chapter,
            "adapter": self.run.adapter,
            "strategy": self.run.strategy.name,
            "case": self.run.case.name,
            "verdict": str(self.verdict),
            "confirmed": self.confirmed,
            "checks": len(self.judgement.checks),
            "worst": self.judgement.worst(),
            "resolution": self.judgement.resolution(),
            "exact": self.run.case.exact,
            "precision": self.run.case.precision.label,
            "semantics": in_words(self.run.contract),
            "cannot_tell": self.run.cannot_tell,
            "first": None
            if first is None
            else {"quantity": first.quantity, "update": first.update, "name": first.name},
            "known": self.divergence(),
            "failure": None if self.failure is None else {"kind": self.failure.kind, "rank": self.failure.rank},
            "explanation": self.explanation[:1] if self.failure else self.explanation,  # stacks hold paths
        }
