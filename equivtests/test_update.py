"""Chapter 1, the update: what N processes made of a window is what one device would have made of it."""


def test_every_update_is_that_of_one_device(update_run, certify):
    """Samples, tokens, loss, gradients, norm, clipping, rate, weights and optimizer state, in this order."""
    certify(update_run)
