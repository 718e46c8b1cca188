"""Chapter 3, restore: training goes on from a checkpoint as if it had never stopped."""


def test_training_goes_on_from_a_checkpoint_in_fresh_ranks(restore_run, certify):
    """Every state survives, and the updates that follow are those of one device."""
    certify(restore_run)
