"""Nothing is really split: all numbers are right, and nothing that was claimed has been tested."""

from __future__ import annotations

from torch import Tensor, nn

from equivtests.adapters.textbook.context import ContextParallel
from equivtests.adapters.textbook.lines import Line
from equivtests.adapters.textbook.shards import Shards
from equivtests.adapters.textbook.tensor import TensorParallel
from equivtests.cases.case import Case
from equivtests.cases.split_grid import split_named
from equivtests.cases.windows import MicroBatch
from equivtests.models.parts import Terms
from equivtests.mutants.mutant import mutant


def grid_case(name: str) -> Case:
    """A case of the split grid."""
    case = split_named(name)
    if case is None:
        raise ValueError(f"no case {name!r} in the split grid")
    return case


@mutant(
    "tensor-not-cut",
    strategy="tp",
    case=grid_case("gpt-auxiliary-tp4"),
    quantity="vacuity",
    source="NVIDIA/apex#1384",
    mistake="the layers are never cut: every tensor rank holds and runs the whole model",
)
class TensorNotCut(TensorParallel):
    def split(self, module: nn.Module) -> None:
        self.tp = self.line("tp")

    def cuts(self, kind: str, axis: str) -> bool:
        return False


@mutant(
    "context-not-cut",
    strategy="cp-gather",
    case=grid_case("gpt-auxiliary-cp4"),
    quantity="vacuity",
    source="NVIDIA/apex#1384",
    mistake="sequences are never cut: every context rank runs whole ones",
)
class ContextNotCut(ContextParallel):
    def split(self, module: nn.Module) -> None:
        self.shards = Shards(Line(None, (self.ranks.rank,), 0), False)

    def cuts(self, kind: str, axis: str) -> bool:
        return False

    def objective(self, terms: Terms, k: int, batch: MicroBatch) -> Tensor:
        return super().objective(terms, k, batch) / self.layout.cp
