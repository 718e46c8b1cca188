"""Mutants of adapters for outside frameworks: each needs its framework to be imported."""
