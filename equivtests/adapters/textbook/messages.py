"""Messages between pairs of ranks, posted together, so that no order of ranks can block."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor


def deliver(outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
    """Send contiguous tensors, and fill others with what comes, both by the rank at the other end; returns when all is done.

    An empty tensor is no message, which both ends know from its size.
    """
    sends = [dist.P2POp(dist.isend, tensor, rank) for rank, tensor in outgoing.items() if tensor.numel()]
    receives = [dist.P2POp(dist.irecv, tensor, rank) for rank, tensor in incoming.items() if tensor.numel()]
    posted = dist.batch_isend_irecv(sends + receives) if sends or receives else []
    for work in posted:
        work.wait()
