"""The supported quantisation formats of safetensors folders. The only module that knows them by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from sightline.core.errors import UnsupportedModelError
from sightline.models.loading.safetensors import fp8_blocks, mxfp4
from sightline.models.loading.safetensors.packed import PackedFormat

FORMATS: Mapping[str, Callable[[Mapping[str, object]], PackedFormat]] = MappingProxyType(
    {mxfp4.METHOD: mxfp4.read_section, fp8_blocks.METHOD: fp8_blocks.read_section}
)


def read_format(section: object) -> PackedFormat:
    """The format that a `quantization_config` describes. Raises if it is not supported."""
    method = section.get("quant_method") if isinstance(section, Mapping) else section
    if not isinstance(section, Mapping) or not isinstance(method, str) or method not in FORMATS:
        raise UnsupportedModelError(
            f"expected no 'quantization_config', or one of the method {' or '.join(map(repr, FORMATS))}, "
            f"got the method {method!r}: the stored tensors are not the weights themselves. "
            "Use the unquantised model, or a GGUF file."
        )
    return FORMATS[method](section)
