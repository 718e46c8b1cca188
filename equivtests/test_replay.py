"""Chapter 4, replay: gradients that arrive in any order make a run that can be judged, and run again."""


def test_a_recorded_order_of_arrival_gives_the_same_run_again(replay_run, certify):
    """Whatever the order was, it is judged; in fresh ranks, in this order, every gradient, weight and state is the same."""
    certify(replay_run)
