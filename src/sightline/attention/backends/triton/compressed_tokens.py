"""What plans of compressed attention and of its indexers share: a step's tokens, and what becomes entries.

Lengths, states and slots stay on the device, so that a captured step serves any.
"""

from __future__ import annotations

from torch import Tensor

from sightline.attention.compressed.inputs import CompressionInputs
from sightline.attention.compressed.spec import Compression
from sightline.attention.contract import StepView
from sightline.attention.recurrent.planned_tokens import PlannedTokens
from sightline.cache.pools import Pool
from sightline.core.errors import PlanError
from sightline.kernels.triton.compressed_steps import CompressionRule, NewEntries
from sightline.kernels.triton.compressed_tokens import CompressedTokens, EntryPages


def step_tokens(step: StepView, planned: PlannedTokens) -> CompressedTokens:
    """The tokens of a step. Rows of a step that keeps no states have no context."""
    contexts = None if planned.slots is None else step.batch.context_lens.device
    return CompressedTokens(planned.rows, contexts, planned.slots)


def entry_places(step: StepView, pool: Pool) -> EntryPages:
    """Where the entries of rows are; in a step without a cache, at the tokens of their rows."""
    if step.states is None:
        return EntryPages(None, None, 1, 1)
    return EntryPages.of(pool.table.pages, step.batch.table_rows, pool.page_size, pool.tokens_per_entry)


def rule_of(compression: Compression) -> CompressionRule:
    return CompressionRule(compression.ratio, compression.overlap, compression.rope_dim, compression.norm_eps)


def new_entries(
    inputs: CompressionInputs | None, sums: Tensor | None, entries: Tensor | None, slots: Tensor | None
) -> NewEntries:
    """What becomes entries [num_slots, head_dim] in a step. Without `slots` their places are those of its tokens."""
    if inputs is None or entries is None:
        raise PlanError("expected values and gates for the entries of a layer with compression, got none")
    return NewEntries(
        values=inputs.values,
        gates=inputs.gates,
        norm=inputs.norm,
        cos=inputs.cos,
        sin=inputs.sin,
        sums=sums,
        entries=entries,
        slots=slots,
    )
