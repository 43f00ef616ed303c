"""Keys and values that are not finite become 0, and are told, for libraries that read behind the end of a row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sightline.kernels.triton.recurrent_tokens import TokenRows
from sightline.kernels.triton.short_convolution import Convolution, Split, split_mixed
from support.extend_cases import DEVICE

KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 2, 4, 16, 24
CHANNELS = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
LENS = [3, 0, 5, 2]
TOKENS = sum(LENS)
PADDING = 2


def split(mixed: Tensor, width: int, *, marks: bool) -> tuple[Split, Tensor | None]:
    """The parts of the inputs, in fp16 and filled with 9 where nothing is written."""
    offsets = torch.tensor([0, *torch.tensor(LENS).cumsum(0).tolist()])
    rows = torch.full((TOKENS + PADDING,), -1, dtype=torch.int32)
    for row, length in enumerate(LENS):
        rows[offsets[row] : offsets[row] + length] = row
    sizes = ((KEY_HEADS, KEY_DIM), (KEY_HEADS, KEY_DIM), (HEADS, VALUE_DIM))
    parts = Split(*(torch.full((len(rows), *size), 9.0, dtype=torch.float16, device=DEVICE) for size in sizes))
    spoiled = torch.full((len(rows), KEY_HEADS + HEADS), 9.0, device=DEVICE) if marks else None
    convolution = None
    if width:
        weight = torch.randn(CHANNELS, width, generator=torch.Generator().manual_seed(2)).to(DEVICE)
        convolution = Convolution(weight, None, None)
    tokens = TokenRows(offsets.to(DEVICE), rows.to(DEVICE))
    split_mixed(mixed.to(DEVICE), convolution, None, tokens, parts, unit=True, spoiled=spoiled)
    return parts, spoiled


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")  # by the interpreter, which is in numpy
@pytest.mark.parametrize("width", [0, 3])
def test_what_is_not_finite_becomes_zero_and_is_told(width: int) -> None:
    mixed = torch.randn(TOKENS + PADDING, CHANNELS, generator=torch.Generator().manual_seed(1))
    mixed[1, 5] = torch.nan  # a query
    mixed[4, KEY_HEADS * KEY_DIM + KEY_DIM + 3] = torch.nan  # a key of the second head
    mixed[6, -1] = torch.inf  # a value of the last head
    mixed[7, -VALUE_DIM - 1] = 3e38  # of the one before it: too large for half precision
    mixed[TOKENS:] = torch.nan
    plain, _ = split(mixed, width, marks=False)
    found, spoiled = split(mixed, width, marks=True)
    assert spoiled is not None
    real = slice(0, TOKENS)
    is_finite = torch.cat([part[real].isfinite().all(-1) for part in (plain.k, plain.v)], dim=1)
    assert not is_finite.all()
    assert torch.equal(spoiled[real].isnan(), ~is_finite)
    assert (spoiled[real][is_finite] == 0).all()
    assert (spoiled[TOKENS:] == 9).all()
    assert torch.equal(found.q.nan_to_num(7.0), plain.q.nan_to_num(7.0))
    assert found.q[1].isnan().any()
    for got, given in ((found.k, plain.k), (found.v, plain.v)):
        assert torch.equal(got, torch.where(given.isfinite(), given, 0.0))


def test_finite_numbers_stay_as_they_are() -> None:
    mixed = torch.randn(TOKENS + PADDING, CHANNELS, generator=torch.Generator().manual_seed(1))
    plain, _ = split(mixed, 3, marks=False)
    found, spoiled = split(mixed, 3, marks=True)
    assert spoiled is not None
    assert (spoiled[:TOKENS] == 0).all()
    assert all(torch.equal(*pair) for pair in zip(plain, found, strict=True))
