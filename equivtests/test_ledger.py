"""Chapter 2, the ledger: what travels between ranks and what they keep is what the strategy implies."""


def test_collectives_and_bytes_are_those_of_the_layout(ledger_run, certify):
    """An "FSDP" that shards nothing, or a compression that compresses nothing, is found here."""
    certify(ledger_run)
