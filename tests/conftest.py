"""One thread a test process: the tests' tensors are tiny, and the processes run side by side.

Without a GPU, Triton's kernels run in its interpreter, which must be chosen before anything imports triton. A shell
that runs the tests in the background has them, and every process that they start, ignore Ctrl-C: they must not.
"""

import os
import signal

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
