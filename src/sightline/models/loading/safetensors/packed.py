"""The interface of quantisation formats of safetensors folders, where two stored tensors stand for one.

Does not know formats.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor

from sightline.core.errors import CheckpointError, UnsupportedModelError
from sightline.kernels.packed_weights import WeightForm
from sightline.models.loading.checkpoint import TensorInfo
from sightline.models.loading.safetensors.file import SafetensorsFile


@dataclass(frozen=True)
class PackedTensor(ABC):
    """A tensor that is stored as codes and scales, each in its own file of the model."""

    parts: tuple[str, str]
    """The names of the stored codes and scales."""
    codes: SafetensorsFile
    scales: SafetensorsFile

    @abstractmethod
    def describe(self) -> TensorInfo:
        """Describes the decoded tensor. Raises if the stored ones do not fit each other."""

    @abstractmethod
    def read(self) -> Tensor:
        """Decodes the tensor."""

    @abstractmethod
    def read_packed(self) -> tuple[Tensor, Tensor]:
        """The codes and scales in the form that the description names, if any."""


@dataclass(frozen=True)
class PackedFormat(ABC):
    """A format with its section of the config, `quantization_config`."""

    section: Mapping[str, object]

    @abstractmethod
    def pair_tensors(self, owners: Mapping[str, SafetensorsFile]) -> Mapping[str, PackedTensor]:
        """Finds the packed tensors among the stored ones, by name. Raises if a part is missing."""

    @property
    @abstractmethod
    def expert_form(self) -> WeightForm:
        """The form of experts in a model of this format; `PLAIN` if they are decoded when they are read."""


UNCONVERTED = "modules_to_not_convert"
"""The setting that lists modules whose tensors are not packed."""


def check_unconverted(method: str, section: Mapping[str, object], packed: Collection[str]) -> None:
    """Raises if a packed tensor belongs to a module that the section lists as not packed."""
    listed = section.get(UNCONVERTED) or []
    if not isinstance(listed, list) or not all(isinstance(module, str) for module in listed):
        raise UnsupportedModelError(
            f"expected {UNCONVERTED!r} of an {method} 'quantization_config' to be a list of names, got {listed!r}."
        )
    for name in packed:
        module = name.removesuffix(".weight")
        found = [each for each in listed if _covers(each, module)]
        if found:
            raise CheckpointError(
                f"expected {name!r} unpacked, because {UNCONVERTED!r} lists {found[0]!r}, got it in {method}. Correct "
                "the list in config.json, or get the model again."
            )


def _covers(listed: str, module: str) -> bool:
    """True if a listed name matches the module, a module around it, or its last part. `*` matches anything."""
    return fnmatchcase(module, listed) or fnmatchcase(module, f"{listed}.*") or module.endswith(f".{listed}")


def check_settings(method: str, section: Mapping[str, object], known: Collection[str]) -> None:
    """Raises if a section has settings that the format does not know."""
    unknown = set(section) - set(known)
    if unknown:
        raise UnsupportedModelError(
            f"expected an {method} 'quantization_config' with {', '.join(sorted(known))} only, got "
            f"{', '.join(sorted(unknown))}. Use the unquantised model, or a GGUF file."
        )
