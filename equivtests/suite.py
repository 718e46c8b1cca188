"""What the plugin uses of the suite. Importing this imports torch: the plugin does so only when the suite is collected."""

from __future__ import annotations

from equivtests.chapters.certify import certify
from equivtests.chapters.plan import plan
from equivtests.chapters.records import write_record
from equivtests.chapters.run import Result
from equivtests.explain.report import reproduce
from equivtests.mutants.kill import attempt, planted
from equivtests.report import certificate
from equivtests.report.tally import declared_rules, markdown, table, tally, total

__all__ = [
    "Result",
    "attempt",
    "certificate",
    "certify",
    "declared_rules",
    "markdown",
    "plan",
    "planted",
    "reproduce",
    "table",
    "tally",
    "total",
    "write_record",
]
