"""What the ranks observed: plain arrays with the place they belong to. Ranks only record; they never judge."""
