"""Mutants of statistics over the rows of all ranks."""

from __future__ import annotations

from torch import Tensor, nn

from equivtests.adapters.textbook.dp import DataParallel
from equivtests.models.batch_norm import BatchNorm
from equivtests.mutants.mutant import mutant
from equivtests.mutants.situations import BATCH_NORM


class NormOf(DataParallel):
    """Data parallelism with another way to take the statistics of a batch."""

    norm: type[BatchNorm] = BatchNorm

    def wrap(self, module: nn.Module) -> nn.Module:
        module.batch_norm = self.norm(module.get_buffer("batch_norm.mean").numel())
        return super().wrap(module)


@mutant(
    "bn-local",
    strategy="dp",
    case=BATCH_NORM,
    quantity="loss",
    source="davisking/dlib#2404",
    mistake="every rank normalizes its rows by their own statistics",
)
class LocalStatistics(DataParallel):
    """A batch is what is on one rank."""

    def synchronize_statistics(self, norm: BatchNorm) -> None:
        """They stay what they are."""


class MeanOfMeans(BatchNorm):
    def statistics(self, x_SD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ranks = self.total(x_SD.new_ones(1))
        mean = self.total(x_SD.mean(dim=0)) / ranks
        squares = self.total(x_SD.square().mean(dim=0)) / ranks
        return mean, squares - mean.square(), super().statistics(x_SD)[2]


@mutant(
    "syncbn-mean-of-means",
    strategy="dp",
    case=BATCH_NORM,
    quantity="loss",
    source="PaddlePaddle/Paddle#32464; facebookresearch/fvcore#152",
    mistake="the ranks' means are averaged without regard to how many rows each has",
)
class EqualRanks(NormOf):
    """Right if all ranks have equally many rows."""

    norm = MeanOfMeans


class LocalCount(BatchNorm):
    def note(self, x_SD: Tensor, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        super().note(x_SD, mean, variance, count.new_tensor(len(x_SD)))


@mutant(
    "syncbn-running-var",
    strategy="dp",
    case=BATCH_NORM,
    quantity="buffer",
    source="pytorch/pytorch#22192",
    mistake="the running variance is made unbiased with the number of rows of the own rank, not of all",
)
class UnbiasedByLocalCount(NormOf):
    """Outputs are right; the running variance differs between ranks."""

    norm = LocalCount


class LocalRunning(BatchNorm):
    def note(self, x_SD: Tensor, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        local = x_SD.detach()
        super().note(x_SD, local.mean(dim=0), local.var(dim=0, correction=0), count.new_tensor(len(x_SD)))


@mutant(
    "bn-running-local",
    strategy="dp",
    case=BATCH_NORM,
    quantity="buffer",
    source="NVIDIA-Merlin/HugeCTR#181",
    mistake="running statistics are those of each rank's own rows: they are not exchanged",
)
class RunningNotReduced(NormOf):
    """Rows are normalized rightly; what is kept for evaluation differs between ranks."""

    norm = LocalRunning


class FeaturesApart(BatchNorm):
    """The input is stored feature by feature, as images often are: not contiguous in rows."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2).contiguous().transpose(1, 2))


class Transposed(NormOf):
    """A batch norm on an input that is not contiguous."""

    norm = FeaturesApart


class RawMemory(FeaturesApart):
    def rows(self, x_NLD: Tensor) -> Tensor:
        return x_NLD.transpose(1, 2).reshape(x_NLD.shape).flatten(0, 1)


@mutant(
    "syncbn-layout",
    strategy="dp",
    case=BATCH_NORM,
    quantity="loss",
    source="pytorch/pytorch#64039, #62967",
    mistake="an input that is not contiguous is read in the order of memory",
)
class ReadsMemory(Transposed):
    """Statistics of one feature are made of the values of several."""

    norm = RawMemory
