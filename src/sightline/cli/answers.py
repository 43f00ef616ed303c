"""Answers on their way to a terminal: their pieces, what they are sampled with, and how they ended.

Does not know who asked, nor who answers.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

import click
from rich.markup import escape

from sightline.cli.console import notes, print_text, visible
from sightline.core.errors import RequestError
from sightline.core.request import EffectiveParams

if TYPE_CHECKING:
    from sightline.engine.calls import TextStream


class Piece(NamedTuple):
    """Part of an answer."""

    text: str
    num_tokens: int
    """Tokens that it adds to the answer's count."""
    finish_reason: str | None


class Answer(NamedTuple):
    """An answer on its way. Closing the pieces ends its request."""

    how: str
    """What it is sampled with, as far as that is known."""
    pieces: Generator[Piece]


def streamed_answer(stream: TextStream) -> Answer:
    """The answer of an engine in this process."""
    return Answer(describe_params(stream.params), _pieces(stream))


def _pieces(stream: TextStream) -> Generator[Piece]:
    with closing(stream):
        for delta in stream:
            yield Piece(delta.text, len(delta.token_ids), delta.finish_reason)
            if delta.error is not None:
                raise RequestError(delta.error)


def print_answer(answer: Answer, *, quiet: bool) -> str:
    """Prints pieces and returns the whole; Ctrl-C ends the answer and keeps what came."""
    started, first, pieces, num_tokens, reason = time.perf_counter(), 0.0, list[str](), 0, None
    try:
        with closing(answer.pieces):
            for piece in answer.pieces:
                first = first or time.perf_counter()
                print_text(piece.text, ends_line=False)
                pieces.append(piece.text)
                num_tokens += piece.num_tokens
                reason = piece.finish_reason or reason
    except KeyboardInterrupt:
        reason = "stopped"
    finally:
        click.echo()
    if not quiet:
        _tell_end(reason, num_tokens, first - started, time.perf_counter() - first)
    return "".join(pieces)


def _tell_end(reason: str | None, num_tokens: int, until_first: float, then: float) -> None:
    """Prints how fast the answer was, and why it ended if it was cut."""
    if reason == "length":
        notes.print(f"[yellow]cut after {num_tokens} tokens[/]: max_tokens, or the end of the context, was reached")
    elif reason is not None and reason != "stop":
        notes.print(f"[yellow]{escape(visible(reason))}[/]: the answer is not whole")
    if num_tokens > 1:
        rate = (num_tokens - 1) / max(then, 1e-9)
        notes.print(f"[dim]{num_tokens} tokens · first after {until_first:.2f} s · then {rate:.1f} tokens/s[/]")


def describe_params(params: EffectiveParams) -> str:
    """What the model or the caller asked for, in one line of rich's markup."""
    how = [f"temperature {params.temperature:g}", f"top_p {params.top_p:g}", f"top_k {params.top_k}"]
    how += [f"min_p {params.min_p:g}", f"seed {params.seed}"]
    if params.temperature == 0.0:
        how = ["greedy (temperature 0)"]
    how += [
        f"{name} {value:g}"
        for name, value, neutral in (
            ("repetition_penalty", params.repetition_penalty, 1.0),
            ("presence_penalty", params.presence_penalty, 0.0),
            ("frequency_penalty", params.frequency_penalty, 0.0),
            ("min_tokens", params.min_tokens, 0),
        )
        if value != neutral
    ]
    how += [f"stop {escape(repr(text))}" for text in params.stop]
    return " · ".join([*how, f"max_tokens {params.max_tokens}"])
