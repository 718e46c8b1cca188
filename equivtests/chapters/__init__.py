"""The chapters of the contract: how a run of each is made on ranks and judged."""
