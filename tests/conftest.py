"""What all tests share: hypothesis on machines whose speed nobody knows, and one thread for tiny tensors."""

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("shared machines", deadline=None)
settings.load_profile("shared machines")
