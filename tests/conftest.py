"""One thread a test process: the tests' tensors are tiny, and the processes run side by side.

Without a GPU, Triton's kernels run in its interpreter, which must be chosen before anything imports triton.
"""

import os

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
