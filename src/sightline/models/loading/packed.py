"""What a quantisation format of safetensors folders has to give: the tensors that its stored ones stand for.

Owns the contract. Does not know formats.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping

from torch import Tensor

from sightline.core.errors import UnsupportedModelError
from sightline.models.loading.checkpoint import TensorInfo
from sightline.models.loading.safetensors_file import SafetensorsFile


class PackedTensor(ABC):
    """Stored tensors that stand for one."""

    @property
    @abstractmethod
    def parts(self) -> tuple[str, ...]:
        """The names of the stored ones."""

    @abstractmethod
    def describe(self) -> TensorInfo:
        """The tensor that they stand for; raises where they do not fit each other."""

    @abstractmethod
    def read(self) -> Tensor:
        """The tensor that they stand for."""


class PackedFormat(ABC):
    """A format with its settings, as a `quantization_config` gives them."""

    @abstractmethod
    def pair_tensors(self, owners: Mapping[str, SafetensorsFile]) -> Mapping[str, PackedTensor]:
        """The tensors that some of the stored ones stand for, by name; a part without the others is an error."""


def check_settings(method: str, section: Mapping[str, object], known: Collection[str]) -> None:
    """Raises where a section has settings that the format does not know."""
    unknown = set(section) - set(known)
    if unknown:
        raise UnsupportedModelError(
            f"expected an {method} 'quantization_config' with {', '.join(sorted(known))} only, got "
            f"{', '.join(sorted(unknown))}. Use the unquantised model, or a GGUF file."
        )
