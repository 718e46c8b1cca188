"""What this machine can run."""

from __future__ import annotations

import importlib.util
import os

import torch
import torch.distributed as dist

from equivtests import __version__
from equivtests.report.certificate import environment

TESTED = "2.13"
OPTIONAL = ("hypothesis", "xdist", "deepspeed", "lightning", "accelerate", "jax")


def doctor() -> list[str]:
    """Lines for a terminal: versions, cores, backends, devices, optional packages."""
    facts = environment()
    cores = len(os.sched_getaffinity(0))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    backends = [b for b, there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())) if there]
    lines = [f"equivtests {__version__}", *(f"{name:16} {value}" for name, value in facts.items())]
    if not facts["torch"].startswith(TESTED):
        lines.append(f"{'':16} tested on torch {TESTED}; from 2.11 on by intent")
    lines += [
        f"{'cores':16} {cores}" + ("" if cores >= 2 else " (four ranks will be slow)"),
        f"{'backends':16} {', '.join(backends) or 'none: distributed torch is missing'}",
        f"{'GPUs':16} {gpus or 'none: --device cuda and --backend nccl are refused'}",
        f"{'scheduling':16} {scheduling()}",
    ]
    there = [name for name in OPTIONAL if importlib.util.find_spec(name)]
    lines.append(f"{'optional':16} {', '.join(there) or 'none'}")
    runs = "pytest --nproc 4 equivtests/" if "gloo" in backends else "nothing: gloo is needed"
    return [*lines, f"{'can run':16} {runs}"]


def scheduling() -> str:
    """Whether ranks may use the batch scheduling class, which makes gloo faster with more ranks than cores."""
    before = os.sched_getscheduler(0)
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError:
        return "batch class refused: ranks run, slower"
    os.sched_setscheduler(0, before, os.sched_param(0))
    return "batch class allowed"
