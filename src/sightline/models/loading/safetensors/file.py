"""One safetensors file: the names, shapes and data of its tensors.

A typed wrapper of the `safetensors` package, which checks the header against the file. Does not know folders.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open

from sightline.core.errors import CheckpointError, UnsupportedModelError
from sightline.models.loading.checkpoint import TensorInfo

_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
)
"""By the name in the file. Other types hold no weights, or quantised weights whose scales are stored elsewhere."""

_TABLE_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"I64": torch.int64, "I32": torch.int32, "BOOL": torch.bool}
)
TOKEN_TABLES = frozenset({"d2t", "t2d", "tid2eid", "token_ordering"})
"""Tensors that are no weights: drafters have them, to translate between their tokens and those of their target, or to
order tokens, and routers, to list the experts of each token."""


class SafetensorsFile:
    """An open, memory-mapped file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._handle = cast(Any, safe_open(path, framework="pt"))  # the package's stubs are untyped
            self.names: list[str] = list(self._handle.keys())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path}: expected a readable safetensors file, got: {error}. The file is damaged or not "
                "complete: get it again."
            ) from error

    def describe(self, name: str) -> TensorInfo:
        view = self._handle.get_slice(name)
        stored_as = str(view.get_dtype())
        known = _TABLE_DTYPES if name.rpartition(".")[2] in TOKEN_TABLES else _DTYPES
        dtype = known.get(stored_as)
        if dtype is None:
            raise UnsupportedModelError(
                f"{self.path}: expected {name!r} in one of {', '.join(known)}, got {stored_as}. "
                "Use an unquantised version of the model."
            )
        return TensorInfo(tuple(view.get_shape()), dtype, stored_as)

    def stored_as(self, name: str) -> str:
        """The type of a tensor, as the file names it."""
        return str(self._handle.get_slice(name).get_dtype())

    def packed_shape(self, name: str, *expected: str) -> tuple[int, ...]:
        """The shape of a part of a packed tensor, which must be stored in one of the `expected` types."""
        stored_as = self.stored_as(name)
        if stored_as not in expected:
            raise CheckpointError(
                f"{self.path}: expected {name!r} in {' or '.join(expected)}, got {stored_as}. The file is damaged: get "
                "it again."
            )
        return tuple(self._handle.get_slice(name).get_shape())

    def read(self, name: str) -> torch.Tensor:
        tensor = self._handle.get_tensor(name)
        assert isinstance(tensor, torch.Tensor)
        return tensor
