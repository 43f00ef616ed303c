"""The dtype of the simulated model, which represents every hash exactly."""

from __future__ import annotations

import torch

DTYPE = torch.float64
