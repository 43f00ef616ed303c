"""The available backends in order of preference: Sightline's own, then those of installed packages.

The only place that knows backends by name. A package registers a backend through the entry point group
`sightline.attention_backends`; it is imported and used only if it is requested by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import Any

from sightline.attention.backends.fla import rows as fla_rows
from sightline.attention.backends.flash_attention import rows as flash_attention_rows
from sightline.attention.backends.flashinfer import rows as flashinfer_rows
from sightline.attention.backends.flashinfer.blackwell import rows as blackwell_rows
from sightline.attention.backends.numba import rows as numba_rows
from sightline.attention.backends.reference.backend import ReferenceBackend
from sightline.attention.backends.reference.compressed_backend import ReferenceCompressedBackend
from sightline.attention.backends.reference.compressed_index_backend import ReferenceCompressedIndexBackend
from sightline.attention.backends.reference.convolution_backend import ReferenceConvolutionBackend
from sightline.attention.backends.reference.index_backend import ReferenceIndexBackend
from sightline.attention.backends.reference.latent_backend import ReferenceLatentBackend
from sightline.attention.backends.reference.recurrent_backend import ReferenceRecurrentBackend
from sightline.attention.backends.tokenspeed import rows as tokenspeed_rows
from sightline.attention.backends.torch.backend import TorchBackend
from sightline.attention.backends.torch.compressed_backend import TorchCompressedBackend
from sightline.attention.backends.torch.compressed_index_backend import TorchCompressedIndexBackend
from sightline.attention.backends.torch.convolution_backend import TorchConvolutionBackend
from sightline.attention.backends.torch.index_backend import TorchIndexBackend
from sightline.attention.backends.torch.latent_backend import TorchLatentBackend
from sightline.attention.backends.torch.recurrent_backend import TorchRecurrentBackend
from sightline.attention.backends.triton import rows as triton_rows
from sightline.attention.capability import Capability
from sightline.attention.contract import AttentionBackend
from sightline.attention.selection import Candidate, Offer
from sightline.core.errors import ConfigError
from sightline.core.extensions import Extension, extensions

ENTRY_POINT_GROUP = "sightline.attention_backends"


def _lazily(place: str) -> Callable[[], type[AttentionBackend[Any, Any]]]:
    """Imports a backend, "module:class" in this package, when it is called: its library may be missing."""
    return lambda: resolve_name(f"{__package__}.{place}")


_TRITON = "fast decode on NVIDIA GPUs from Ampere on, planned on the device; pip install 'sightline[cuda]'"
_FLASHINFER = "the fastest prefill, and latent decode of many rows, on Hopper; pip install 'sightline[cuda]'"
_NUMBA = "decode on a CPU that reads pages in place and can be recorded; pip install 'sightline[cpu]'"
_FLA = "recurrent layers to compare ours with, tuned on the first call; pip install 'sightline[fla]'"
_FLASH_ATTENTION = "prefill on Hopper that compiles in seconds, with sinks; pip install 'sightline[flash-attention]'"
_BLACKWELL = "kernels for Blackwell (compute capabilities 10.0 and 10.3); pip install 'sightline[cuda]'"
_TOKENSPEED = "latent decode on Blackwell (compute capabilities 10.0 and 10.3); pip install 'sightline[tokenspeed]'"


def _own(
    name: str,
    load: Callable[[], type[AttentionBackend[Any, Any]]],
    rows: tuple[Capability, ...],
    brings: str,
    *,
    by_default: bool = True,
) -> Candidate:
    """A backend of Sightline's own whose library may be missing or broken.

    `by_default` is False for one that serves only if it is requested by name: it is for devices that nobody here has,
    or no kit has passed it.
    """

    def checked() -> type[AttentionBackend[Any, Any]]:
        try:
            return load()
        except (ImportError, OSError) as error:
            raise ConfigError(
                f"expected {rows[0].package}, which backend {name!r} computes with, to be importable, got "
                f"{type(error).__name__}: {error}; mend or uninstall it, or choose another attention backend"
            ) from error

    return Candidate(name, by_default, "sightline", checked, lambda: rows, brings)


BUILT_IN: tuple[Candidate, ...] = (
    _own("triton", _lazily("triton.backend:TritonBackend"), triton_rows.ROWS, _TRITON),
    _own("triton-latent", _lazily("triton.latent_backend:TritonLatentBackend"), triton_rows.LATENT_ROWS, _TRITON),
    _own(
        "triton-recurrent",
        _lazily("triton.recurrent_backend:TritonRecurrentBackend"),
        triton_rows.RECURRENT_ROWS,
        _TRITON,
    ),
    _own(
        "triton-convolution",
        _lazily("triton.convolution_backend:TritonConvolutionBackend"),
        triton_rows.CONVOLUTION_ROWS,
        _TRITON,
    ),
    _own("triton-index", _lazily("triton.index_backend:TritonIndexBackend"), triton_rows.INDEX_ROWS, _TRITON),
    _own(
        "triton-compressed",
        _lazily("triton.compressed_backend:TritonCompressedBackend"),
        triton_rows.COMPRESSED_ROWS,
        _TRITON,
    ),
    _own(
        "triton-compressed-index",
        _lazily("triton.compressed_index_backend:TritonCompressedIndexBackend"),
        triton_rows.COMPRESSED_INDEX_ROWS,
        _TRITON,
    ),
    _own("flashinfer", _lazily("flashinfer.backend:FlashInferBackend"), flashinfer_rows.ROWS, _FLASHINFER),
    _own(
        "flashinfer-latent",
        _lazily("flashinfer.latent_backend:FlashInferLatentBackend"),
        flashinfer_rows.LATENT_ROWS,
        _FLASHINFER,
    ),
    _own(
        "flashinfer-recurrent",
        _lazily("flashinfer.recurrent_backend:FlashInferRecurrentBackend"),
        flashinfer_rows.RECURRENT_ROWS,
        _FLASHINFER,
        by_default=flashinfer_rows.RECURRENT_IS_PROVEN,
    ),
    _own("fla-recurrent", _lazily("fla.recurrent_backend:FlaRecurrentBackend"), fla_rows.RECURRENT_ROWS, _FLA),
    _own(
        "flash_attention",
        _lazily("flash_attention.backend:FlashAttentionBackend"),
        flash_attention_rows.ROWS,
        _FLASH_ATTENTION,
    ),
    _own(
        "flash_attention-latent",
        _lazily("flash_attention.latent_backend:FlashAttentionLatentBackend"),
        flash_attention_rows.LATENT_ROWS,
        _FLASH_ATTENTION,
    ),
    _own(
        "trtllm",
        _lazily("flashinfer.blackwell.backend:TrtllmBackend"),
        blackwell_rows.ROWS,
        _BLACKWELL,
        by_default=False,
    ),
    _own(
        "trtllm-latent",
        _lazily("flashinfer.blackwell.trtllm_latent_backend:TrtllmLatentBackend"),
        blackwell_rows.TRTLLM_LATENT_ROWS,
        _BLACKWELL,
        by_default=False,
    ),
    _own(
        "cutedsl-latent",
        _lazily("flashinfer.blackwell.cutedsl_latent_backend:CuteDslLatentBackend"),
        blackwell_rows.CUTEDSL_LATENT_ROWS,
        _BLACKWELL,
        by_default=False,
    ),
    _own(
        "tokenspeed-latent",
        _lazily("tokenspeed.latent_backend:TokenSpeedLatentBackend"),
        tokenspeed_rows.LATENT_ROWS,
        _TOKENSPEED,
        by_default=False,
    ),
    _own("numba", _lazily("numba.backend:NumbaBackend"), numba_rows.ROWS, _NUMBA),
    _own("numba-latent", _lazily("numba.latent_backend:NumbaLatentBackend"), numba_rows.LATENT_ROWS, _NUMBA),
    _own(
        "numba-recurrent",
        _lazily("numba.recurrent_backend:NumbaRecurrentBackend"),
        numba_rows.RECURRENT_ROWS,
        _NUMBA,
    ),
    _own(
        "numba-convolution",
        _lazily("numba.convolution_backend:NumbaConvolutionBackend"),
        numba_rows.CONVOLUTION_ROWS,
        _NUMBA,
    ),
    Candidate.of("torch", TorchBackend, "sightline", by_default=True),
    Candidate.of("torch-latent", TorchLatentBackend, "sightline", by_default=True),
    Candidate.of("torch-recurrent", TorchRecurrentBackend, "sightline", by_default=True),
    Candidate.of("torch-index", TorchIndexBackend, "sightline", by_default=True),
    Candidate.of("torch-convolution", TorchConvolutionBackend, "sightline", by_default=True),
    Candidate.of("torch-compressed", TorchCompressedBackend, "sightline", by_default=True),
    Candidate.of("torch-compressed-index", TorchCompressedIndexBackend, "sightline", by_default=True),
    Candidate.of("reference", ReferenceBackend, "sightline", by_default=False),
    Candidate.of("reference-latent", ReferenceLatentBackend, "sightline", by_default=False),
    Candidate.of("reference-recurrent", ReferenceRecurrentBackend, "sightline", by_default=False),
    Candidate.of("reference-index", ReferenceIndexBackend, "sightline", by_default=False),
    Candidate.of("reference-convolution", ReferenceConvolutionBackend, "sightline", by_default=False),
    Candidate.of("reference-compressed", ReferenceCompressedBackend, "sightline", by_default=False),
    Candidate.of("reference-compressed-index", ReferenceCompressedIndexBackend, "sightline", by_default=False),
)


def installed() -> tuple[Candidate, ...]:
    """Returns every installed backend. Raises `ConfigError` if two have the same name."""
    owners = {candidate.name: candidate.distribution for candidate in BUILT_IN}
    return (*BUILT_IN, *(_candidate(each) for each in extensions(ENTRY_POINT_GROUP, "attention backend", owners)))


def find(name: str, candidates: Sequence[Candidate], what: str = "an attention backend") -> Candidate:
    """Returns the backend with that name. Raises `ConfigError`, listing the known names, if there is none. `what` names
    the requester in the message."""
    for candidate in candidates:
        if candidate.name == name:
            return candidate
    names = ", ".join(candidate.name for candidate in candidates)
    raise ConfigError(f"expected {what} out of {names}, got {name!r}")


def offer(candidates: Sequence[Candidate], requested: str | None, what: str = "an attention backend") -> Offer:
    """Candidates for a comma-separated list of names, or, if `requested` is None, all that serve by default."""
    if requested is None:
        by_default = tuple(candidate for candidate in candidates if candidate.by_default)
        return Offer(by_default, tuple(candidate for candidate in candidates if not candidate.by_default))
    asked = tuple(find(name, candidates, what) for name in names_in(requested))
    return Offer(asked, tuple(candidate for candidate in candidates if candidate not in asked), requested)


def names_in(requested: str) -> list[str]:
    """Splits a comma-separated list of names."""
    return [name.strip() for name in requested.split(",")]


def _candidate(extension: Extension) -> Candidate:
    def load() -> type[AttentionBackend[Any, Any]]:
        loaded = extension.load()
        if not (isinstance(loaded, type) and issubclass(loaded, AttentionBackend)):
            raise extension.refuse("a subclass of AttentionBackend", loaded)
        return loaded

    return Candidate(extension.name, False, extension.distribution, load, lambda: load().capabilities)
