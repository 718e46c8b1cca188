"""What is claimed of DeepSpeed, and what it is known to do otherwise than one device (each told in docs/findings)."""

from __future__ import annotations

from typing import Any

from deepspeed.git_version_info import installed_ops

from equivtests.adapters.adapter import PLAIN_FEATURES, KnownDivergence, Strategy
from equivtests.adapters.native.fsdp1 import ALL
from equivtests.adapters.native.pipeline import pipeline_strategy
from equivtests.adapters.native.tensor import tensor_strategy
from equivtests.adapters.torch_adapter import SHOWN
from equivtests.cases.case import Semantics

PROJECT = "https://github.com/deepspeedai/DeepSpeed"
CONFIGURATION = "https://www.deepspeed.ai/docs/config-json/"

UNUSED = KnownDivergence(
    case="mlp-unused-*",
    quantity="gradient",
    reason="a parameter without gradient is stepped with zeros: moments and weight decay act on it",
    link=CONFIGURATION,
)
TRANSPOSED = KnownDivergence(
    case="linear-transposed-*",
    quantity="error",
    reason="initialize() raises for a parameter that is not contiguous",
    link=f"{PROJECT}/issues/6571",
    message="self.stride(-1) must be 1 to view Float as Byte",
)
SOME_RANKS = KnownDivergence(
    case="gpt-conditional-w[34]*",  # on fewer ranks all have rows in their first micro-batch
    quantity="error",
    reason="gradients are reduced in the order in which they come, also where ranks lack some",
    link=f"{PROJECT}/issues/2343",
    message="distributed collective mismatch",
)
LOST = KnownDivergence(
    case="gpt-conditional-w[12]*",
    quantity="gradient",
    reason="the gradient of a parameter that the last micro-batch does not use is lost",
    link=f"{PROJECT}/blob/v0.19.8/deepspeed/runtime/zero/stage_1_and_2.py",
)

GATHERED_TWICE = KnownDivergence(
    case="gpt-tied-*",
    quantity="collectives",
    reason="with a reuse distance of 0 a shared parameter is gathered for each module that uses it",
    link=CONFIGURATION,
    documented=True,
)
FIRST_STAGE = KnownDivergence(
    case="*-clip-*",
    quantity="weight update",
    reason="without ZeRO and mixed precision, a pipeline clips by the norm of its first stage's gradients",
    link=f"{PROJECT}/blob/v0.19.8/deepspeed/runtime/utils.py",
)
EMPTY_PART = KnownDivergence(
    case="gpt-shared-*",  # one head of keys and values: the second tensor rank has none, and no query head
    quantity="error",
    reason="with tp_overlap_comm, the backward pass of a column layer raises on a rank whose part has no outputs",
    link=f"{PROJECT}/blob/v0.19.8/deepspeed/module_inject/layers.py",
    message="cannot reshape tensor of 0 elements",
)

FEATURES = PLAIN_FEATURES | {"dropout", "extra_head", "unused", "z_loss"}
SHARED: dict[str, Any] = {
    "features": FEATURES | {"conditional"},
    "precisions": frozenset({"float32"}),
    "clips": frozenset({"2"}),
    # Its API gives no step counters, and at stages 1 and 2 no state where the optimizer has two groups.
    "observes": SHOWN - {"bytes", "state"},
    "known": (UNUSED, TRANSPOSED),
}
ZERO0: dict[str, Any] = {
    "algorithm": "all-reduce",
    "observes": SHOWN - {"norm", "clip"},
    "arithmetic": "own",  # it reports no norm, so that the factor it clips by is known to rounding only
}
ZERO1: dict[str, Any] = {"shards": frozenset({"state"}), "known": (UNUSED, TRANSPOSED, SOME_RANKS)}
ZERO2: dict[str, Any] = ZERO1 | {"shards": frozenset({"gradients", "state"})}
ZERO2_OFFLOAD: dict[str, Any] = ZERO2 | {"known": (UNUSED, TRANSPOSED, SOME_RANKS, LOST)}
ZERO3: dict[str, Any] = {
    "shards": ALL,
    "features": FEATURES,  # a branch that some ranks do not take may block it ("Configuring ZeRO Leaf Modules")
    "algorithm": "zero3",
    "cut": "each",
    "known": (UNUSED, TRANSPOSED, GATHERED_TWICE),
}
CPU_ADAM: dict[str, Any] = {"optimizers": frozenset({"adam", "adamw"}), "arithmetic": "own"}
MEANS: dict[str, Any] = {
    "semantics": Semantics(denominator="rank-microbatch"),
    "features": PLAIN_FEATURES,
    "ragged": False,
}
MASTER: dict[str, Any] = {"semantics": Semantics(master="float32"), "precisions": frozenset({"float64"})}

OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
STRATEGIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "deepspeed-zero0": ({"stage": 0}, ZERO0),
    "deepspeed-zero1": ({"stage": 1}, ZERO1),
    "deepspeed-zero2": ({"stage": 2}, ZERO2),
    "deepspeed-zero3": ({"stage": 3}, ZERO3),
    "deepspeed-zero2-offload": ({"stage": 2, **OFFLOAD}, ZERO2_OFFLOAD),
    "deepspeed-zero3-offload": ({"stage": 3, **OFFLOAD}, ZERO3),
    "deepspeed-zero2-cpu-adam": ({"stage": 2, **OFFLOAD}, ZERO2_OFFLOAD | CPU_ADAM),
    "deepspeed-zero3-cpu-adam": ({"stage": 3, **OFFLOAD}, ZERO3 | CPU_ADAM),
    "deepspeed-mean-of-means": ({"stage": 2}, ZERO2 | MEANS),
    "deepspeed-zero1-master": ({"stage": 1}, ZERO1 | MASTER),
}
"""`zero_optimization` of the configuration, and what is claimed besides `SHARED`."""


def strategies() -> tuple[Strategy, ...]:
    """DeepSpeedCPUAdam only where it was built with DeepSpeed (DS_BUILD_CPU_ADAM=1): ranks do not wait for a compiler."""
    listed = [name for name in STRATEGIES if "cpu-adam" not in name or installed_ops.get("cpu_adam")]
    return tuple(Strategy(name, **(SHARED | STRATEGIES[name][1])) for name in listed)


def pipeline_strategies() -> tuple[Strategy, ...]:
    """Those of pipelines, which its documentation allows with ZeRO up to stage 1."""
    shared: dict[str, Any] = {
        "precisions": frozenset({"float32"}),
        "clips": frozenset({"2"}),
        "restores": False,
        "microbatches": "any",
    }
    watched = SHOWN - {"bytes"} | {"timeline"}
    plain: dict[str, Any] = {"known": (FIRST_STAGE,), "observes": watched - {"norm", "clip"}, "arithmetic": "own"}
    zero1: dict[str, Any] = {"observes": watched - {"state"}, "shards": frozenset({"state"})}
    return (
        pipeline_strategy("deepspeed-pipeline", "1f1b", **shared | plain),
        pipeline_strategy("deepspeed-pipeline-zero1", "1f1b", **shared | zero1),
    )


def tensor_strategies() -> tuple[Strategy, ...]:
    """Those of AutoTP, which its documentation allows with ZeRO up to stage 2 over the data ranks."""
    shared: dict[str, Any] = {"precisions": frozenset({"float32"}), "clips": frozenset({"2"}), "turned": False}
    watched = SHOWN - {"bytes"} | {"output"}
    plain: dict[str, Any] = shared | {"observes": watched - {"norm", "clip"}, "arithmetic": "own"}
    sharded: dict[str, Any] = shared | {"observes": watched - {"state"}}
    return (
        tensor_strategy("deepspeed-tp", **plain),
        tensor_strategy("deepspeed-tp-overlap", **plain, known=(EMPTY_PART,)),
        tensor_strategy("deepspeed-tp-zero1", **sharded, shards=ZERO1["shards"]),
        tensor_strategy("deepspeed-tp-zero2", **sharded, shards=ZERO2["shards"]),
    )
