"""One thread a test process: the tests' tensors are tiny, and the processes run side by side."""

import torch

torch.set_num_threads(1)
