"""Torch's own data parallelism, driven as its users drive it."""
