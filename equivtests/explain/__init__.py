"""From a failed check to words: simple factors, ranks that disagree, the semantics that would explain it."""
