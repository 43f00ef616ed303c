"""Backends with one fault each, and the check that must find it.

A fault is as narrow as its check, so that a mutant fails that check and no other: what is proved is that each check
is needed, and that what it reports is where the fault is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from conformance import faults
from conformance.parts import CORRECT, Parts
from conformance.parts_backend import EVERYTHING, make_backend
from sightline.attention.capability import Capability
from sightline.attention.planner import Planner
from sightline.core.batch import MaskKind
from sightline.core.device import Device
from sightline.testing.conformance.rig import Subject


@dataclass(frozen=True)
class Mutant:
    """One fault."""

    name: str
    fault: str
    """In one sentence."""
    caught_by: str
    """The one check that fails."""
    parts: Parts = CORRECT
    planner: type[Planner] = Planner
    cuda_only: bool = False
    """The fault does not show on a CPU."""

    def subject(self, device: Device, declares: Capability = EVERYTHING) -> Subject:
        return Subject(self.name, make_backend(self.parts, declares=declares), declares, device, self.planner)


_LAST = faults.LastEntryUnseen()
_AFTER = faults.UnwrittenAfterTransient()

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "large-heads-refused",
        "The constructor refuses head dimensions above 128, though the row declares every one.",
        "built",
        replace(CORRECT, accept=faults.refuse_large_heads),
    ),
    Mutant("no-write", "The cache is not written.", "cache-write", replace(CORRECT, write=faults.no_write)),
    Mutant(
        "wrong-slot",
        "After a context the new entries are written as if there were none.",
        "write-slots",
        replace(CORRECT, write_slots=faults.slots_without_context),
    ),
    Mutant(
        "next-slot",
        "The slot after the one that was written is read.",
        "first-read",
        replace(CORRECT, slots=faults.next_slot),
    ),
    Mutant("next-token", "A query sees the token after it.", "causal", replace(CORRECT, sees=faults.sees_next)),
    Mutant(
        "transient-read",
        "A TRANSIENT step reads the pool.",
        "transient",
        replace(CORRECT, reads=lambda step: True),
    ),
    Mutant(
        "transient-write",
        "A TRANSIENT step writes its entries to the padding slot.",
        "transient",
        replace(CORRECT, writes=lambda step: True),
    ),
    Mutant(
        "short-context",
        "The last key of the context is not seen.",
        "context",
        replace(CORRECT, sees=faults.misses_last_of_context),
    ),
    Mutant(
        "full-last-page",
        "After a context the last query sees to the end of the last page.",
        "last-page",
        replace(CORRECT, sees=faults.sees_whole_last_page),
    ),
    Mutant(
        "tail-taken-for-cached",
        "Alone in a step, one new token after two whole pages does not see itself.",
        "prefix-tail",
        replace(CORRECT, sees=faults.misses_itself_after_two_pages),
    ),
    Mutant(
        "first-query-length",
        "Every row is taken to have as many new tokens as the first.",
        "ragged",
        replace(CORRECT, query_lens=faults.first_query_len),
    ),
    Mutant(
        "lengths-by-size",
        "A step of up to four rows takes the lengths of the last with as many rows and tokens.",
        "next-batch",
        replace(CORRECT, query_lens=faults.query_lens_by_size),
    ),
    Mutant(
        "padding-computed",
        "Padding tokens are taken for tokens of a row: their output is written.",
        "padding",
        replace(CORRECT, real=lambda token, num_real: (token < num_real) | (num_real > 0)),
    ),
    Mutant(
        "padding-read",
        "A scale for all queries is taken over the padding too.",
        "padding",
        replace(CORRECT, inputs=faults.scaled_over_all),
    ),
    Mutant(
        "maximum-of-nothing",
        "The largest of no queries is asked for, which raises.",
        "idle",
        replace(CORRECT, inputs=faults.after_a_maximum),
    ),
    Mutant(
        "bounds-for-lengths",
        "The bounds on the host are taken for the lengths.",
        "host-bounds",
        replace(CORRECT, query_lens=faults.bounds, context_lens=faults.bounds),
    ),
    Mutant(
        "exact-lengths-needed",
        "Exact lengths are asked of the host, though the row declares that bounds are enough.",
        "host-bounds",
        replace(CORRECT, context_lens=faults.exact),
    ),
    Mutant(
        "pages-in-a-run",
        "A row's pages are taken to follow its first.",
        "page-order",
        replace(CORRECT, slots=faults.pages_in_a_run),
    ),
    Mutant(
        "pages-with-one-owner",
        "A map from pages to rows says who sees a page: of rows that share it, one does.",
        "page-sharing",
        replace(CORRECT, readable=faults.pages_with_one_owner),
    ),
    Mutant(
        "pages-of-16", "A page is taken to hold 16 entries.", "page-sizes", replace(CORRECT, slots=faults.pages_of_16)
    ),
    Mutant(
        "own-copy-read",
        "What the backend wrote is read from a copy of its own, not from the pool.",
        "read-back",
        replace(CORRECT, write=faults.write_twice, read=faults.read_own_copy),
    ),
    Mutant(
        "nought-times-nan",
        "Unused slots of the last page are read with weight 0.",
        "unused-slots",
        replace(CORRECT, hide=faults.hide_beyond_last_page),
    ),
    Mutant(
        "nought-times-a-neighbours-nan",
        "Where a row has several new tokens, each also takes the values of the token before it, of whatever row, with "
        "weight 0.",
        "unused-slots",
        replace(CORRECT, hide=faults.neighbours_of_chunks_times_nought),
    ),
    Mutant(
        "own-scale",
        "Scores are scaled by the head dimension, whatever the spec says.",
        "scale",
        replace(CORRECT, scale=lambda spec: spec.head_dim**-0.5),
    ),
    Mutant(
        "heads-interleaved",
        "Query head h reads key head h % key heads.",
        "grouped-heads",
        replace(CORRECT, kv_head=lambda head, spec: head % spec.num_kv_heads),
    ),
    Mutant(
        "head-cut-at-128",
        "Of a head, 128 numbers are read, though the row declares every head dimension.",
        "head-dims",
        replace(CORRECT, head_dim=lambda head_dim: min(head_dim, 128)),
    ),
    Mutant(
        "wide-window",
        "The window is one key too wide.",
        "window",
        replace(CORRECT, within=lambda distances, window: distances <= window),
    ),
    Mutant("no-softcap", "Scores are not capped.", "softcap", replace(CORRECT, cap=lambda scores, softcap: scores)),
    Mutant("no-sinks", "Sinks are ignored.", "sinks", replace(CORRECT, add_sinks=faults.ignore_sinks)),
    Mutant(
        "always-causal",
        "Rows with a full mask are computed as causal ones.",
        "non-causal",
        replace(CORRECT, sees=faults.sees_causally(MaskKind.FULL)),
    ),
    Mutant(
        "no-tree",
        "Rows with a tree are computed as causal ones.",
        "tree-mask",
        replace(CORRECT, sees=faults.sees_causally(MaskKind.TREE)),
    ),
    Mutant(
        "lse-in-base-2",
        "The LSE is a logarithm to base 2.",
        "lse",
        replace(CORRECT, lse=lambda lse: lse / torch.log(torch.tensor(2.0))),
    ),
    Mutant(
        "sinks-not-in-lse",
        "The LSE leaves the sinks out.",
        "features-together",
        replace(CORRECT, add_sinks=faults.leave_sinks_out_of_lse),
    ),
    Mutant(
        "capped-sinks",
        "The cap is put on sinks too.",
        "features-together",
        replace(CORRECT, add_sinks=faults.cap_sinks),
    ),
    Mutant(
        "window-by-order",
        "In a tree, the window counts tokens in their order and not positions.",
        "features-together",
        replace(CORRECT, distance=faults.distance_by_order),
    ),
    Mutant(
        "sinks-by-key-head",
        "Query heads that share a key head share a sink.",
        "covering",
        replace(CORRECT, add_sinks=faults.sinks_by_key_head),
    ),
    Mutant(
        "one-dtype-at-one-size",
        "Outputs in bfloat16 are halved where the head dimension is 192.",
        "covering",
        replace(CORRECT, weigh=faults.halve_bfloat16_of_192),
    ),
    Mutant(
        "empty-row-shifts",
        "A row of no new tokens among others is taken to have one.",
        "empty-rows",
        replace(CORRECT, query_lens=faults.empty_rows_take_a_token),
    ),
    Mutant(
        "last-entry-unseen",
        "The last entry of a row of the largest length is not seen.",
        "limits",
        replace(CORRECT, accept=_LAST.accept, sees=_LAST.sees),
    ),
    Mutant(
        "sixteen-rows",
        "Of more than 16 rows, one key of the context is read.",
        "many-rows",
        replace(CORRECT, context_lens=faults.short_contexts_of_many_rows),
    ),
    Mutant(
        "tile-border",
        "From the 64th new token on, a query sees as far as the first of its tile.",
        "long-prompts",
        replace(CORRECT, sees=faults.border_of_a_query_tile),
    ),
    Mutant(
        "offsets-of-32-bits",
        "Offsets into the pool are computed in 32 bits.",
        "large-pool",
        replace(CORRECT, read=faults.offsets_of_32_bits),
    ),
    Mutant(
        "offsets-of-32-bits-unsigned",
        "Offsets into the pool are computed in 32 bits without a sign.",
        "large-pool",
        replace(CORRECT, read=faults.offsets_of_32_bits_unsigned),
        cuda_only=True,
    ),
    Mutant(
        "unwritten-after-transient",
        "After a TRANSIENT step, PAGED steps do not write.",
        "transient-in-turn",
        replace(CORRECT, accept=_AFTER.accept, writes=_AFTER.writes),
    ),
    Mutant(
        "last-of-a-block",
        "In half precision the last key of each block of 64 is missed.",
        "each-key-once",
        replace(CORRECT, weigh=faults.last_of_a_block_missed),
    ),
    Mutant(
        "lse-of-nothing",
        "The LSE of a query that saw nothing is 0.",
        "features-together",
        replace(CORRECT, lse=faults.lse_of_nothing_is_0),
    ),
    Mutant(
        "no-tree-beside-padding",
        "In a padded step, rows with a tree are computed as causal ones.",
        "covering",
        replace(CORRECT, sees=faults.no_tree_beside_padding),
    ),
    Mutant(
        "half-taken-for-bfloat16",
        "Queries in float16 are read as bfloat16, though the row declares both.",
        "dtypes",
        replace(CORRECT, inputs=faults.half_as_bfloat16),
    ),
    Mutant(
        "no-cast-to-the-cache",
        "Entries are written without a cast, though the row declares a cache of another dtype: that raises.",
        "cache-dtypes",
        replace(CORRECT, write=faults.write_without_cast),
    ),
    Mutant(
        "half-cache-taken-for-bfloat16",
        "A float16 cache beside another compute dtype is read as bfloat16.",
        "cache-dtypes",
        replace(CORRECT, read=faults.read_half_as_bfloat16),
    ),
    Mutant(
        "cut-off-in-8-bits",
        "What does not fit 8 bits is cut off, not rounded to the nearest.",
        "cache-dtypes",
        replace(CORRECT, write=faults.write_cut_off),
    ),
    Mutant(
        "key-scale-not-read",
        "Keys are read from an 8-bit cache without their scale.",
        "cache-scales",
        replace(CORRECT, read=faults.read_keys_unscaled),
    ),
    Mutant(
        "scale-not-written",
        "Entries are written to an 8-bit cache without being divided by their scale.",
        "cache-scales",
        replace(CORRECT, write=faults.write_unscaled),
    ),
    Mutant(
        "scales-never-applied",
        "Scales of an 8-bit cache are taken for 1, in writing and in reading: nearly the same comes out.",
        "cache-scales",
        replace(CORRECT, read=faults.read_unscaled, write=faults.write_unscaled),
    ),
    Mutant(
        "first-layers-scale",
        "Every layer has the scales of the first.",
        "cache-scales",
        replace(CORRECT, scale_layer=lambda layer: 0),
    ),
    Mutant(
        "no-saturation",
        "What is beyond the range of an 8-bit cache becomes NaN.",
        "cache-saturation",
        replace(CORRECT, write=faults.write_unsaturated),
    ),
    Mutant(
        "no-maximum",
        "Scores are exponentiated as they are, with no maximum taken off.",
        "large-scores",
        replace(CORRECT, log_sum_exp=lambda scores: scores.exp().sum(1).log()),
    ),
    Mutant(
        "parts-mixed-up",
        "From the ninth part on, what is merged is weighed by the other's LSE.",
        "split-merge",
        replace(CORRECT, merge=faults.swapped_from_ninth_part),
    ),
    Mutant(
        "mean-length",
        "Above 512 keys, as many are looked at as rows have in the mean.",
        "long-beside-short",
        replace(CORRECT, longest=faults.mean),
    ),
    Mutant(
        "low-precision-sum",
        "Values are summed key by key in the dtype of the inputs.",
        "accumulation",
        replace(CORRECT, weigh=faults.summed_in_dtype, split_size=lambda batch, kept: 1024),
    ),
    Mutant(
        "split-by-plan",
        "Above eight rows, splits are of another size from plan to plan, though the row declares determinism.",
        "determinism",
        replace(CORRECT, split_size=faults.another_split_each_plan),
    ),
    Mutant(
        "split-by-rows",
        "Splits are of another size where rows stand beside each other, though the row declares batch invariance.",
        "batch-invariance",
        replace(CORRECT, split_size=faults.split_by_rows),
    ),
    Mutant(
        "first-layer-read",
        "Every layer reads the first layer's cache.",
        "layers",
        replace(CORRECT, read_layer=lambda layer: 0),
    ),
    Mutant(
        "window-of-first-group",
        "Every group has the window of the one that was built first.",
        "groups",
        replace(CORRECT, window=faults.window_of_first_group),
    ),
    Mutant(
        "queries-scaled-in-place",
        "Queries are scaled where they lie.",
        "inputs-kept",
        replace(CORRECT, inputs=faults.scaled_in_place),
    ),
    Mutant(
        "taken-for-contiguous",
        "Queries are read as if tokens lay side by side in memory.",
        "strided-inputs",
        replace(CORRECT, inputs=faults.taken_for_contiguous),
    ),
    Mutant(
        "filled-once",
        "A plan buffer whose contents never change is filled by the first plan alone.",
        "filled-buffers",
        replace(CORRECT, fill_constant=faults.fill_once),
    ),
    Mutant(
        "one-memory-for-lanes",
        "What plans prepare lies in one place for all lanes.",
        "lanes",
        replace(CORRECT, one_memory_for_lanes=True),
    ),
    Mutant(
        "one-memory-for-plans",
        "What plans derive lies in one place for all plans of a lane.",
        "several-plans",
        replace(CORRECT, take=faults.take_from_lane),
    ),
    Mutant(
        "refilled-buffers-unnoticed",
        "The planner does not notice that a later plan filled the plan buffers again.",
        "plan-buffers",
        planner=faults.ForgetfulPlanner,
    ),
    Mutant(
        "stale-certificate-accepted",
        "The planner takes a plan with another batch's certificate.",
        "stale-plans",
        planner=faults.TrustingPlanner,
    ),
    Mutant(
        "zeros-not-asked-for",
        "Scratch memory must start as zeros, and the lease does not ask for them.",
        "zeroed-leases",
        replace(CORRECT, zeroed=False),
    ),
    Mutant(
        "buffers-by-batch",
        "Plan buffers are named after the batch.",
        "stable-addresses",
        replace(CORRECT, take=faults.taken_by_batch),
    ),
    Mutant(
        "keys-kept",
        "Every step's keys are kept in a list.",
        "no-growth",
        replace(CORRECT, inputs=faults.kept_in_a_list),
    ),
    Mutant(
        "splits-captured",
        "The number of splits that is launched is the captured plan's.",
        "captured-decode",
        replace(CORRECT, longest=faults.this_steps),
        cuda_only=True,
    ),
    Mutant(
        "splits-of-chunks-captured",
        "The number of splits that is launched is the captured plan's where a row has several new tokens.",
        "captured-replay",
        replace(CORRECT, longest=faults.this_steps_of_chunks),
        cuda_only=True,
    ),
)
