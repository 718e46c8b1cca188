"""What the fork server imports once, so that ranks forked from it start in milliseconds."""

import torch
import torch._dynamo  # the first optimizer step would import it
import torch.distributed.checkpoint._fsspec_filesystem  # the first checkpoint would import it
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.optim
import torch.distributed.tensor
import torch.nn.parallel

from equivtests.adapters import torch_adapter
from equivtests.ranks import worker

__all__ = ["torch_adapter", "worker"]

torch.set_num_threads(1)
_weight = torch.nn.Parameter(torch.ones(2))
_weight.grad = torch.ones(2)
torch.optim.AdamW([_weight]).step()
