"""The models as torch modules, offered to adapters. Written apart from `reference/`, which must agree with them."""
