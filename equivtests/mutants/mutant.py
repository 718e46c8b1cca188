"""A mutant and the table of all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from equivtests.adapters.adapter import Adapter, Strategy
from equivtests.cases.case import Case
from equivtests.chapters.run import Chapter, Run
from equivtests.judge.check import QUANTITIES
from equivtests.ranks.job import Seating


@dataclass(frozen=True)
class Mutant:
    """A planted mistake. It is killed by a FAIL whose first quantity is `quantity`, on `case`, where its parent passes.

    source: the public threads of the real bug. mistake: what is wrong, in one line. strategy: of the parent.
    outside: its parent is no adapter of the suite's own, and has to be named to run it.
    """

    name: str
    adapter: str
    parent: str
    strategy: str
    case: Case
    quantity: str
    source: str
    mistake: str
    chapter: Chapter = "update"
    outside: bool = False

    def run(self, adapter: str, strategy: Strategy, seating: Seating) -> Run:
        """The run of the mutant itself, or of its parent."""
        return Run(self.chapter, adapter, strategy, self.case, seating, self.command)

    @property
    def command(self) -> str:
        chosen = f" --adapter {self.parent}" if self.outside else ""
        world = self.case.layout.world
        return f'python -m pytest --nproc {world}{chosen} --mutants --pyargs equivtests -k "[{self.name}]"'


MUTANTS: dict[str, Mutant] = {}
"""All mutants by name; filled by the `mutant` decorator when `equivtests.mutants.catalogue` is imported."""


def mutant(
    name: str, *, strategy: str, case: Case, quantity: str, source: str, mistake: str, chapter: Chapter = "update"
) -> Callable[[type[Adapter]], type[Adapter]]:
    """Enter an adapter class into the table; its parent is the class it derives from."""
    if quantity not in QUANTITIES:
        raise ValueError(f"mutant {name!r}: unknown quantity {quantity!r}")

    def enter(adapter: type[Adapter]) -> type[Adapter]:
        if name in MUTANTS:
            raise ValueError(f"mutant {name!r} is planted twice")
        spec, parent = spec_of(adapter), spec_of(adapter.__bases__[0])
        MUTANTS[name] = Mutant(name, spec, parent, strategy, case, quantity, source, mistake, chapter)
        return adapter

    return enter


def spec_of(adapter: type) -> str:
    return f"{adapter.__module__}:{adapter.__qualname__}"
