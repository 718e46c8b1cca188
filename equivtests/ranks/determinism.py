"""Everything that makes two runs of one case give the same bits, in one place."""

from __future__ import annotations

import os
import random

import numpy as np
import torch

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NVIDIA_TF32_OVERRIDE": "0",
}
"""Set before the libraries that read them are initialized. The fork server sets the threads to 1; else
the user's values stand."""


def deterministic(device: str) -> dict[str, str]:
    """Make this process deterministic and return every setting as it now is, for the certificate.

    On CUDA some operations have no deterministic kernel; there torch warns instead of raising.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=device.startswith("cuda"))
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    reseed()
    return _settings()


def reseed() -> None:
    """Put process-wide state that an adapter may have moved back to where every run starts."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)


def _settings() -> dict[str, str]:
    settings = {name: os.environ[name] for name in ENVIRONMENT}
    settings |= {
        "torch": str(torch.__version__),  # a subclass of str, which would make the parent import torch
        "threads": str(torch.get_num_threads()),
        "deterministic_algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "deterministic_warn_only": str(torch.is_deterministic_algorithms_warn_only_enabled()),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn.allow_tf32": str(torch.backends.cudnn.allow_tf32),
        "cudnn.benchmark": str(torch.backends.cudnn.benchmark),
        "scheduling": "batch" if os.sched_getscheduler(0) == os.SCHED_BATCH else "default",
    }
    return settings
