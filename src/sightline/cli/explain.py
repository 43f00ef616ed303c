"""`explain`: what an engine would run, for a person or as JSON. What it says is found out by `sightline.diagnose`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from sightline.cli.console import notes, visible
from sightline.cli.options import json_option, parse_target, serving_options, with_model

if TYPE_CHECKING:
    from sightline.diagnose.explanation import (
        ExplainedChoice,
        ExplainedGroup,
        ExplainedMemory,
        Explanation,
        RefusedBackend,
    )
    from sightline.diagnose.planned_step import PlannedGroup, PlannedStep

_BAR = 24
"""Characters of a bar that stands for the whole of something."""
_COLOURS = ("cyan", "magenta", "yellow", "green", "blue")
_MOST_STEPS = 8
"""Steps that are printed; the others are counted."""


@click.command()
@click.argument("name", metavar="[MODEL]", required=False)
@click.option("--rows", metavar="C+N,…", help="Plan a step of such rows: 8192+512 has 8192 tokens cached and 512 new.")
@click.option("--html", type=parse_target, metavar="FILE", help="Write a picture of the planned step; needs --rows.")
@json_option
@serving_options
def explain(name: str | None, rows: str | None, html: Path | None, as_json: bool, settings: dict[str, Any]) -> None:
    """Explain what would run for MODEL: backends and the reasons, memory, degradations. Needs no GPU and no weights.

    MODEL is a folder, a config.json, a .gguf file or a Hugging Face id, of which only the config is fetched; the
    default model without it. --device also takes machines that are not here: h200, h100, a100, l40s, rtx5090, b200.
    """
    from sightline.core.config import EngineConfig
    from sightline.core.machines import find_device
    from sightline.diagnose import explain as explaining
    from sightline.diagnose.plan_picture import picture
    from sightline.diagnose.planned_step import parse_rows

    if html is not None and rows is None:
        raise click.UsageError("expected --rows with --html, which draws a planned step, got none; add --rows 0+512")
    config = with_model(EngineConfig(**settings), name)
    lengths = () if rows is None else parse_rows(rows)
    explanation = explaining.explain(config, find_device(config.device), lengths)
    if html is not None:
        html.write_text(picture(explanation), encoding="utf-8")
    if as_json:
        click.echo(json.dumps(explanation.to_data(), indent=2))
        return
    console = Console(highlight=False)
    for part in page(explanation):
        console.print(part)
    if html is not None:
        notes.print(f"[dim]the picture of the plan is in {html}[/]")


def page(explanation: Explanation) -> Iterator[RenderableType]:
    """Yields the parts of the page."""
    yield _heading(explanation)
    for group in explanation.groups:
        yield from _group(group, is_here=explanation.is_here)
    yield from _memory(explanation.memory, explanation)
    for number, step in enumerate(explanation.steps[:_MOST_STEPS]):
        yield _rule(f"step {number + 1} of {len(explanation.steps)}")
        yield _indented(_step(step, explanation.capacity.page_size))
    if len(explanation.steps) > _MOST_STEPS:
        yield Text(f"  and {len(explanation.steps) - _MOST_STEPS} more steps", style="dim")
    yield from _entries(explanation)


def _heading(explanation: Explanation) -> Panel:
    capability = explanation.compute_capability
    device = explanation.device + (
        "" if capability is None else f", compute capability {capability[0]}.{capability[1]}"
    )
    fits = explanation.capacity
    lines = [Text.assemble((device, "bold"), "" if explanation.is_here else "  (not this machine)")]
    if explanation.memory.shortage:
        lines.append(Text("does not fit this device", style="bold red"))
    elif fits.num_pages:
        lines.append(
            Text.assemble(
                (f"{fits.cache_tokens:,}", "bold green"),
                f" tokens fit the cache · up to {fits.max_model_len:,} a sequence, {fits.max_rows:,} rows and "
                f"{fits.max_step_tokens:,} tokens a step",
            )
        )
    else:
        lines.append(Text(f"no cache · up to {fits.max_step_tokens:,} tokens a step"))
    lines.append(Text(f"{explanation.dtype} · {_captured(explanation)}"))
    return Panel(Group(*lines), title=Text(visible(explanation.model)), title_align="left", border_style="cyan")


def _captured(explanation: Explanation) -> str:
    shapes = explanation.captured
    if not shapes:
        return "every step is eager"
    return f"{len(shapes)} captured steps, of {shapes[0]} to {shapes[-1]}"


def _group(group: ExplainedGroup, *, is_here: bool) -> Iterator[RenderableType]:
    name = f"{group.network} {group.name}".strip()
    yield _rule(f"{name}: {len(group.layers)} layers of {group.label}")
    told = [f"{key} {value}" for key, value in group.spec.items() if value not in (None, False)]
    lines = [
        ("layers", ranges(group.layers)),
        ("computes", f"{group.kind}: {', '.join(told)}"),
        ("needs", ", ".join(group.features) or "no special feature"),
        ("cache", _cache(group)),
    ]
    table = _table()
    for title, text in lines:
        table.add_row(Text(title, style="dim"), Text(text))
    yield _indented(table)
    for choice in group.choices:
        yield _indented(_choice(choice, is_here=is_here))


def _cache(group: ExplainedGroup) -> str:
    borrowed = "" if group.borrows_from is None else f", reads the entries of {group.borrows_from}"
    return (
        f"{' and '.join(group.policies)}{borrowed} · pages of {group.page_size} · {group.cache_dtype} · "
        f"{group.bytes_per_token:,} bytes a token"
    )


def _choice(choice: ExplainedChoice, *, is_here: bool) -> RenderableType:
    proven = Text("proven here", style="green") if choice.is_proven else Text("declared", style="yellow")
    title = Text.assemble(
        (f"{', '.join(choice.works)}  ", "dim"), (choice.name, "bold cyan"), f" · row {choice.row} · ", proven
    )
    table = _table()
    others = [each.name for each in choice.refused if not each.serves_kind]
    for each in choice.refused:
        if each.serves_kind:
            table.add_row(Text(f"not {each.name}", style="dim"), Text("; ".join(each.reasons)), _remedy(each))
    if others:
        table.add_row(
            Text(f"not {len(others)} others", style="dim"), Text("for other kinds of layers", style="dim"), ""
        )
    unproven = [Text(f"  {reason}", style="dim") for reason in choice.unproven] if is_here else []
    return Group(title, *unproven, Padding(table, (0, 0, 1, 2)))


def _remedy(refused: RefusedBackend) -> Text:
    return Text(f"→ {refused.remedy}", style="dim")


def _memory(memory: ExplainedMemory, explanation: Explanation) -> Iterator[RenderableType]:
    total, allowed = memory.total_bytes, memory.allowed_bytes
    yield _rule("memory")
    limit = f", of which the engine may hold {_size(allowed)}" if allowed and allowed != total else ""
    yield _indented(
        Text(f"{_size(total)} {'free' if explanation.compute_capability is None else 'on the card'}{limit}")
    )
    table = _table()
    for part in memory.parts:
        size = "not known" if part.num_bytes is None else f"{'≤ ' if part.is_limit else ''}{_size(part.num_bytes)}"
        bar = _bar(part.num_bytes or 0, max(1, total), _COLOURS[0])
        table.add_row(Text(part.name), Text(size), bar, Text(part.remark, style="dim"))
        for name, num_bytes in part.details[:_MOST_STEPS]:
            table.add_row(Text(f"  {name}", style="dim"), Text(_size(num_bytes), style="dim"), "", "")
    yield _indented(table)


def _step(step: PlannedStep, page_size: int) -> RenderableType:
    padded = f", {step.num_padding} of padding" if step.num_padding else ""
    kind = "eager" if step.bucket is None else f"replayed in the captured step of {step.bucket}"
    table = _table()
    longest = max(row.context_len + row.query_len for row in step.rows)
    for row in step.rows:
        length = max(1, round(_BAR * (row.context_len + row.query_len) / longest))
        new = min(length, max(1, round(length * row.query_len / (row.context_len + row.query_len))))
        bar = Text.assemble(("░" * (length - new), "dim"), ("█" * new, "cyan"))
        pages = f"{len(row.pages)} pages of {page_size}" if row.pages else "no pages"
        table.add_row(
            Text(f"row {row.asked}", style="dim"),
            Text(f"{row.context_len:,} + {row.query_len:,}"),
            bar,
            Text(f"{_tokens(row.first_token, row.query_len)} · {pages}"),
        )
    groups = _table()
    for group in step.groups:
        groups.add_row(Text(group.name, style="dim"), Text(_planned(group)))
    return Group(Text(f"{step.num_tokens:,} tokens{padded} · {kind}"), table, groups)


def _planned(group: PlannedGroup) -> str:
    parts = [
        f"{part.backend} computes {_tokens(part.first_token, part.num_tokens)}"
        + ("" if part.planned_by == part.backend else f" (its cuts are not known here; {part.planned_by} stands in)")
        for part in group.parts
    ]
    ways = [f"row {row}: {way}" for row, way in enumerate(group.ways)]
    buffers = [f"{name.partition('.')[2]} {list(shape)}" for name, shape in group.buffers.items()]
    sparse = ["sparse: each query reads chosen entries"] if group.is_sparse else []
    more = f", and {len(buffers) - _MOST_STEPS} more" if len(buffers) > _MOST_STEPS else ""
    buffered = [f"plan buffers {', '.join(buffers[:_MOST_STEPS])}{more}"] if buffers else []
    return "; ".join([group.policy, *parts, *sparse, *ways, *buffered])


def _entries(explanation: Explanation) -> Iterator[RenderableType]:
    yield _rule("what differs from what was asked")
    if not explanation.degradations:
        yield _indented(Text("nothing is degraded", style="green"))
    for entry in explanation.degradations:
        yield _indented(Text.assemble(("degraded  ", "bold yellow"), visible(f"{entry.subject}: {entry.outcome}")))
        yield _indented(Text(f"          → {visible(entry.remedy)}", style="dim"))
    for note in explanation.notes:
        yield _indented(Text.assemble(("note  ", "dim"), visible(str(note))))


def _rule(title: str) -> Rule:
    return Rule(Text(title, style="bold"), align="left", style="dim")


def _indented(part: RenderableType) -> Padding:
    return Padding(part, (0, 0, 0, 2))


def _table() -> Table:
    return Table.grid(padding=(0, 2))


def _bar(part: int, whole: int, colour: str) -> Text:
    filled = min(_BAR, round(_BAR * part / whole))
    return Text.assemble(("█" * filled, colour), ("·" * (_BAR - filled), "dim"))


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 1 << 28 else f"{num_bytes / 2**20:,.1f} MiB"


def _tokens(first: int, count: int) -> str:
    return f"token {first:,}" if count == 1 else f"tokens {first:,} to {first + count - 1:,}"


def ranges(layers: Sequence[int]) -> str:
    """Numbers as ranges with their step: 0-4 by 2, 5-9."""
    texts, start = [], 0
    while start < len(layers):
        stop, by = start + 1, layers[start + 1] - layers[start] if start + 1 < len(layers) else 1
        while stop < len(layers) and layers[stop] - layers[stop - 1] == by:
            stop += 1
        first, last = layers[start], layers[stop - 1]
        texts.append(str(first) if first == last else f"{first}-{last}" + (f" by {by}" if by > 1 else ""))
        start = stop
    return ", ".join(texts)
