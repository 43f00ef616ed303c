"""The interface of a model on disk, the same for every file format.

Does not know formats, nor which models can be run.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from sightline.core.errors import CheckpointError
from sightline.kernels.block_weights import BlockWeights, CodeBits
from sightline.kernels.coded_weights import CodedWeights, CodeForm
from sightline.kernels.packed_weights import WeightForm
from sightline.models.loading.generation import GenerationDefaults
from sightline.text.tokenizers.tokenizer import Tokenizer

PLAIN_TYPES = frozenset({"F64", "F32", "F16", "BF16", "I64", "I32", "BOOL"})
"""Stored types that are not quantised: numbers, and tables of tokens."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's description, known without reading its data."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    """The dtype that `Checkpoint.load` returns: the stored one, or one that holds the decoded values without loss."""
    stored_as: str
    """The format's own name of the stored type: "BF16", "Q4_1"."""
    blocks: CodeBits | None = None
    """The width of its codes if `Checkpoint.load_blocks` supports it, otherwise None."""
    packed: WeightForm = WeightForm.PLAIN
    """The form that `Checkpoint.load_packed` returns, or `PLAIN` if it does not support the tensor."""

    codes: CodeForm | None = None
    """The form that `Checkpoint.load_codes` returns, or None if it does not support the tensor."""

    @property
    def is_quantised(self) -> bool:
        """True if the file stores codes instead of the numbers themselves."""
        return not set(self.stored_as.split("+")) <= PLAIN_TYPES


class Checkpoint(ABC):
    """A model on disk. Names, layouts and config keys are those of Hugging Face, whatever the format."""

    def __init__(
        self,
        location: Path,
        config: Mapping[str, object],
        tensors: Mapping[str, TensorInfo],
        generation: GenerationDefaults,
    ) -> None:
        self.location = location
        self.config = config
        """The fields of a Hugging Face config.json."""
        self.tensors = tensors
        """By Hugging Face name, in file order."""
        self.generation = generation

    @property
    def identity(self) -> str:
        """Names the weights without reading them: where they are, and the name, shape and stored type of each."""
        described = {name: (info.shape, info.stored_as) for name, info in self.tensors.items()}
        return f"{self.location.resolve()} {hashlib.sha256(repr(described).encode()).hexdigest()}"

    def load(self, name: str) -> torch.Tensor:
        """The tensor `name`, as `tensors[name]` describes it. What a file stores is on the CPU, and may be mapped."""
        self._check_name(name)
        return self._read(name)

    def load_blocks(self, name: str) -> BlockWeights:
        """The quantised tensor `name` on the CPU, a copy that dequantises to what `load` returns.

        Only for tensors with `TensorInfo.blocks`.
        """
        self._check_name(name)
        if self.tensors[name].blocks is None:
            raise CheckpointError(
                f"{self.location}: expected {name!r} in blocks along its rows, got {self.tensors[name].stored_as}. "
                "Load it dequantised."
            )
        return self._read_blocks(name)

    def load_codes(self, name: str) -> CodedWeights:
        """The quantised tensor `name` on the CPU as it is stored, a copy. Only for tensors with `TensorInfo.codes`."""
        self._check_name(name)
        if self.tensors[name].codes is None:
            raise CheckpointError(
                f"{self.location}: expected {name!r} in codes along its rows, got {self.tensors[name].stored_as}. "
                "Load it dequantised."
            )
        return self._read_codes(name)

    def load_packed(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes and scales of the tensor `name` on the CPU, in the form `TensorInfo.packed`, which is not `PLAIN`.

        Experts that are stored as one tensor are the first dimension of both. May be mapped from the file.
        """
        self._check_name(name)
        return self._read_packed(name)

    def load_scales(self, name: str) -> torch.Tensor | None:
        """Numbers of which at least one is NaN or infinite if `load` would return such an element; None if unknown."""
        self._check_name(name)
        return None

    def file_of(self, name: str) -> Path:
        """The file that stores the tensor `name`."""
        self._check_name(name)
        return self.location

    @abstractmethod
    def load_tokenizer(self) -> Tokenizer:
        """Builds the model's tokenizer."""

    @abstractmethod
    def _read(self, name: str) -> torch.Tensor:
        """Reads one of `tensors`."""

    def _read_blocks(self, name: str) -> BlockWeights:
        """Reads the blocks of one of `tensors` that has blocks. Formats without blocks need not override this."""
        raise NotImplementedError(f"{type(self).__name__} describes {name!r} as blocks and cannot read them")

    def _read_codes(self, name: str) -> CodedWeights:
        """Reads the codes of one of `tensors` that has codes. Formats without codes need not override this."""
        raise NotImplementedError(f"{type(self).__name__} describes {name!r} as codes and cannot read them")

    def _read_packed(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads one of `tensors` that is packed. Formats without packed tensors need not override this."""
        raise NotImplementedError(f"{type(self).__name__} describes {name!r} as packed and cannot read it so")

    def _check_name(self, name: str) -> None:
        if name not in self.tensors:
            raise CheckpointError(
                f"{self.location}: expected a tensor {name!r}, got {len(self.tensors)} tensors without it. "
                "The checkpoint does not fit its config: get it again."
            )
