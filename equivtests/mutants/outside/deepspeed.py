"""Mutants of the DeepSpeed adapter."""
