"""Data parallelism written from collectives, in small steps that a mutant can override one at a time."""
