"""The tensors of a layer's inputs, by name: changed, moved and listed. Does not know what they mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from sightline.attention.compressed.inputs import CompressionInputs
from sightline.attention.contract import AttentionInputs

_Inputs = TypeVar("_Inputs", bound=AttentionInputs | CompressionInputs)


def map_inputs(inputs: _Inputs, change: Callable[[Tensor], Tensor], names: Sequence[str] = ("q", "k", "v")) -> _Inputs:
    """Returns the inputs with the named tensors, or all tensors of a named part, changed in the same way. Tensors of
    parts are named as in `entries.values`."""
    changed: dict[str, Any] = {}
    for name in names:
        first, _, rest = name.partition(".")
        value = changed.get(first, vars(inputs)[first])
        inside = rest and value is not None
        changed[first] = map_inputs(value, change, (rest,)) if inside else _changed(value, change)
    return replace(inputs, **changed)


def tensor_at(inputs: Any, name: str) -> Any:
    """Returns an input by its name, or by that of a part, as in `entries.values`; None if it is missing."""
    for part in name.split("."):
        inputs = None if inputs is None else vars(inputs)[part]
    return inputs


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    match value:
        case None:
            return None
        case tuple():
            return type(value)(*(_changed(each, change) for each in value))
        case CompressionInputs():
            return map_inputs(value, change, tuple(vars(value)))
        case _:
            return change(value)


def tensors_of(inputs: AttentionInputs) -> dict[str, Tensor]:
    """Returns all tensors of the inputs, by name."""
    named: dict[str, Tensor] = {}
    for name, value in vars(inputs).items():
        match value:
            case None:
                continue
            case tuple():
                parts = zip(type(value).__annotations__, value, strict=True)
                named |= {f"{name}.{part}": each for part, each in parts if each is not None}
            case CompressionInputs():
                named |= {f"{name}.{part}": each for part, each in vars(value).items()}
            case _:
                named[name] = value
    return named


def to_device(inputs: _Inputs, device: torch.device) -> _Inputs:
    """Copies the inputs, even to a CPU: a backend that changes its inputs must not change the oracle's."""
    names = tuple(field.name for field in fields(inputs))
    return map_inputs(inputs, lambda tensor: tensor.to(device, copy=True), names)
