"""Checkpoints by torch.distributed.checkpoint: every rank writes its shards, any rank may read them."""

from __future__ import annotations

from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from equivtests.adapters.torch_adapter import TorchAdapter


class DistributedCheckpoint(TorchAdapter):
    """A torch adapter whose model and optimizer are saved and loaded by name, shard by shard."""

    def save_tensors(self, directory: Path) -> None:
        dcp.save(self.state_dicts(), checkpoint_id=directory / "sharded")

    def load_tensors(self, directory: Path) -> None:
        saved = self.state_dicts()
        dcp.load(saved, checkpoint_id=directory / "sharded")
        set_state_dict(self.model, self.optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])

    def state_dicts(self) -> dict[str, dict]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}
