"""What a person types: messages of one or several lines, and a history of them.

A line that ends with a backslash goes on in the next one; a line of three quotes begins a text that ends with another.
On a terminal, lines are edited and remembered with readline. Does not know what messages mean.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import click
from rich.markup import escape

from sightline.cli.console import notes, print_error
from sightline.core.environment import chat_history_file
from sightline.core.errors import RequestError

QUOTES = '"""'
PROMPT, CONTINUED = "> ", ". "
MAX_HISTORY = 1000


def typed_messages() -> Iterator[str]:
    """Messages from standard input until it ends. On a terminal, Ctrl-C only drops what was begun."""
    is_terminal = sys.stdin.isatty()
    while True:
        try:
            if is_terminal:
                click.echo()
            message = _read_message(is_terminal)
        except EOFError:
            return
        except KeyboardInterrupt:
            if not is_terminal:
                return
            notes.print("\n[dim]Ctrl-D or /exit leaves[/]")
            continue
        except RequestError as error:
            if not is_terminal:
                raise
            print_error(error)
            continue
        if message.strip():
            yield message


def _read_message(is_terminal: bool) -> str:
    line = _read_line(PROMPT if is_terminal else "")
    following = CONTINUED if is_terminal else ""
    if line.lstrip().startswith(QUOTES):
        return _read_quoted(line.lstrip().removeprefix(QUOTES), following)
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(_read_line(following))
    return "\n".join(lines)


def _read_quoted(line: str, prompt: str) -> str:
    lines: list[str] = []
    while not line.rstrip().endswith(QUOTES):
        lines.append(line)
        line = _read_line(prompt)
    lines.append(line.rstrip().removesuffix(QUOTES))
    return "\n".join(lines).strip("\n")


def _read_line(prompt: str) -> str:
    try:
        line = input(prompt)
        line.encode()
    except UnicodeError as error:
        raise RequestError("expected text in UTF-8, got other bytes; save or type it in UTF-8") from error
    return line


@contextmanager
def remembered() -> Iterator[None]:
    """Keeps what is typed for the next chat, in a file that only the user can read. Nothing without a terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty() and find_spec("readline")):
        yield
        return
    import readline

    path = chat_history_file()
    readline.set_history_length(MAX_HISTORY)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        readline.read_history_file(path)
    except OSError as error:
        notes.print(f"[dim]what is typed is not remembered: {escape(str(error))}[/]")
        yield
        return
    try:
        yield
    finally:
        readline.write_history_file(path)
