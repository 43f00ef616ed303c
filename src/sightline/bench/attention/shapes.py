"""The shapes on which attention is measured, and the least work that each requires."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

import torch

from sightline.attention.spec import EntrySpec, LatentSpec, SoftmaxSpec
from sightline.core.errors import ConfigError


class RowKind(Enum):
    """Whether the rows of a shape decode or prefill."""

    DECODE = "decode"
    """Each row has one new token, the last of `length`."""
    PREFILL = "prefill"
    """All `length` tokens of each row are new."""


@dataclass(frozen=True)
class Cost:
    """The least number of bytes to move and operations to compute."""

    num_bytes: int
    operations: int
    """A multiplication and an addition count as two."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.num_bytes + other.num_bytes, self.operations + other.operations)


@dataclass(frozen=True)
class Shape:
    """One step of one layer: rows of equal length."""

    family: str
    """Shapes of a family differ only in rows and lengths."""
    row_kind: RowKind
    spec: EntrySpec
    num_rows: int
    length: int
    """Tokens of each row after the step."""
    dtype: torch.dtype = torch.bfloat16
    page_size: int = 64
    is_swept: bool = False
    """Whether it is a point of a sweep."""

    @property
    def name(self) -> str:
        """The name on the command line."""
        prefix = "" if self.row_kind is RowKind.DECODE else f"{self.row_kind.value}-"
        return f"{prefix}{self.family}-{self.num_rows}x{self.length}"

    @property
    def query_len(self) -> int:
        return 1 if self.row_kind is RowKind.DECODE else self.length

    @property
    def context_len(self) -> int:
        return self.length - self.query_len

    @property
    def num_tokens(self) -> int:
        """New tokens of all rows."""
        return self.num_rows * self.query_len

    @property
    def num_pages(self) -> int:
        """Pages of all rows, and the padding page."""
        return self.num_rows * -(-self.length // self.page_size) + 1

    @property
    def entry_bytes(self) -> int:
        """Cached bytes per token and layer."""
        return sum(pool.entry_elements for pool in self.spec.pools(1, self.dtype)) * self.dtype.itemsize

    @property
    def num_pairs(self) -> int:
        """Pairs of a query and a key that it attends to, in one head."""
        if self.row_kind is RowKind.DECODE:
            return self.num_rows * self.length
        return self.num_rows * self.length * (self.length + 1) // 2

    @property
    def attention(self) -> Cost:
        """Cost of attention alone. Decode reads the cache once; prefill moves queries, keys, values, outputs once."""
        if self.row_kind is RowKind.DECODE:
            return Cost(self.num_rows * self.length * self.entry_bytes, self._operations)
        return Cost(self.num_tokens * self._token_elements * self.dtype.itemsize, self._operations)

    @property
    def layer(self) -> Cost:
        """Cost of a layer: attention, the cache write and, for latents, the projections."""
        written = Cost(self.num_tokens * self.entry_bytes, 0)
        match self.spec:
            case SoftmaxSpec():
                return self.attention + written
            case LatentSpec() as spec:
                weights = spec.num_q_heads * (spec.nope_dim + spec.value_dim) * spec.latent_dim
                projections = Cost(weights * self.dtype.itemsize, 2 * self.num_tokens * weights)
                return self.attention + written + projections

    @property
    def _operations(self) -> int:
        match self.spec:
            case SoftmaxSpec(num_q_heads=heads, head_dim=head_dim):
                return 4 * self.num_pairs * heads * head_dim
            case LatentSpec() as spec if self.row_kind is RowKind.DECODE:
                return 2 * self.num_pairs * spec.num_q_heads * (spec.head_dim + spec.latent_dim)
            case LatentSpec() as spec:
                return 2 * self.num_pairs * spec.num_q_heads * (spec.nope_dim + spec.rope_dim + spec.value_dim)

    @property
    def _token_elements(self) -> int:
        """Elements of one token's queries, keys, values and outputs in prefill."""
        match self.spec:
            case SoftmaxSpec(num_q_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim):
                return 2 * (heads + kv_heads) * head_dim
            case LatentSpec() as spec:
                return 2 * spec.num_q_heads * (spec.nope_dim + spec.rope_dim + spec.value_dim)


def _latent(num_heads: int) -> LatentSpec:
    """DeepSeek's dimensions."""
    return LatentSpec(num_heads, latent_dim=512, rope_dim=64, nope_dim=128, value_dim=128, scale=192**-0.5)


_GQA = SoftmaxSpec(num_q_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5)
_SPECS: Mapping[str, EntrySpec] = MappingProxyType({"gqa": _GQA, "mla128": _latent(128), "mla16": _latent(16)})
_TINY: Mapping[str, EntrySpec] = MappingProxyType(
    {
        "tiny-gqa": SoftmaxSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, scale=0.25),
        "tiny-mla": LatentSpec(2, latent_dim=16, rope_dim=4, nope_dim=8, value_dim=8, scale=12**-0.5),
    }
)
_DECODE = (
    ("gqa", 256, 2048),
    ("gqa", 64, 4096),
    ("gqa", 1, 8192),
    ("mla128", 128, 4096),
    ("mla128", 16, 32768),
    ("mla128", 32, 4096),
    ("mla128", 1, 8192),
    ("mla16", 128, 4096),
    ("mla16", 8, 2048),
    ("mla16", 1, 8192),
)
_PREFILL = (("gqa", 1, 8192), ("gqa", 16, 2048), ("mla128", 1, 4096), ("mla16", 4, 4096))
SWEPT_ROWS = (1, 2, 4, 8, 16, 64, 256)
SWEPT_LENGTHS = (512, 2048, 8192, 32768)


def _listed(row_kind: RowKind, sizes: Sequence[tuple[str, int, int]]) -> tuple[Shape, ...]:
    return tuple(Shape(family, row_kind, _SPECS[family], rows, length) for family, rows, length in sizes)


def _tiny() -> Iterator[Shape]:
    for family, spec in _TINY.items():
        yield Shape(family, RowKind.DECODE, spec, 3, 21, torch.float32, 4)
        yield Shape(family, RowKind.PREFILL, spec, 2, 10, torch.float32, 4)


def _swept(family: str) -> tuple[Shape, ...]:
    return tuple(
        Shape(family, RowKind.DECODE, _SPECS[family], rows, length, is_swept=True)
        for rows in SWEPT_ROWS
        for length in SWEPT_LENGTHS
    )


def _swept_tiny() -> Iterator[Shape]:
    """A sweep that takes a CPU a minute."""
    for family, spec in _TINY.items():
        for rows in (1, 4, 16):
            for length in (16, 64, 256):
                yield Shape(family, RowKind.DECODE, spec, rows, length, torch.float32, 16, is_swept=True)


TINY_SWEEP = "sweep-tiny"
SHAPE_SETS: Mapping[str, tuple[Shape, ...]] = MappingProxyType(
    {
        "decode": _listed(RowKind.DECODE, _DECODE),
        "prefill": _listed(RowKind.PREFILL, _PREFILL),
        "tiny": tuple(_tiny()),
        **{f"sweep-{family}": _swept(family) for family in _SPECS},
        TINY_SWEEP: tuple(_swept_tiny()),
    }
)
SWEEP_SETS = tuple(f"sweep-{family}" for family in _SPECS)


def find_shapes(names: Sequence[str]) -> tuple[Shape, ...]:
    """Returns the named shapes and those of the named sets, each once. Raises `ConfigError` for an unknown name."""
    single = {shape.name: (shape,) for shapes in SHAPE_SETS.values() for shape in shapes if not shape.is_swept}
    found: dict[str, Shape] = {}
    for name in names:
        if name not in SHAPE_SETS and name not in single:
            raise ConfigError(
                f"expected shapes out of the sets {', '.join(SHAPE_SETS)}, or single ones such as "
                f"{next(iter(single))}, got {name!r}"
            )
        for shape in SHAPE_SETS.get(name) or single[name]:
            found.setdefault(shape.name, shape)
    return tuple(found.values())
