"""Resolves a config for this machine and model.

`resolve` turns `EngineConfig` into `ResolvedConfig`, once, with everything decided. Does not know tensors or models.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from importlib.util import find_spec

import torch

from sightline.core.config import (
    CACHE_DTYPE_NAMES,
    DTYPE_NAMES,
    MEMORY_FRACTIONS,
    PADDING_PAGES,
    PAGE_SIZES,
    ROWS,
    STEP_TOKENS,
    EngineConfig,
    KeptSettings,
    LayerKernels,
    Quantization,
    Task,
)
from sightline.core.device import Device, DeviceKind, available_bytes, detect_device, device_memory, lacks_products
from sightline.core.errors import ConfigError, ModelTooLargeError
from sightline.core.hot_memory import NO_PAGES, ChosenFacts, LongestRow, PageShape, size_cache
from sightline.core.ledger import Ledger
from sightline.core.memory import MemoryBudget, OutputMemory, drawing_bytes, share_out
from sightline.core.page_shape import CompressedEntries
from sightline.core.settings import stated
from sightline.core.speculation import Speculation, read_speculation
from sightline.core.state_memory import NO_STATES_KEPT, StateSizes, share_states

DTYPES = dict(zip(DTYPE_NAMES, (torch.float32, torch.bfloat16, torch.float16), strict=True))
CACHE_DTYPES = dict(zip(CACHE_DTYPE_NAMES, (*DTYPES.values(), *[torch.float8_e4m3fn] * 3), strict=True))
GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, *range(64, 256, 32), *range(256, 1025, 64))
"""Numbers of rows that `--cuda-graph-sizes auto` captures, and the most rows of a step."""
PROGRAM_SIZES = (1, 2, 4, 8)
"""Numbers of rows that auto records on a CPU: more rows are bound by arithmetic, not by what is between products."""
KEPT_PROGRAM_SIZES = (*PROGRAM_SIZES, 16)
"""Numbers of rows that auto records with weights that stay quantised, whose products take less arithmetic."""
MOST_VERIFIED = 128
"""Tokens of the largest step with guesses that is captured: beyond, a GPU is limited by arithmetic."""
OUTPUT_COPIES = 4
"""Copies of a step's logits that exist at once: the outputs, those of the step in flight, and two of the sampler."""
BUCKETS_PER_SIZE = 2
"""Graphs of a size, each of which keeps its logits: one for decode, one for a few new tokens a row."""


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model that `resolve` needs, read from its headers before any weight is loaded."""

    max_positions: int
    weight_elements: int
    """Number of weights kept in the compute dtype."""
    quantised_bytes: int
    """Bytes of the weights that stay quantised."""
    cache_elements_per_token: int
    """Sum over all layers and pools whose entries stand for one token each."""
    compressed: tuple[CompressedEntries, ...] = ()
    """The entries that stand for several tokens each."""
    scale_bytes_per_token: int = 0
    """What a cache of 8-bit floats has beside its elements, over all layers and pools: the scales of entries that have
    one each."""
    packed_elements: int = 0
    """The part of `weight_elements` that Triton's kernels keep packed: experts."""
    packed_bytes: int = 0
    """The size of the packed elements."""
    vocab_size: int = 0
    """The logits of a token."""
    state_bytes: int = 0
    """The state of a sequence, whatever its length, without what is in the cache's dtype; 0 if no layer has one."""
    state_elements: int = 0
    """Elements of a sequence's state in the cache's dtype."""
    chosen: ChosenFacts = ChosenFacts()  # noqa: RUF009 - frozen
    """What is kept for layers that attend to chosen entries."""
    takes_texts_whole: bool = False
    """True if every token sees every other: a text cannot be chunked, and nothing of it can be cached."""

    def with_drafter(self, drafter: ModelFacts, *, shares_weights: bool) -> ModelFacts:
        """The facts of an engine that keeps a drafter too; `shares_weights` if these have counted its weights."""
        elements = self.cache_elements_per_token + drafter.cache_elements_per_token
        both = replace(
            self,
            cache_elements_per_token=elements,
            compressed=self.compressed + drafter.compressed,
            scale_bytes_per_token=self.scale_bytes_per_token + drafter.scale_bytes_per_token,
            chosen=self.chosen + drafter.chosen,
        )
        if shares_weights:
            return both
        return replace(
            both,
            weight_elements=self.weight_elements + drafter.weight_elements,
            quantised_bytes=self.quantised_bytes + drafter.quantised_bytes,
            packed_elements=self.packed_elements + drafter.packed_elements,
            packed_bytes=self.packed_bytes + drafter.packed_bytes,
        )

    def sequence_bytes(self, cache_dtype: torch.dtype) -> int:
        """The state of a sequence, whatever its length; 0 if no layer has one."""
        return self.state_bytes + self.state_elements * cache_dtype.itemsize

    def page_shape(self, page_size: int, cache_dtype: torch.dtype) -> PageShape:
        """A page of all pools. Raises `ConfigError` if some entries do not fit pages of that size."""
        scale_bytes = self.scale_bytes_per_token if cache_dtype.itemsize == 1 else 0
        compressed = sum(each.elements_per_page(page_size) for each in self.compressed)
        return PageShape(page_size, self.cache_elements_per_token, cache_dtype.itemsize, scale_bytes, compressed)

    def weight_bytes(self, dtype: torch.dtype, kernels: LayerKernels) -> int:
        """What the weights take with these kernels, if those that are not kept quantised are of `dtype`."""
        is_packed = kernels is LayerKernels.TRITON
        num_plain = self.weight_elements - (self.packed_elements if is_packed else 0)
        return num_plain * dtype.itemsize + self.quantised_bytes + (self.packed_bytes if is_packed else 0)


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(KeptSettings):
    """Every decision, and the settings that need none. The engine runs exactly this."""

    device: Device
    dtype: torch.dtype
    cache_dtype: torch.dtype
    """Dtype of cached entries."""
    quantization: Quantization
    max_model_len: int
    max_rows: int
    max_step_tokens: int
    page_size: int
    num_pages: int
    """Pages of each pool, including the padding page; 0 if nothing is cached."""
    states_per_row: int = 0
    """Recurrent states that a row may need at once; 0 if no layer has one."""
    max_checkpoints: int = 0
    """Recurrent states that are kept for others beside those."""
    scratch_bytes: int
    """Maximum bytes that backends may lease."""
    prefix_caching: bool
    host_cache_bytes: int = 0
    """Host memory for pages that the prefix cache evicts; 0 if they are lost."""
    hot_buffer_size: int = 0
    """Hot entries of each row and layer on the device, if those that indexers choose from are in host memory; else
    0."""
    max_queued: int
    """Sequences that may wait."""
    async_scheduling: bool = False
    """Whether a step is launched before the previous one is read."""
    speculation: Speculation | None = None
    """How next tokens are guessed; None if they are not."""
    layer_kernels: LayerKernels = LayerKernels.TORCH
    graph_sizes: tuple[int, ...] = ()
    """Numbers of tokens for which steps are captured, in order; empty: every step is eager."""
    memory: MemoryBudget = MemoryBudget()  # noqa: RUF009 - frozen
    """How the device's memory was shared out; all 0 if nobody asked the device."""

    @property
    def has_trees(self) -> bool:
        """True if several continuations of a text may be guessed at once."""
        return self.speculation is not None and self.speculation.num_branches > 1

    @property
    def max_drafted(self) -> int:
        """Tokens that are guessed at once at most; 0 if none are."""
        return 0 if self.speculation is None else self.speculation.num_speculative_tokens

    @property
    def cache_tokens(self) -> int:
        """Tokens that sequences can hold in the cache at once."""
        return max(0, self.num_pages - PADDING_PAGES) * self.page_size


def resolve(config: EngineConfig, facts: ModelFacts, device: Device, ledger: Ledger) -> ResolvedConfig:
    """Decides everything that the config leaves open. Raises `ConfigError` for settings that cannot work."""
    layer_kernels = _resolve_layer_kernels(config, device, ledger)
    dtype = _resolve_dtype(config.dtype, device, ledger)
    cache_dtype = dtype if config.kv_cache_dtype == "auto" else CACHE_DTYPES[config.kv_cache_dtype]
    asked_len = config.max_model_len
    if asked_len is not None and asked_len > facts.max_positions:
        raise ConfigError(
            f"expected max_model_len of at most {facts.max_positions}, the model's trained positions, "
            f"got {asked_len}; lower it"
        )
    model_len = asked_len or facts.max_positions
    sizes = _resolve_sizes(config, facts, device, model_len, ledger)
    page_size = PAGE_SIZES[device.kind.value] if config.page_size is None else config.page_size
    host_cache_bytes = _resolve_host_cache(config, prefix_caching=sizes.prefix_caching)
    memory = _share_memory(config, layer_kernels, facts, device, dtype, sizes.max_rows)
    num_pages, cache, states, overlaps = 0, NO_PAGES, NO_STATES_KEPT, _resolve_async_scheduling(config, device, ledger)
    if sizes.is_transient:
        _tell_what_a_cache_would_need(config, facts, device, ledger)
        cache_dtype = dtype
    else:
        room = memory if device.kind is DeviceKind.CUDA else memory.without(host_cache_bytes)
        _tell_unused_checkpoints(config, facts, ledger)
        state_bytes = facts.sequence_bytes(cache_dtype)
        if state_bytes:
            states = _resolve_states(config, state_bytes, room, sizes, overlaps, ledger)
            sizes = replace(sizes, max_rows=states.max_rows)
            room = room.without(states.num_bytes(state_bytes))
        page = facts.page_shape(page_size, cache_dtype)
        longest = LongestRow(model_len, sizes.max_step_tokens)
        cache = size_cache(config, facts.chosen, page, longest, room, sizes.max_rows, device, ledger)
        num_pages, sizes = cache.num_pages, replace(sizes, max_rows=cache.max_rows)
        model_len = _fitting_len(config, (num_pages - PADDING_PAGES) * page_size, model_len, ledger)
    most = _most_captured(config, device, min(sizes.max_rows, num_pages - PADDING_PAGES))
    return ResolvedConfig(
        device=device,
        dtype=dtype,
        cache_dtype=cache_dtype,
        quantization=Quantization(config.quantization),
        max_model_len=model_len,
        max_rows=sizes.max_rows,
        max_step_tokens=sizes.max_step_tokens,
        page_size=page_size,
        num_pages=num_pages,
        states_per_row=states.per_row,
        max_checkpoints=states.max_checkpoints,
        scratch_bytes=memory.scratch_bytes,
        memory=memory,
        prefix_caching=sizes.prefix_caching,
        host_cache_bytes=host_cache_bytes,
        hot_buffer_size=cache.hot_buffer,
        max_queued=config.max_queued_requests,
        async_scheduling=overlaps,
        speculation=read_speculation(config.speculative_config),
        layer_kernels=layer_kernels,
        graph_sizes=_resolve_graph_sizes(config, layer_kernels, device, most, ledger),
        **{kept.name: vars(config)[kept.name] for kept in fields(KeptSettings)},
    )


@dataclass(frozen=True)
class _Sizes:
    """Step size, and whether prefixes are cached."""

    max_rows: int
    max_step_tokens: int
    prefix_caching: bool
    is_transient: bool


def _resolve_sizes(config: EngineConfig, facts: ModelFacts, device: Device, model_len: int, ledger: Ledger) -> _Sizes:
    task, embeds = Task(config.task), Task(config.task) is Task.EMBED
    asked_tokens = config.max_num_batched_tokens
    step_tokens = STEP_TOKENS[task][device.kind.value] if asked_tokens is None else asked_tokens
    prefix_caching = not embeds if config.prefix_caching is None else config.prefix_caching
    if facts.takes_texts_whole:
        if prefix_caching:
            raise ConfigError(
                "expected no prefix caching of a model whose tokens all see each other, got it: leave it out"
            )
        if step_tokens < model_len and asked_tokens is not None:
            raise ConfigError(
                f"expected max_num_batched_tokens of at least {model_len}, a whole text, got {asked_tokens}; raise it, "
                "or lower max_model_len"
            )
        step_tokens = max(step_tokens, model_len)
    asked_rows = config.max_num_seqs
    max_rows = min(ROWS[task][device.kind.value] if asked_rows is None else asked_rows, step_tokens)
    if asked_rows is not None and max_rows < asked_rows:
        ledger.degrade(
            "max_num_seqs",
            f"lowered from {asked_rows} to {max_rows}: each running sequence needs a token of every step",
            "raise max_num_batched_tokens or lower max_num_seqs",
        )
    is_transient = embeds and not prefix_caching and model_len <= step_tokens
    return _Sizes(max_rows, step_tokens, prefix_caching, is_transient)


def _resolve_host_cache(config: EngineConfig, *, prefix_caching: bool) -> int:
    """Bytes of host memory for evicted pages. Raises if nothing would be evicted into it, or it does not fit."""
    num_bytes = int(config.host_cache_gib * 2**30)
    if not num_bytes:
        return 0
    if not prefix_caching:
        raise ConfigError(
            f"expected prefix_caching with host_cache_gib, which keeps what it evicts, got {config.host_cache_gib:g} "
            "GiB without it; leave one out"
        )
    available = available_bytes(detect_device("cpu"))
    if num_bytes > available:
        raise ConfigError(
            f"expected a host cache that fits the {available:,} bytes of host memory that are free, got "
            f"host_cache_gib {config.host_cache_gib:g}, which takes {num_bytes:,}; lower it"
        )
    return num_bytes


def _tell_unused_checkpoints(config: EngineConfig, facts: ModelFacts, ledger: Ledger) -> None:
    if config.max_state_checkpoints is not None and not facts.sequence_bytes(torch.float32):
        ledger.degrade(
            "max_state_checkpoints",
            f"{config.max_state_checkpoints} changes nothing: no layer of the model is recurrent",
            "leave it out",
        )


def _resolve_states(
    config: EngineConfig, state_bytes: int, memory: MemoryBudget, sizes: _Sizes, overlaps: bool, ledger: Ledger
) -> StateSizes:
    """The states, of `state_bytes` each, that rows and checkpoints have room for."""
    speculation = read_speculation(config.speculative_config)
    is_sized = config.cache_tokens is None
    return share_states(
        state_bytes,
        memory.cache_bytes if is_sized else memory.room_bytes,
        sizes.max_rows,
        config.max_num_seqs,
        config.max_state_checkpoints,
        in_flight=int(overlaps),
        max_drafted=0 if speculation is None else speculation.num_speculative_tokens,
        prefix_caching=sizes.prefix_caching,
        ledger=ledger,
    )


def _fitting_len(config: EngineConfig, capacity: int, model_len: int, ledger: Ledger) -> int:
    """The longest sequence that fits in the cache."""
    if capacity >= model_len:
        return model_len
    if config.max_model_len is not None:
        raise ConfigError(
            f"expected a cache of at least max_model_len = {config.max_model_len} tokens, got room for {capacity}; "
            "lower max_model_len, or raise cache_tokens or memory_fraction"
        )
    ledger.degrade(
        "max_model_len",
        f"lowered from the model's {model_len} to {capacity}, what the cache holds",
        "raise cache_tokens or memory_fraction, or ask for a smaller max_model_len",
    )
    return capacity


def _most_captured(config: EngineConfig, device: Device, max_rows: int) -> int:
    """Tokens of the largest step that is captured: one a row, and on a GPU the guesses of each row too."""
    speculation = read_speculation(config.speculative_config)
    if speculation is None or device.kind is not DeviceKind.CUDA:
        return max_rows
    return max(max_rows, min(MOST_VERIFIED, max_rows * (1 + speculation.num_speculative_tokens)))


def _resolve_graph_sizes(
    config: EngineConfig, kernels: LayerKernels, device: Device, most: int, ledger: Ledger
) -> tuple[int, ...]:
    """The sizes asked for, up to `most`, which rows and pages allow."""
    asked, records = config.cuda_graph_sizes, kernels is LayerKernels.NUMBA
    if asked is None and (records or device.kind is DeviceKind.CUDA) and Task(config.task) is Task.GENERATE:
        asked = "auto"
    if config.enforce_eager or asked is None:
        return ()
    if config.num_ranks > 1 and device.kind is DeviceKind.CPU:
        told = ("cuda_graph_sizes", "steps of several ranks run eagerly on a CPU, with the same results")
        ledger.note(*told) if config.cuda_graph_sizes is None else ledger.degrade(*told, "leave it out")
        return ()
    # Python refuses to convert thousands of digits.
    if asked != "auto" and not all(
        part.strip().isdecimal() and len(part) < 20 and int(part) for part in asked.split(",")
    ):
        raise ConfigError(f"expected cuda_graph_sizes auto, or numbers from 1 such as 1,2,4,8, got {asked[:80]!r}")
    if device.kind is not DeviceKind.CUDA and not records:
        ledger.degrade(
            "cuda_graph_sizes",
            f"no step is recorded: on a CPU that needs layer_kernels numba, not {kernels.value}",
            "leave it out, or install numba",
        )
        return ()
    if asked == "auto":
        programs = KEPT_PROGRAM_SIZES if config.quantization == Quantization.KEEP.value else PROGRAM_SIZES
        usual = programs if records else GRAPH_SIZES
        largest = min(most, usual[-1]) if records else most
        return (*[size for size in usual if size < largest], largest)
    sizes = sorted({int(part) for part in asked.split(",")})
    if sizes[-1] > most:
        left_out = ", ".join(str(size) for size in sizes if size > most)
        ledger.degrade(
            "cuda_graph_sizes",
            f"{left_out} left out: a step has at most {most} rows",
            "leave them out, or raise max_num_seqs or cache_tokens",
        )
    return tuple(size for size in sizes if size <= most)


def _resolve_layer_kernels(config: EngineConfig, device: Device, ledger: Ledger) -> LayerKernels:
    """The device's own kernels, unless torch is asked for or their compiler is not installed."""
    own = LayerKernels.TRITON if device.kind is DeviceKind.CUDA else LayerKernels.NUMBA
    is_missing = device.is_here and find_spec(own.value) is None
    if config.layer_kernels != "auto":
        kernels = LayerKernels(config.layer_kernels)
        if kernels not in (own, LayerKernels.TORCH):
            needs = "a GPU" if kernels is LayerKernels.TRITON else "a CPU"
            raise ConfigError(
                f"expected layer_kernels torch or {own.value} on the device {device.name}, got {kernels.value}, which "
                f"needs {needs}; leave it out"
            )
        if kernels is LayerKernels.NUMBA and is_missing:
            raise ConfigError(
                "expected numba to be installed for layer_kernels numba, got none; pip install 'sightline[cpu]', or "
                "leave it out"
            )
        return kernels
    if is_missing:
        ledger.degrade(
            "layer_kernels",
            f"layers run torch's kernels, several times slower: {own.value} is not installed"
            if own is LayerKernels.TRITON
            else "layers run torch's kernels, and no decode step is recorded: numba is not installed",
            f"install {own.value}, or ask for layer_kernels torch",
        )
        return LayerKernels.TORCH
    return own


def _resolve_async_scheduling(config: EngineConfig, device: Device, ledger: Ledger) -> bool:
    """Whether a step is launched before the previous one is read: as asked, otherwise on a GPU, unless drafts need what
    was read."""
    if config.async_scheduling is not None:
        return config.async_scheduling
    overlaps = device.kind is DeviceKind.CUDA and Task(config.task) is Task.GENERATE
    if overlaps and config.speculative_config is not None:
        ledger.degrade(
            "async_scheduling",
            "the device waits between steps while the host reads them: tokens are guessed from those that were read",
            "leave speculative_config out if few of the guesses are right",
        )
        return False
    return overlaps


def _share_memory(
    config: EngineConfig,
    kernels: LayerKernels,
    facts: ModelFacts,
    device: Device,
    dtype: torch.dtype,
    max_rows: int,
) -> MemoryBudget:
    """Shares out the device's memory. Raises if a card cannot hold the weights."""
    asked = config.memory_fraction
    fraction = MEMORY_FRACTIONS[device.kind.value] if asked is None else asked
    memory = share_out(
        device.kind,
        device_memory(device).of_one(config.num_ranks if device.kind is DeviceKind.CPU else 1),
        fraction,
        facts.weight_bytes(dtype, kernels),
        _output_memory(config, kernels, facts, device, max_rows),
    )
    if device.kind is DeviceKind.CUDA and memory.room_bytes < 0:
        raise ModelTooLargeError(
            f"expected weights that fit {fraction:g} of the card, got {-memory.room_bytes:,} bytes too many "
            f"({memory}); raise memory_fraction, free memory, or use a smaller model or dtype"
        )
    return memory


def _output_memory(
    config: EngineConfig, kernels: LayerKernels, facts: ModelFacts, device: Device, max_rows: int
) -> OutputMemory:
    """What the logits of steps and of captured graphs take at most, and drawing tokens. An embedder has none."""
    if Task(config.task) is Task.EMBED:
        return OutputMemory()
    # Sizes that no step has are told when the sizes are resolved.
    captured = _resolve_graph_sizes(config, kernels, device, _most_captured(config, device, max_rows), Ledger())
    row_bytes = facts.vocab_size * torch.float32.itemsize
    count = max_rows * config.data_parallel_size  # The first process chooses for all replicas.
    steps = OUTPUT_COPIES * count * row_bytes + drawing_bytes(count, facts.vocab_size)
    return OutputMemory(steps, BUCKETS_PER_SIZE * sum(captured) * row_bytes)


def _tell_what_a_cache_would_need(config: EngineConfig, facts: ModelFacts, device: Device, ledger: Ledger) -> None:
    """Reports cache settings that have no effect, for an engine without a cache."""
    asked: dict[str, object] = {
        "cache_tokens": config.cache_tokens,
        "page_size": config.page_size,
        "kv_cache_dtype": config.kv_cache_dtype,
    }
    if device.kind is DeviceKind.CPU:
        asked["memory_fraction"] = config.memory_fraction
    for setting, value in asked.items():
        if value != stated(EngineConfig)[setting].default:
            ledger.degrade(
                setting,
                f"{value} changes nothing: texts are embedded without a cache",
                "leave it out" if facts.takes_texts_whole else "leave it out, or ask for prefix_caching",
            )


def _resolve_dtype(name: str, device: Device, ledger: Ledger) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.kind is DeviceKind.CPU else torch.bfloat16
    if lacks_products(device, DTYPES[name]):
        ledger.degrade(
            "dtype",
            f"{name} is computed without instructions of its own, which this CPU lacks: very slowly",
            "use float32",
        )
    return DTYPES[name]
