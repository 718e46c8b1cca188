"""Collectives as they are issued, seen by a dispatch mode: whoever issues them (DDP's C++ reducer, FSDP, functional
collectives), every one passes torch's dispatcher once.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from equivtests.record.observation import Collective

_OPERATIONS: dict[str, tuple[str, str, bool]] = {
    # operator: (operation, argument that holds the payload, whether that is one rank's part of the full tensor)
    "c10d::allreduce_": ("all_reduce", "tensors", False),
    "c10d::allreduce_coalesced_": ("all_reduce", "tensors", False),
    "c10d::allgather_": ("all_gather", "output_tensors", False),
    "c10d::_allgather_base_": ("all_gather", "output_tensor", False),
    "c10d::allgather_coalesced_": ("all_gather", "output_lists", False),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", "outputs", False),
    "c10d::reduce_scatter_": ("reduce_scatter", "input_tensors", False),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", "input_tensor", False),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs", False),
    "c10d::broadcast_": ("broadcast", "tensors", False),
    "c10d::alltoall_": ("all_to_all", "input_tensors", False),
    "c10d::alltoall_base_": ("all_to_all", "input", False),
    "c10d::send": ("send", "tensors", False),
    "c10d::recv_": ("recv", "tensors", False),
    "c10d::recv_any_source_": ("recv", "tensors", False),
    "c10d::barrier": ("barrier", "", False),
    "c10d::monitored_barrier_": ("barrier", "", False),
    "c10d::reduce_": ("reduce", "tensors", False),
    "c10d::gather_": ("gather", "input_tensors", True),
    "c10d::scatter_": ("scatter", "output_tensors", True),
    "_c10d_functional::all_reduce": ("all_reduce", "input", False),
    "_c10d_functional::all_reduce_": ("all_reduce", "input", False),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", "inputs", False),
    "_c10d_functional::all_reduce_coalesced_": ("all_reduce", "inputs", False),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", "input", True),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", "input", True),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", "inputs", True),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", "input", False),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce_scatter", "input", False),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", "inputs", False),
    "_c10d_functional::broadcast": ("broadcast", "input", False),
    "_c10d_functional::broadcast_": ("broadcast", "input", False),
    "_c10d_functional::all_to_all_single": ("all_to_all", "input", False),
    "_c10d_functional::isend": ("send", "tensor", False),
    "_c10d_functional::irecv": ("recv", "tensor", False),
}
_SILENT = frozenset({"c10d::check_for_nan", "_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"})


class CollectiveRecorder(TorchDispatchMode):
    """Appends every collective issued under it to `collectives`. update: gives the number of the update in progress."""

    def __init__(self, update: Callable[[], int]) -> None:
        super().__init__()
        self.update = update
        self.collectives: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # let the DTensor turn itself into local operations first; those come here again
        name = func._schema.name
        if name.startswith(("c10d::", "_c10d_functional::")) and name not in _SILENT:
            self._note(name, _named_arguments(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, arguments: dict[str, Any]) -> None:
        group = _group(arguments)
        if name == "_c10d_functional::batch_p2p_ops":
            listed = zip(arguments["op_list"], arguments["peer_list"], arguments["tensors"], strict=True)
            for kind, peer, tensor in listed:
                self._append("send" if "send" in kind else "recv", _pair(group, peer), [tensor], 1)
            return
        operation, payload, part = _OPERATIONS.get(name, (name, "", False))
        if operation in ("send", "recv"):
            group = _pair(group, arguments.get("dst", arguments.get("src")))
        self._append(operation, group, _tensors(arguments.get(payload)), len(group) if part else 1)

    def _append(self, operation: str, group: tuple[int, ...], tensors: list[torch.Tensor], times: int) -> None:
        elements = times * sum(t.numel() for t in tensors)
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        self.collectives.append(Collective(operation, group, elements, dtype, self.update()))


def _pair(group: tuple[int, ...], peer: int | None) -> tuple[int, ...]:
    """This rank and the other end of a message (None: unknown), of which its group has the number `peer`."""
    return group if peer is None else tuple(sorted({dist.get_rank(), group[peer]}))


def _named_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs


def _tensors(payload: Any) -> list[torch.Tensor]:
    """All tensors of a tensor, a list of tensors, or a list of lists."""
    if isinstance(payload, torch.Tensor):
        return [payload]
    return [tensor for item in payload or () for tensor in _tensors(item)]


def _group(arguments: dict[str, Any]) -> tuple[int, ...]:
    group: Any = arguments.get("process_group", arguments.get("group_name"))
    if isinstance(group, str):
        group = dist.distributed_c10d._resolve_process_group(typing.cast(Any, group))
    elif isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    return tuple(dist.get_process_group_ranks(group))
