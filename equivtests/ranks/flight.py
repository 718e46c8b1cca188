"""The newest collectives of a rank, told by a side thread even while the rank is stuck.

torch's flight recorder notes every collective of gloo and NCCL (point-to-point operations of gloo it does not). The
thread gets the interpreter because waiting for a peer releases it.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import torch

KEPT = 5
_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Byte": "uint8",
    "Char": "int8",
    "Bool": "bool",
}


def answer_requests(path: Path) -> None:
    """From now on SIGUSR2 makes this process write its newest collectives to `path` (a JSON list of lines)."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    threading.Thread(target=_answer, args=(path,), name="flight", daemon=True).start()


def _answer(path: Path) -> None:
    while True:
        signal.sigwait({signal.SIGUSR2})
        part = path.with_suffix(".part")
        part.write_text(json.dumps(last_collectives()))
        os.replace(part, path)


def last_collectives() -> list[str]:
    """Such as "all_reduce #3 [64] float32 in group 0", oldest first. Empty if torch cannot tell."""
    return [_line(entry) for entry in _entries()[-KEPT:]]


def world_collectives() -> int:
    """Number of the newest collective on the default group; ranks that are in step agree on it."""
    numbers = [e["collective_seq_id"] for e in _entries() if e["process_group"][0] == "0" and not e["is_p2p"]]
    return numbers[-1] if numbers else 0


def _entries() -> list[dict[str, Any]]:
    name = "_dump_nccl_trace_json" if _nccl() else "_dump_fr_trace_json"
    try:
        return list(json.loads(getattr(torch._C._distributed_c10d, name)()).get("entries", []))
    except (AttributeError, RuntimeError, ValueError):
        return []


def _nccl() -> bool:
    return torch.distributed.is_initialized() and torch.distributed.get_backend() == "nccl"


def _line(entry: dict[str, Any]) -> str:
    operation = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
    sizes = " ".join(str(size) for size in entry["input_sizes"])
    dtypes = " ".join(dict.fromkeys(_DTYPES.get(d, d) for d in entry["input_dtypes"]))
    return f"{operation} #{entry['collective_seq_id']} {sizes} {dtypes} in group {entry['process_group'][0]}"
