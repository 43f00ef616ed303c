"""FlashAttention 4 on a Hopper card, one call form after the other: first what the library gives, then the kit.

Each form stands alone, so that a failure names the form, and says how far off which rows are.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from support.fake_flash_attention import attend_tile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper card"
    ),
    pytest.mark.skipif(find_spec("flash_attn") is None, reason="needs flash-attn-4"),
    # Of what the library imports.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Argument aux_data:UserWarning"),
]


@dataclass(frozen=True)
class Form:
    """One way of calling."""

    head_dim: int = 128
    value_dim: int = 128
    heads: int = 8
    kv_heads: int = 2
    dtype: torch.dtype = torch.bfloat16
    causal: bool = True
    page_size: int | None = None
    """None is the step's own keys."""
    window: int | None = None
    softcap: float | None = None
    sinks: torch.dtype | None = None
    lse: bool = False


FORMS = {
    "ragged causal": Form(),
    "ragged full": Form(causal=False),
    "ragged lse": Form(lse=True),
    "ragged float16": Form(dtype=torch.float16),
    "latent causal": Form(192, 128, 16, 16, lse=True),
    "latent full": Form(192, 128, 16, 16, causal=False, lse=True),
    "paged 16": Form(page_size=16),
    "paged 32": Form(page_size=32, lse=True),
    "paged full": Form(page_size=16, causal=False),
    "paged window": Form(page_size=16, window=33),
    "paged window of 1": Form(page_size=16, window=1),
    "paged window full": Form(page_size=16, window=33, causal=False),
    "paged sinks": Form(page_size=16, sinks=torch.bfloat16, lse=True),
    "paged sinks float32": Form(page_size=16, sinks=torch.float32),
    "paged softcap": Form(page_size=16, softcap=20.0),
    "paged group of 7": Form(page_size=16, heads=14),
    "paged group of 3": Form(page_size=16, heads=6),
    "paged 64": Form(64, 64, page_size=16),
    "paged 96": Form(96, 96, page_size=16),
    "paged 192": Form(192, 192, page_size=16),
    "paged 256": Form(256, 256, page_size=16),
    "paged 256 window": Form(256, 256, page_size=16, window=100),
}
ROWS = ((0, 300), (130, 5), (515, 1), (0, 1), (64, 64), (1000, 129), (0, 0))
"""Context and new tokens."""
PADDING = 3


@pytest.mark.parametrize("name", FORMS)
def test_a_call_gives_what_plain_torch_gives(name: str) -> None:
    form = FORMS[name]
    made = _Problem(form, [(0, new) for _, new in ROWS] if form.page_size is None else list(ROWS))
    out, lse = made.call()
    torch.cuda.synchronize()
    made.check(name, out, lse)


def test_a_captured_call_serves_other_lengths() -> None:
    form = Form(page_size=16)
    made = _Problem(form, [(700, 1), (33, 1), (5, 1), (100, 1)])
    made.call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = made.call()
    for lens in ([701, 34, 6, 101], [1, 2, 3, 4], [700, 700, 700, 17]):
        made.set_lens(lens)
        graph.replay()
        torch.cuda.synchronize()
        made.check(f"replayed for {lens}", out, lse)


class _Problem:
    """Keys in shuffled pages or row after row, NaN wherever nobody wrote, and padding tokens of NaN."""

    def __init__(self, form: Form, rows: list[tuple[int, int]]) -> None:
        self.form, self.rows = form, rows
        generator = torch.Generator("cuda").manual_seed(3)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device="cuda").to(form.dtype)

        self.query_offsets = [0, *itertools.accumulate(new for _, new in rows)]
        num_tokens = self.query_offsets[-1]
        self.q = normal(num_tokens + PADDING, form.heads, form.head_dim) * 2
        self.q[num_tokens:] = torch.nan
        self.sinks = None if form.sinks is None else normal(form.heads).to(form.sinks)
        self.lens = [context + new for context, new in rows]
        most = max(*self.lens, 768)
        self.k = [normal(most, form.kv_heads, form.head_dim) for _ in rows]
        self.v = [normal(most, form.kv_heads, form.value_dim) for _ in rows]
        self.offsets = torch.tensor(self.query_offsets, dtype=torch.int32, device="cuda")
        self.lens_device = torch.tensor(self.lens, dtype=torch.int32, device="cuda")
        if form.page_size is not None:
            self._fill_pages(form.page_size, most)

    def _fill_pages(self, size: int, most: int) -> None:
        pages_each = -(-most // size)
        order = torch.randperm(len(self.rows) * pages_each, generator=torch.Generator().manual_seed(1))
        self.pages = (order.view(len(self.rows), pages_each) + 1).to("cuda", torch.int32)
        shape = (len(self.rows) * pages_each + 1, size, self.form.kv_heads)
        self.paged_k = torch.full((*shape, self.form.head_dim), torch.nan, dtype=self.form.dtype, device="cuda")
        self.paged_v = torch.full((*shape, self.form.value_dim), torch.nan, dtype=self.form.dtype, device="cuda")
        self.set_lens(self.lens)

    def set_lens(self, lens: list[int]) -> None:
        """The rows' keys are so many; everything else in the pages is NaN."""
        self.lens = lens
        self.lens_device.copy_(torch.tensor(lens, dtype=torch.int32))
        for paged, dense in ((self.paged_k, self.k), (self.paged_v, self.v)):
            paged.fill_(torch.nan)
            for row, length in enumerate(lens):
                places = torch.arange(length, device="cuda")
                paged[self.pages[row, places // paged.shape[1]].long(), places % paged.shape[1]] = dense[row][:length]

    def call(self) -> tuple[Tensor, Tensor | None]:
        from sightline.attention.backends.flash_attention.call import FlashAttention, PagedKeys, RaggedKeys

        form = self.form
        keys: PagedKeys | RaggedKeys
        if form.page_size is None:
            k, v = (
                torch.cat([each[:length] for each, length in zip(all_, self.lens, strict=True)])
                for all_ in (self.k, self.v)
            )
            keys = RaggedKeys(k, v, self.offsets)
        else:
            keys = PagedKeys(self.paged_k, self.paged_v, self.pages, self.lens_device)
        out = torch.full((*self.q.shape[:2], form.value_dim), 7.0, dtype=form.dtype, device="cuda")
        attend = FlashAttention(form.head_dim**-0.5, form.window, form.softcap)
        lse = attend(self.q, self.offsets, keys, out, causal=form.causal, needs_lse=form.lse, sinks=self.sinks)
        return out, lse

    def check(self, name: str, out: Tensor, lse: Tensor | None) -> None:
        form, wrong = self.form, []
        reach = None if form.window is None else form.window - 1
        window = (reach, 0 if form.causal else reach)
        for row, (start, stop) in enumerate(itertools.pairwise(self.query_offsets)):
            if start == stop:
                continue
            length = self.lens[row]
            wanted, wanted_lse = attend_tile(
                self.q[start:stop].float(),
                self.k[row][:length].float(),
                self.v[row][:length].float(),
                length,
                window,
                form.head_dim**-0.5,
                form.softcap,
                self.sinks,
            )
            error = float((out[start:stop].float() - wanted).abs().nan_to_num(99.0).max())
            lse_error = 0.0 if lse is None else float((lse[start:stop].T - wanted_lse).abs().nan_to_num(99.0).max())
            if error > 2e-2 or lse_error > 1e-3:
                wrong.append(
                    f"row {row} of {length} keys, {stop - start} new: out off by {error:g}, LSE by {lse_error:g}"
                )
        assert not wrong, f"{name}: {form}: {'; '.join(wrong)}"
        assert (out[self.query_offsets[-1] :] == 7.0).all(), f"{name}: the output of padding tokens was written"
