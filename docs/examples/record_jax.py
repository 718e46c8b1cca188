"""Multi-process JAX that writes a record directory of a linear or mlp case with SGD. It imports nothing of equivtests.

    python -m equivtests export CASE_DIR --case linear-sgd-w2
    for rank in 0 1; do python record_jax.py CASE_DIR RECORD_DIR $rank localhost:29400 & done; wait
    python -m equivtests judge RECORD_DIR

The address is the first process's, with any free port. With --naive every micro-batch is divided by its own tokens, and
processes are averaged: a common mistake.
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file


def outputs(weights, x):
    """linear.weight, or layers.0.weight, layers.1.weight, … with ReLU between them; biases where there are any."""
    layers = sorted(name.removesuffix(".weight") for name in weights if name.endswith(".weight"))
    for layer in layers:
        x = x @ weights[f"{layer}.weight"].T + weights.get(f"{layer}.bias", 0)
        x = x if layer == layers[-1] else jax.nn.relu(x)
    return x


@jax.jit
def loss_sum(weights, inputs, targets, valid):
    """Sum over valid positions of half the squared error."""
    return 0.5 * jnp.sum((outputs(weights, inputs) - targets) ** 2 * valid[..., None])


class Processes:
    """All processes, one device each, along one axis."""

    def __init__(self, rank, world, address):
        jax.distributed.initialize(address, world, rank)
        mesh = jax.sharding.Mesh(jax.devices(), ("processes",))
        self.cut, whole = (NamedSharding(mesh, PartitionSpec(*axis)) for axis in (["processes"], []))
        self.add = jax.jit(lambda tree: jax.tree.map(lambda x: x.sum(0), tree), out_shardings=whole)

    def sum(self, tree):
        """Every array added up over processes: rows of one global array, which the compiler makes an all-reduce of."""
        rows = [jax.make_array_from_process_local_data(self.cut, np.asarray(x)[None]) for x in jax.tree.leaves(tree)]
        return jax.tree.unflatten(jax.tree.structure(tree), [np.asarray(x.addressable_data(0)) for x in self.add(rows)])


class Record:
    """What one rank shows. Without a place, an array is this rank's copy of the whole tensor."""

    def __init__(self):
        self.entries, self.arrays = [], {}

    def show(self, kind, value, update, name=None, **more):
        self.arrays[str(len(self.entries))] = np.array(value)
        self.entries.append({"kind": kind, "name": name, "update": update, **more})

    def show_weights(self, weights, update):
        for name, weight in weights.items():
            self.show("weight", weight, update, name)

    def write(self, directory, case, rank):
        directory.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            observes = sorted({entry["kind"] for entry in self.entries})
            strategy = {"name": "my-jax", "arithmetic": "own", "observes": observes}
            header = {"format": 2, "case": case, "strategy": strategy, "world": case["layout"]["dp"]}
            (directory / "record.json").write_text(json.dumps(header))
        (directory / f"rank-{rank}.json").write_text(json.dumps({"entries": self.entries}))
        save_file(self.arrays, directory / f"rank-{rank}.safetensors")


def train(directory, rank, case, processes, naive, record):
    feed, world = json.loads((directory / "feed.json").read_text()), case["layout"]["dp"]
    arrays, weights = (load_file(directory / f"{name}.safetensors") for name in (f"feed-{rank}", "initial"))
    record.show_weights(weights, 0)
    for window in feed["updates"]:
        update, batches = window["update"], window["ranks"][rank]
        tokens = processes.sum(np.int32(sum(arrays[batch["valid"]].sum() for batch in batches)))
        record.show("tokens", tokens, update)
        if tokens > 0:  # else nothing changes
            loss, gradients = np.zeros((), feed["dtype"]), jax.tree.map(np.zeros_like, weights)
            for k, batch in enumerate(batches):
                inputs, targets, valid = (arrays[batch[key]] for key in ("inputs", "targets", "valid"))
                record.show("inputs", inputs, update, microbatch=k)
                divisor = max(1, valid.sum()) * len(batches) * world if naive else tokens
                part, gradient = jax.value_and_grad(loss_sum)(weights, inputs, targets, valid)
                loss = loss + part / divisor
                gradients = jax.tree.map(lambda total, g, by=divisor: total + g / by, gradients, gradient)
            gradients = processes.sum(gradients)
            record.show("loss", loss, update, place={"partial": "sum"})
            record.show("lr", np.float64(window["lr"]), update)
            for name, gradient in gradients.items():
                record.show("gradient", gradient, update, name)
            weights = jax.tree.map(lambda w, g, lr=window["lr"]: w - w.dtype.type(lr) * g, weights, gradients)
        record.show_weights(weights, update + 1)


if __name__ == "__main__":
    directory, target, rank, address, *flags = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    case, record = json.loads(Path(directory, "case.json").read_text()), Record()
    jax.config.update("jax_enable_x64", case["precision"]["weights"] == "float64")
    processes = Processes(int(rank), case["layout"]["dp"], address)
    train(Path(directory), int(rank), case, processes, "--naive" in flags, record)
    record.write(Path(target), case, int(rank))
    jax.distributed.shutdown()
