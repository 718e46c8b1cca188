"""Mutants: adapters with one planted, real-world mistake each, a few lines over a correct parent."""
