"""The single-device oracle, written separately from `models/`: plain functions, no torch.distributed."""
