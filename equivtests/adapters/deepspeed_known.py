"""What DeepSpeed does otherwise than one device, each told in docs/findings."""

from __future__ import annotations

from equivtests.adapters.adapter import KnownDivergence

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

EVERYWHERE = (UNUSED, TRANSPOSED)
