"""The adapters that come with the suite. A new one is one line."""

from __future__ import annotations

TEXTBOOK = (
    "equivtests.adapters.textbook.dp:DataParallel",
    "equivtests.adapters.textbook.recompute:Recompute",
    "equivtests.adapters.textbook.ring_all_reduce:RingAllReduce",
    "equivtests.adapters.textbook.server:ParameterServer",
    "equivtests.adapters.textbook.offload:Offload",
    "equivtests.adapters.textbook.offload:ShardedOffload",
    "equivtests.adapters.textbook.delayed_offload:DelayedOffload",
    "equivtests.adapters.textbook.local_sgd:LocalSGD",
    "equivtests.adapters.textbook.zero:Zero1",
    "equivtests.adapters.textbook.zero:Zero2",
    "equivtests.adapters.textbook.zero:Zero3",
    "equivtests.adapters.textbook.async_server:AsyncServer",
    "equivtests.adapters.textbook.tensor:TensorParallel",
    "equivtests.adapters.textbook.pipeline:PipelineParallel",
    "equivtests.adapters.textbook.stale_pipeline:WeightStashing",
    "equivtests.adapters.textbook.stale_pipeline:VerticalSync",
    "equivtests.adapters.textbook.stale_pipeline:TwoBuffered",
    "equivtests.adapters.textbook.stale_pipeline:PredictedWeights",
    "equivtests.adapters.textbook.context:ContextParallel",
    "equivtests.adapters.textbook.expert:ExpertParallel",
    "equivtests.adapters.textbook.products:TensorPipeline",
    "equivtests.adapters.textbook.products:ContextTensor",
    "equivtests.adapters.textbook.products:ContextPipeline",
    "equivtests.adapters.textbook.products:ContextExpert",
)
NATIVE = (
    "equivtests.adapters.native.ddp:DDP",
    "equivtests.adapters.native.ddp:ZeroRedundancy",
    "equivtests.adapters.native.local_sgd:PostLocalSGD",
    "equivtests.adapters.native.fsdp1:FSDP1",
    "equivtests.adapters.native.fsdp2:FSDP2",
    "equivtests.adapters.native.tensor:TensorParallel",
    "equivtests.adapters.native.context:TorchContextParallel",
    "equivtests.adapters.native.pipeline:Pipeline",
    "equivtests.adapters.native.products:ShardedTensorParallel",
    "equivtests.adapters.native.products:PipelineDDP",
    "equivtests.adapters.native.products:PipelineFSDP2",
    "equivtests.adapters.native.products:TensorPipeline",
)
BUILTIN = TEXTBOOK + NATIVE
