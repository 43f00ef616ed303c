"""Taking weights out of a checkpoint, with every name and shape checked and none left over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from sightline.core.errors import CheckpointError
from sightline.layers.linear import Linear, Projection
from sightline.models.loading.checkpoint import Checkpoint

DERIVED_SUFFIXES = (".rotary_emb.inv_freq",)
"""Tensors that older checkpoints store although the config determines them."""


class WeightReader:
    """Hands out tensors in the compute dtype and remembers which were taken."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        on_progress: Callable[[int, int], None],
    ) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._on_progress = on_progress
        self._taken: set[str] = set()

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """The tensor, in `dtype` or the compute dtype. Raises where it is missing or of another shape."""
        info = self._checkpoint.tensors.get(name)
        if info is None:
            raise CheckpointError(
                f"expected tensor {name} in {self._checkpoint.location}, got none; the file is incomplete"
            )
        if info.shape != shape:
            raise CheckpointError(
                f"expected {name} of shape {shape}, as the config says, got {info.shape} in "
                f"{self._checkpoint.location}; config and weights do not belong together"
            )
        self._taken.add(name)
        self._on_progress(len(self._taken), len(self._checkpoint.tensors))
        return self._checkpoint.load(name).to(device=self._device, dtype=dtype or self._dtype)

    def projection(self, sizes: Mapping[str, int], in_features: int, *, bias: bool) -> Projection:
        """One product in place of several with the same input, their outputs side by side.

        `sizes` gives the output size of each stored projection, `name`.weight, with `name`.bias where there is one.
        """
        weights = [self.take(f"{name}.weight", (size, in_features)) for name, size in sizes.items()]
        biases = [self.take(f"{name}.bias", (size,)) for name, size in sizes.items()] if bias else []
        return Linear(_joined(weights), _joined(biases) if biases else None)

    def finish(self, ignorable: Iterable[str] = ()) -> None:
        """Raises where the checkpoint holds tensors that the model did not take: they would change the result."""
        left = {name for name in self._checkpoint.tensors if not name.endswith(DERIVED_SUFFIXES)}
        left -= self._taken | set(ignorable)
        if left:
            names = ", ".join(sorted(left)[:5])
            raise CheckpointError(
                f"expected no tensor beyond the model's own in {self._checkpoint.location}, got {len(left)} "
                f"that it would ignore: {names}"
            )


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
