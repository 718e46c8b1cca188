"""Mutants of the JAX adapter."""
