"""What the plugin uses of the suite. Importing this imports torch: the plugin does so only when the suite is collected."""

from __future__ import annotations

import torch

from equivtests.campaign import keep_records, outcome
from equivtests.chapters.certify import certify
from equivtests.chapters.plan import plan
from equivtests.explain.report import reproduce
from equivtests.mutants.kill import attempt, planted
from equivtests.report import certificate
from equivtests.report.summary import summary
from equivtests.report.tally import markdown, tally, total

torch.set_num_threads(1)  # the tensors are tiny, and the cores are for the ranks

__all__ = [
    "attempt",
    "certificate",
    "certify",
    "keep_records",
    "markdown",
    "outcome",
    "plan",
    "planted",
    "reproduce",
    "summary",
    "tally",
    "total",
]
