"""A conversation: messages so far, commands that begin with a slash, and answers as they come.

Does not know who answers, nor how lines are typed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import click

from sightline.cli.answers import print_answer
from sightline.cli.chat.partners import Partner
from sightline.cli.console import notes, print_error, print_text
from sightline.core.errors import ConfigError, RequestError, SightlineError

HELP = '''\
/help          this list
/system TEXT   what the model is told first; /system shows it, /system - removes it
/model NAME    have another model answer; /model shows which there are
/save FILE     write the conversation to a new file, as JSON
/clear         forget the conversation, not the system text
/exit          leave; so does Ctrl-D
A line that ends with \\ goes on in the next one; """ begins a text of several lines, and ends it.
Ctrl-C stops an answer. A message may begin with / after a space.'''


class ChatSession:
    """Messages, and who answers them."""

    def __init__(self, partner: Partner, system: str | None, *, quiet: bool) -> None:
        self._partner = partner
        self._system = system
        self._quiet = quiet
        self._messages: list[dict[str, object]] = []
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: click.echo(HELP),
            "system": self._set_system,
            "model": self._set_model,
            "save": self._save,
            "clear": lambda _: self._messages.clear(),
        }

    def talk(self, messages: Iterable[str]) -> None:
        """Answers each message, and follows commands. An error, and Ctrl-C, end an answer and not the conversation."""
        for said in messages:
            if said.rstrip() in ("/exit", "/quit"):
                return
            try:
                if said.startswith("/"):
                    self._follow(said)
                else:
                    self.answer(said)
            except SightlineError as error:
                print_error(error)
            except KeyboardInterrupt:
                click.echo()

    def answer(self, said: str) -> None:
        """Prints the answer to a message as it comes. Keeps both, unless there is none."""
        asked: dict[str, object] = {"role": "user", "content": said}
        answer = self._partner.ask([*self._told, *self._messages, asked])
        if answer.how and not self._quiet and not self._messages:
            notes.print(f"[dim]{answer.how}[/]")
        text = print_answer(answer, quiet=self._quiet)
        if text:
            self._messages += [asked, {"role": "assistant", "content": text}]

    @property
    def _told(self) -> list[dict[str, object]]:
        return [] if self._system is None else [{"role": "system", "content": self._system}]

    def _follow(self, said: str) -> None:
        name, _, rest = said[1:].strip().partition(" ")
        if name not in self._commands:
            raise RequestError(f"expected a command, got /{name}; /help lists them, and a space before / sends a text")
        self._commands[name](rest.strip())

    def _set_system(self, text: str) -> None:
        if text:
            self._system = None if text == "-" else text
        else:
            click.echo(self._system or "no system text; /system TEXT sets one")

    def _set_model(self, name: str) -> None:
        if name:
            self._partner.switch(name)
        print_text(self._partner.name)
        if not name:
            print_text("\n".join(f"  {each}" for each in self._partner.names()))

    def _save(self, name: str) -> None:
        if not name:
            raise RequestError("expected /save FILE, got no file")
        kept = {"model": self._partner.name, "messages": [*self._told, *self._messages]}
        try:
            # Bytes of the command line that are no UTF-8 become escapes, as JSON has them.
            with Path(name).expanduser().open("x", encoding="utf-8", errors="backslashreplace") as file:
                json.dump(kept, file, ensure_ascii=False, indent=2)
        except OSError as error:
            raise ConfigError(f"expected a new file in a folder that exists, got {name}: {error.strerror}") from error
        click.echo(f"saved {len(kept['messages'])} messages to {name}")
