"""Groups the choices of a step's tokens by expert, on the device: no launch depends on what was chosen.

Choice i belongs to token i // per_token. `order` lists the choices sorted by expert, and by number within an expert:

    choices   5 2 | 2 7 | 5 2        order  1 2 5 | 0 4 | 3        tiles  (2, 0, 3) (5, 3, 5) (7, 5, 6)

A tile is up to `rows` places of one expert: (expert, first place, end). The number of tiles has a bound that the host
knows, and unused tiles are empty. So nothing overflows and no choice is dropped. Does not know weights.
"""

import triton
import triton.language as tl
from torch import Tensor

from sightline.kernels.triton.overlap import overlap_settings, wait_for_previous

_MOST_AT_ONCE = 4096
"""How many choices a program reads at a time."""
TILE_FIELDS = 3


def bound_tiles(num_choices: int, num_experts: int, rows: int) -> int:
    """The length of the table of tiles: at most one per choice, or the full ones and one more per expert."""
    return min(num_choices, num_choices // rows + num_experts)


def group_choices(
    choices: Tensor, num_experts: int, rows: int, order: Tensor, tiles: Tensor, *, overlaps: bool = False
) -> None:
    """Fills order [num_choices] and tiles [bound_tiles, 3], both int32. A tile has at most `rows` places.

    Choices are contiguous [num_tokens, per_token] integers. Those that are num_experts or more are of experts that are
    not here: they have no place in the order and no tile.
    """
    num_choices = choices.numel()
    if num_choices == 0:
        return
    _group_kernel[(num_experts,)](
        choices,
        order,
        tiles,
        num_choices,
        tiles.shape[0],
        rows,
        BLOCK=min(_MOST_AT_ONCE, triton.next_power_of_2(num_choices)),
        TILES=16,
        num_warps=4 if num_choices <= 1024 else 8,
        **overlap_settings(overlaps),
    )


@triton.jit(do_not_specialize=["num_choices", "num_tiles", "rows"])
def _group_kernel(
    choices, order, tiles, num_choices, num_tiles, rows,
    BLOCK: tl.constexpr, TILES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program places the choices of one expert, and fills the part of the table that belongs to it."""
    wait_for_previous(OVERLAPS)
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    chosen = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_choices, BLOCK):
        number = start + lane
        choice = tl.load(choices + number, mask=number < num_choices, other=1 << 30)
        before += (choice < expert).to(tl.int32)
        chosen += (choice == expert).to(tl.int32)
    first = tl.sum(before, axis=0)
    count = tl.sum(chosen, axis=0)
    end = first + count
    if count > 0:
        place = first
        for start in range(0, num_choices, BLOCK):
            number = start + lane
            choice = tl.load(choices + number, mask=number < num_choices, other=1 << 30)
            ours = (choice == expert).to(tl.int32)
            tl.store(order + place + tl.cumsum(ours, axis=0) - 1, number, mask=ours > 0)
            place += tl.sum(ours, axis=0)
    # The tiles of an expert begin at its first choice, or where the full tiles before it and one for each expert before
    # it would end. Its own always fit before the next expert's; those that are left are empty.
    # Which of the two it is follows from the length of the table, so nobody needs to know the other experts' tiles.
    by_place = num_tiles == num_choices
    tile = tl.where(by_place, first, first // rows + expert)
    next_tile = tl.where(by_place, end, end // rows + expert + 1)
    next_tile = tl.where(expert == tl.num_programs(0) - 1, num_tiles, next_tile)
    for start in range(tile, next_tile, TILES):
        slot = start + tl.arange(0, TILES)
        inside = slot < next_tile
        tile_first = tl.minimum(first + (slot - tile) * rows, end)
        at = tiles + slot * 3
        tl.store(at, tl.zeros([TILES], tl.int32) + expert, mask=inside)
        tl.store(at + 1, tile_first, mask=inside)
        tl.store(at + 2, tl.minimum(tile_first + rows, end), mask=inside)


def tile_table(memory: Tensor, num_choices: int, num_experts: int, rows: int) -> Tensor:
    """The table of tiles [bound_tiles, 3] in the int32 memory [at least 3 * num_choices]."""
    length = bound_tiles(num_choices, num_experts, rows)
    return memory.view(-1)[: length * TILE_FIELDS].view(length, TILE_FIELDS)
