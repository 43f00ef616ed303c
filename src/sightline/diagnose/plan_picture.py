"""Draws planned steps as one HTML page that needs nothing else: rows, pages, offsets, parts and padding.

    row     |░░░░ context ░░░░|████ new ████|     ticks where pages begin, with their numbers
    step    |█ row 2 █|██ row 0 ██|██ row 1 ██|▨ padding ▨|
    group   |-- triton --|------ flashinfer ------|

Knows explanations. Does not know how a step was planned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from sightline.diagnose.explanation import Explanation
from sightline.diagnose.planned_step import PlannedGroup, PlannedRow, PlannedStep

_WIDTH, _LEFT, _BAR, _LINE = 1000, 150, 20, 44
"""Pixels: of a drawing of all tokens, of the names beside it, of a bar's height, and from line to line."""
_LEAST_LABELLED = 26
"""Pixels of a page from which its number is written."""
_LEAST_TICKED = 4
"""Pixels of a page from which its border is drawn."""
_HUES = (205, 20, 140, 280, 50, 330, 175, 95)

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2530; --dim: #6b7785; --paper: #fff; --context: #dfe5ec; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4eaf1; --dim: #93a0ae; --paper: #12171d; --context: #2d3742; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1200px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin-top: 2rem; }
p, td, th { color: var(--ink); } .dim { color: var(--dim); }
svg { width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: var(--ink); }
svg .dim { fill: var(--dim); font-size: 10px; } svg .context { fill: var(--context); }
svg .tick { stroke: var(--dim); stroke-width: 0.5; } svg .padding { fill: url(#padding); }
table { border-collapse: collapse; font-size: 13px; } td, th { text-align: left; padding: 2px 12px 2px 0;
  vertical-align: top; }
"""


def picture(explanation: Explanation) -> str:
    """Returns the page. Everything that a model's files say is escaped in it."""
    title = f"{explanation.model} on {explanation.device}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p class=dim>{escape(explanation.dtype)}, pages of {explanation.capacity.page_size} tokens, at most "
        f"{explanation.capacity.max_step_tokens:,} tokens a step</p>",
    ]
    page_size, count = explanation.capacity.page_size, len(explanation.steps)
    for number, step in enumerate(explanation.steps, start=1):
        body += _step(step, page_size, f"Step {number} of {count}")
    entries = [*explanation.degradations, *explanation.notes]
    body += ["<h2>Ledger</h2><ul>", *(f"<li>{escape(str(entry))}</li>" for entry in entries), "</ul>"]
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title><style>{_STYLE}</style>"
    return "\n".join([head, "<body>", *body, "</body></html>", ""])


def _step(step: PlannedStep, page_size: int, title: str) -> Iterator[str]:
    kind = "eager" if step.bucket is None else f"replayed in the captured step of {step.bucket}"
    padded = f", {step.num_padding} of padding" if step.num_padding else ""
    yield f"<h2>{title}: {step.num_tokens:,} tokens{padded}, {escape(kind)}</h2>"
    lines = [_LINE * index for index in range(len(step.rows) + 1 + len(step.groups))]
    yield f'<svg viewBox="0 0 {_LEFT + _WIDTH + 10} {lines[-1] + _LINE + 6}" role="img" aria-label="{escape(title)}">'
    yield (
        '<defs><pattern id="padding" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect width="3" height="6" fill="currentColor" opacity="0.35"/></pattern></defs>'
    )
    longest = max(row.context_len + row.query_len for row in step.rows)
    for top, row in zip(lines, step.rows, strict=False):
        yield from _row(row, top, _WIDTH / longest, page_size)
    yield from _tape(step, lines[len(step.rows)])
    for top, group in zip(lines[len(step.rows) + 1 :], step.groups, strict=True):
        yield from _parts(group, top, _WIDTH / (step.num_tokens + step.num_padding))
    yield "</svg><table><tr><th>row<th>context<th>new<th>tokens of the step<th>pages, in order</tr>"
    for row in step.rows:
        pages = ", ".join(_runs(row.pages)) or "none"
        yield (
            f"<tr><td>{row.asked}<td>{row.context_len:,}<td>{row.query_len:,}<td>{row.first_token:,} to "
            f"{row.first_token + row.query_len - 1:,}<td class=dim>{pages}</tr>"
        )
    yield "</table>"
    for group in step.groups:
        yield f"<p><b>{escape(group.name)}</b> <span class=dim>{escape(_told(group))}</span></p>"


def _row(row: PlannedRow, top: int, scale: float, page_size: int) -> Iterator[str]:
    """A row: its context, its new tokens, and where its pages begin."""
    length = row.context_len + row.query_len
    yield _text(0, top, f"row {row.asked}: {row.context_len:,} + {row.query_len:,}")
    yield _box(0, top, row.context_len * scale, 'class="context"', f"context of {row.context_len:,} tokens")
    new = f"{row.query_len:,} new tokens, at {row.first_token:,} of the step"
    yield _box(row.context_len * scale, top, row.query_len * scale, _fill(row.asked), new)
    width = page_size * scale
    for index, page in enumerate(row.pages):
        left = index * width
        if width >= _LEAST_TICKED:
            yield (
                f'<line class="tick" x1="{_LEFT + left:.1f}" x2="{_LEFT + left:.1f}" y1="{top}" y2="{top + _BAR + 4}"/>'
            )
        if width >= _LEAST_LABELLED:
            yield f'<text class="dim" x="{_LEFT + left + 2:.1f}" y="{top + _BAR + 12}">page {page}</text>'
    if width < _LEAST_LABELLED:
        told = f"{len(row.pages)} pages of {page_size}, {length:,} tokens"
        yield f'<text class="dim" x="{_LEFT}" y="{top + _BAR + 12}">{told}</text>'


def _tape(step: PlannedStep, top: int) -> Iterator[str]:
    """The tokens of the step in order, with offsets where rows begin."""
    scale = _WIDTH / (step.num_tokens + step.num_padding)
    yield _text(0, top, "the step's tokens")
    free = 0.0
    for row in step.rows:
        left = row.first_token * scale
        yield _box(left, top, row.query_len * scale, _fill(row.asked), f"row {row.asked}")
        if left >= free:
            yield f'<text class="dim" x="{_LEFT + left:.1f}" y="{top + _BAR + 12}">{row.first_token:,}</text>'
            free = left + _LEAST_LABELLED
    if step.num_padding:
        what = f"{step.num_padding} tokens of padding"
        yield _box(step.num_tokens * scale, top, step.num_padding * scale, 'class="padding"', what)


def _parts(group: PlannedGroup, top: int, scale: float) -> Iterator[str]:
    """Which backend serves which tokens of a group."""
    yield _text(0, top, group.name)
    for number, part in enumerate(group.parts):
        left, width = part.first_token * scale, part.num_tokens * scale
        fill = f'fill="hsl({_HUES[number % len(_HUES)]} 25% 60%)"'
        yield _box(left, top, width, fill, f"{part.backend}: {part.num_tokens:,} tokens")
        # The names of narrow parts are written one below the other.
        below = top + _BAR + 11 + 9 * number
        yield f'<text class="dim" x="{_LEFT + left:.1f}" y="{below}">{escape(part.backend)}</text>'


def _runs(pages: Sequence[int]) -> Iterator[str]:
    """Pages in order, with those that follow one another as one range."""
    start = 0
    for index, page in enumerate(pages):
        if index + 1 == len(pages) or pages[index + 1] != page + 1:
            yield str(page) if index == start else f"{pages[start]} to {page}"
            start = index + 1


def _told(group: PlannedGroup) -> str:
    parts = ", ".join(
        f"{part.backend} for {part.num_tokens:,} tokens"
        + ("" if part.planned_by == part.backend else f" (planned here by {part.planned_by} in its place)")
        for part in group.parts
    )
    buffers = "; ".join(f"{name} {list(shape)}" for name, shape in group.buffers.items())
    ways = ", ".join(f"row {row} {way}" for row, way in enumerate(group.ways))
    return " · ".join(filter(None, [group.policy, "sparse" if group.is_sparse else "", parts, ways, buffers]))


def _fill(number: int) -> str:
    return f'fill="hsl({_HUES[number % len(_HUES)]} 60% 55%)"'


def _text(left: float, top: int, text: str) -> str:
    return f'<text x="{left:.0f}" y="{top + 15}">{escape(text)}</text>'


def _box(left: float, top: int, width: float, look: str, title: str) -> str:
    """A bar, with a title to point at. It is never too narrow to be seen, unless it stands for nothing."""
    if width <= 0:
        return ""
    return (
        f'<rect x="{_LEFT + left:.1f}" y="{top}" width="{max(1.5, width):.1f}" height="{_BAR}" {look}>'
        f"<title>{escape(title)}</title></rect>"
    )
