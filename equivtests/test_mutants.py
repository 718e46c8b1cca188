"""The suite's own test: every planted mistake is found, by the right quantity, where the correct parent passes."""


def test_planted_mistake_is_found(mutant, kill):
    """Collected with --mutants only."""
    kill(mutant)
