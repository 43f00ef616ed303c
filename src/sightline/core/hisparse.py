"""The setting of HiSparse: entries of sparse layers in host memory, and a buffer of hot ones for each row.

Imports nothing heavy, like `config`. Does not know how memory is shared out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields

from sightline.core.errors import ConfigError
from sightline.core.settings import check_settings, setting
from sightline.core.words import answer_unknown

DEFAULT_BUFFER = 2
"""Hot entries of a row without a setting, in multiples of what a token chooses."""


@dataclass(frozen=True, kw_only=True)
class HiSparse:
    """The fields of `hisparse_config`, named as in SGLang."""

    top_k: int | None = setting(None, "Entries that a token chooses: the model's own number, or left out.", low=1)
    device_buffer_size: int | None = setting(
        None, "Hot entries of each row and layer on the device, at least top_k; twice as many without it.", low=1
    )
    host_to_device_ratio: float = setting(
        2.0, "Tokens that the cache holds, in multiples of those that the device alone would hold.", low=1, high=1024
    )

    def __post_init__(self) -> None:
        check_settings(self, ConfigError)
        if None not in (self.top_k, self.device_buffer_size):
            self.buffer_for(self.top_k or 0)

    def buffer_for(self, top_k: int) -> int:
        """Hot entries of a row. Raises `ConfigError` if they are fewer than what one token chooses."""
        size = DEFAULT_BUFFER * top_k if self.device_buffer_size is None else self.device_buffer_size
        if size < top_k:
            raise ConfigError(
                f"expected device_buffer_size of at least {top_k}, as many entries as a token chooses, got {size}; "
                "raise it, or leave it out"
            )
        return size


def read_hisparse(is_enabled: bool, given: str | Mapping[str, object] | None) -> HiSparse | None:
    """The settings' value; None if it is not enabled. Raises `ConfigError` with what is wrong."""
    if not is_enabled:
        if given is not None:
            raise ConfigError(
                "expected enable_hisparse with hisparse_config, got hisparse_config alone; add enable_hisparse"
            )
        return None
    values: object = {} if given is None else given
    if isinstance(given, str):
        try:
            values = json.loads(given)
        except ValueError as error:
            raise ConfigError(f"expected hisparse_config as JSON, got {given!r}; correct it: {error}") from None
    if not isinstance(values, Mapping):
        raise ConfigError(
            f'expected hisparse_config such as {{"device_buffer_size": 4096}}, got {given!r}; use a mapping'
        )
    known = {each.name for each in fields(HiSparse)}
    for name in values:
        if name not in known:
            raise ConfigError(answer_unknown(str(name), known, "a field of hisparse_config", {}))
    return HiSparse(**values)
