"""Mutants of other ways to synchronize than a library's collectives: a ring of messages, parameter servers, the host."""

from __future__ import annotations

from torch import Tensor

from equivtests.adapters.textbook.offload import Offload, ShardedOffload
from equivtests.adapters.textbook.ring_all_reduce import Chunks, RingAllReduce
from equivtests.adapters.textbook.server import ParameterServer
from equivtests.mutants.mutant import mutant
from equivtests.mutants.situations import CLIP, FOUR_RANKS_MLP, MIDDLE, SHARDS, SHARDS_ADAM, TINY_MLP, situation

CLIPPED_FOUR = situation("clipped-four", TINY_MLP, FOUR_RANKS_MLP.windows, CLIP)

# ---------------------------------------------------------------------------------------------- ring all-reduce


@mutant(
    "ring-drops-remainder",
    strategy="ring",
    case=FOUR_RANKS_MLP,
    quantity="gradient",
    source="constructed: chunks of total // ranks elements, as where a bucket is taken to be divisible",
    mistake="the elements that the number of ranks leaves over are not reduced",
)
class RemainderDropped(RingAllReduce):
    def chunks(self, bucket: Tensor) -> Chunks:
        each = bucket.numel() // self.ranks.world
        return bucket[: each * self.ranks.world].split(each)


@mutant(
    "ring-last-round-missing",
    strategy="ring",
    case=FOUR_RANKS_MLP,
    quantity="gradient",
    source="constructed: one round too few, P - 2 where P chunks have to arrive",
    mistake="the all-gather ends one round early: every rank keeps one stale chunk, each another one",
)
class LastRoundMissing(RingAllReduce):
    def all_gather(self, chunks: Chunks) -> None:
        for step in range(self.ranks.world - 2):
            self.pass_on(self.finished(chunks, step), self.finished(chunks, step + 1))


@mutant(
    "ring-gathers-own-chunk",
    strategy="ring",
    case=FOUR_RANKS_MLP,
    quantity="gradient",
    source="constructed: the all-gather starts with the chunk of the rank's own number, as the reduce-scatter does",
    mistake="the chunk that is given away is the one before the finished one: all ranks agree on unreduced gradients",
)
class OwnChunkGathered(RingAllReduce):
    def finished(self, chunks: Chunks, step: int) -> Tensor:
        return super().finished(chunks, step + 1)


@mutant(
    "ring-not-averaged",
    strategy="ring",
    case=FOUR_RANKS_MLP,
    quantity="gradient",
    source="constructed: a library whose all-reduce averages is replaced by one that adds up",
    mistake="the sum over the ranks is not divided by their number",
)
class SumNotDivided(RingAllReduce):
    def average(self, bucket: Tensor) -> Tensor:
        return self.all_reduce(bucket)


@mutant(
    "ring-of-whole-buckets",
    strategy="ring",
    case=FOUR_RANKS_MLP,
    quantity="collectives",
    source="constructed: a bucket that is one chunk, so that ranks work one after the other",
    mistake="the bucket goes round uncut: right sums, at twice the time on the wire and more",
    chapter="ledger",
)
class WholeBuckets(RingAllReduce):
    def chunks(self, bucket: Tensor) -> Chunks:
        return (bucket, *(bucket.new_empty(0) for _ in range(self.ranks.world - 1)))


# ---------------------------------------------------------------------------------------------- parameter servers


@mutant(
    "server-leaves-last-worker-out",
    strategy="ps-sync",
    case=FOUR_RANKS_MLP,
    quantity="gradient",
    source="constructed: backup workers (Chen et al. 2016, Revisiting distributed synchronous SGD) where none are declared",
    mistake="the update is made when all workers but the last have pushed",
)
class LastWorkerLeftOut(ParameterServer):
    def add_up(self, arrived: list[Tensor]) -> Tensor:
        return super().add_up(arrived[:-1])


@mutant(
    "server-adds-a-push-twice",
    strategy="ps-sync-sliced",
    case=SHARDS,
    quantity="gradient",
    source="constructed: a message that is sent again when its answer is late, and has no number to be known by",
    mistake="a worker's push is sent twice, and added up twice by one server",
)
class PushAddedTwice(ParameterServer):
    def add_up(self, arrived: list[Tensor]) -> Tensor:
        again = arrived[:1] if self.ranks.rank == self.servers()[-1] else []
        return super().add_up([*arrived, *again])


@mutant(
    "server-share-not-averaged",
    strategy="ps-sync-sharded",
    case=SHARDS,
    quantity="gradient",
    source="constructed: servers that are set up apart, one of them without the number of workers",
    mistake="one server steps on the sum of the gradients where the mean is meant",
)
class ShareNotAveraged(ParameterServer):
    def average(self, shard: Tensor) -> Tensor:
        return shard if self.ranks.rank == self.servers()[-1] else super().average(shard)


@mutant(
    "server-clips-by-its-share",
    strategy="ps-sync-sliced",
    case=CLIPPED_FOUR,
    quantity="norm",
    source="constructed: clipping on the server, which sees its share of the gradient only",
    mistake="every server clips by the norm of its own share",
)
class ClippedByShare(ParameterServer):
    def tell_servers(self, own: Tensor) -> Tensor:
        return own


@mutant(
    "server-applies-twice",
    strategy="ps-sync-sharded",
    case=SHARDS_ADAM,
    quantity="weight update",
    source="constructed: a request that is handled twice, as after a server was taken for dead",
    mistake="one server applies the update of its share twice",
)
class AppliedTwice(ParameterServer):
    def optimizer_step(self) -> None:
        if self.ranks.rank == self.servers()[-1]:
            self.optimizer.step()
        super().optimizer_step()


@mutant(
    "worker-pull-not-waited",
    strategy="ps-sync-sliced",
    case=FOUR_RANKS_MLP,
    quantity="weight update",
    source="constructed: pulls are asynchronous (Li et al. 2014, section 3), and nothing waits for one of them",
    mistake="a worker starts before the weights of one server have arrived, and keeps its old ones",
)
class PullNotWaited(ParameterServer):
    def take_over(self, arrived: list[Tensor]) -> None:
        late = self.servers()[0] if self.ranks.rank == self.ranks.world - 1 else None
        for server, share in enumerate(self.shares):
            if server != late:
                self.take_share(share, arrived[server])


@mutant(
    "server-pulled-before-step",
    strategy="ps-sync",
    case=SHARDS,
    quantity="weight update",
    source="constructed: pulls are answered while the step of the same round is being made",
    mistake="workers get the weights from before the step, one update behind the server's",
)
class PulledBeforeStep(ParameterServer):
    def optimizer_step(self) -> None:
        self.publish()
        self.optimizer.step()


# ---------------------------------------------------------------------------------------------- offloaded optimizers


@mutant(
    "offload-last-chunk-missing",
    strategy="offload",
    case=SHARDS,
    quantity="weight update",
    source="pytorch/ao#1649; NVIDIA/TransformerEngine#1026",
    mistake="the last parameter is not copied back from the host before the next update",
)
class LastParameterMissing(Offload):
    def parameters_back(self) -> None:
        last = next(reversed(self.masters))
        before = last.detach().clone()
        super().parameters_back()
        last.data.copy_(before)


@mutant(
    "offload-one-step-behind",
    strategy="offload-sharded",
    case=SHARDS_ADAM,
    quantity="weight update",
    source="constructed: the copies of ZeRO-Offload's schedule overlap with the step, here one of them too early",
    mistake="parameters are copied back while the host still makes its step: they are one update behind",
)
class CopiedBackEarly(ShardedOffload):
    def optimizer_step(self) -> None:
        self.gradients_out()
        self.parameters_back()
        self.step_on_host()


@mutant(
    "offload-gradients-unclipped",
    strategy="offload",
    case=CLIPPED_FOUR,
    quantity="weight update",
    source="constructed: gradients go out as soon as they are reduced, the coefficient is known later",
    mistake="the host steps with the gradients from before clipping",
)
class GradientsOutEarly(Offload):
    def synchronize(self) -> None:
        super().synchronize()
        self.early = [parameter.grad.clone() for parameter in self.masters if parameter.grad is not None]

    def step_on_host(self) -> None:
        for master, gradient in zip(self.masters.values(), self.early, strict=True):
            master.grad = gradient
        super().step_on_host()


@mutant(
    "offload-stale-masters",
    strategy="offload",
    case=MIDDLE,
    quantity="weight update",
    source="NVIDIA/Megatron-LM#5071; PrimeIntellect-ai/prime-rl#3234",
    mistake="loading a model leaves the masters on the host as they were: the first step undoes the checkpoint",
    chapter="restore",
)
class MastersNotRefreshed(Offload):
    def refresh_masters(self) -> None:
        """Nothing: only the device's weights are those of the checkpoint."""


@mutant(
    "offload-state-on-device",
    strategy="offload-sharded",
    case=MIDDLE,
    quantity="restored optimizer state",
    source="constructed: loaded moments are kept under the device's parameters, where the host's optimizer does not look",
    mistake="the optimizer's state does not reach the host after loading, without a word",
    chapter="restore",
)
class StateNotOnHost(ShardedOffload):
    def load_optimizer(self, saved: dict[str, Tensor]) -> None:
        for name, parameter, _ in self.device_parameters():
            self.optimizer.state[parameter] = {k: t for k, t in saved.items() if k.startswith(f"{name}/")}
