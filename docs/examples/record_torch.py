"""Plain DDP that writes a record directory of a gpt case with AdamW. It imports nothing of equivtests.

    python -m equivtests export CASE_DIR --case gpt-adamw-w2
    torchrun --standalone --nproc-per-node 2 record_torch.py CASE_DIR RECORD_DIR
    python -m equivtests judge RECORD_DIR

With --naive every micro-batch is divided by its own tokens, and DDP averages over ranks: a common mistake.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.ModuleDict({part: nn.Linear(width, width, bias=part != "k") for part in "qkvo"})
        self.mlp = nn.ModuleDict({"up": nn.Linear(width, 2 * width), "down": nn.Linear(2 * width, width)})

    def forward(self, x):
        normed = self.norm1(x)
        q, k, v = (self.attention[part](normed).unflatten(-1, (2, -1)).transpose(1, 2) for part in "qkv")
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention["o"](mixed.transpose(1, 2).flatten(2))
        return x + self.mlp["down"](F.gelu(self.mlp["up"](self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width, depth, vocabulary, length, **_):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        return self.head(self.norm(self.layers(self.embedding(tokens) + self.positions.weight)))


class Record:
    """What one rank shows: copies of the moment. Without a place, an array is this rank's copy of the whole tensor."""

    def __init__(self):
        self.entries, self.arrays = [], {}

    def show(self, kind, value, update, name=None, **more):
        self.arrays[str(len(self.entries))] = torch.as_tensor(value).detach().clone()
        self.entries.append({"kind": kind, "name": name, "update": update, **more})

    def show_state(self, model, optimizer, update):
        for name, parameter in model.named_parameters():
            self.show("weight", parameter, update, name)
            for key, value in optimizer.state.get(parameter, {}).items():
                self.show("state", value, update, f"{name}/{key}")

    def write(self, directory, case, rank):
        directory.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            strategy = {"name": "my-ddp", "observes": sorted({entry["kind"] for entry in self.entries})}
            header = {"format": 2, "case": case, "strategy": strategy, "world": case["layout"]["dp"]}
            (directory / "record.json").write_text(json.dumps(header))
        (directory / f"rank-{rank}.json").write_text(json.dumps({"entries": self.entries}))
        save_file(self.arrays, directory / f"rank-{rank}.safetensors")


def train(directory, rank, world, naive, record):
    case, feed = (json.loads((directory / name).read_text()) for name in ("case.json", "feed.json"))
    arrays, model = load_file(directory / f"feed-{rank}.safetensors"), GPT(**case["model"])
    model.load_state_dict(load_file(directory / "initial.safetensors"))
    ddp = DistributedDataParallel(model)
    asked = case["optimizer"]
    decay = {p["name"]: asked["weight_decay"] * p["decays"] for p in feed["parameters"]}
    groups = [{"params": [p], "weight_decay": decay[name]} for name, p in model.named_parameters()]
    optimizer = torch.optim.AdamW(groups, betas=asked["betas"], eps=asked["eps"])
    record.show_state(model, optimizer, 0)
    for window in feed["updates"]:
        update, batches = window["update"], window["ranks"][rank]
        tokens = sum(arrays[batch["valid"]].sum() for batch in batches)
        dist.all_reduce(tokens)  # of the whole window: all micro-batches of all ranks
        record.show("tokens", tokens, update)
        if tokens > 0:  # else nothing changes
            loss = 0.0
            for k, batch in enumerate(batches):
                inputs, targets, valid = (arrays[batch[key]] for key in ("inputs", "targets", "valid"))
                record.show("inputs", inputs, update, microbatch=k)
                with nullcontext() if k == len(batches) - 1 else ddp.no_sync():
                    losses = F.cross_entropy(ddp(inputs).transpose(1, 2), targets, reduction="none") * valid
                    # DDP averages over ranks, so each rank differentiates W times its part of the window's loss
                    scale = 1 / valid.sum().clamp(min=1) / len(batches) if naive else world / tokens
                    (losses.sum() * scale).backward()
                loss += losses.detach().sum() * scale
            record.show("loss", loss, update, place={"partial": "mean"})
            for name, parameter in model.named_parameters():
                record.show("gradient", parameter.grad, update, name)
            for group in optimizer.param_groups:
                group["lr"] = window["lr"]
            record.show("lr", torch.tensor(window["lr"], dtype=torch.float64), update)
            optimizer.step()
            optimizer.zero_grad()
        record.show_state(model, optimizer, update + 1)
    return case


if __name__ == "__main__":
    directory, target, *flags = sys.argv[1:]
    dist.init_process_group("gloo")
    record, rank = Record(), dist.get_rank()
    case = train(Path(directory), rank, dist.get_world_size(), "--naive" in flags, record)
    record.write(Path(target), case, rank)
    dist.destroy_process_group()
