"""The judge: a pure function of (case, strategy, record, expectation). It never runs a rank."""
