"""The checks of how answers are read and held are green as the code stands, and red with each planted bug."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from sightline.core.conversation import Conversation
from sightline.structured import answers as grammars
from sightline.text.answers import reader
from support import answer_checks as checks

Check = Callable[[], None]


def _loses_a_byte_at_a_border(patch: pytest.MonkeyPatch) -> None:
    push = reader.AnswerReader.push

    def losing(self: reader.AnswerReader, text: str) -> object:
        # What was held back is forgotten when more comes.
        self._held = self._held[:-1]
        return push(self, text)

    patch.setattr(reader.AnswerReader, "push", losing)


def _escapes_arguments_twice(patch: pytest.MonkeyPatch) -> None:
    tell = reader.AnswerReader._tell_arguments
    patch.setattr(
        reader.AnswerReader, "_tell_arguments", lambda self, text: tell(self, json.dumps(text)[1:-1] if text else text)
    )


def _finds_calls_in_reasoning(patch: pytest.MonkeyPatch) -> None:
    markers = reader.MarkedReader._markers

    def more(self: reader.MarkedReader) -> list[str]:
        return [*markers(self), *([self._calls.open] if self.is_reasoning and self._calls else [])]

    patch.setattr(reader.MarkedReader, "_markers", more)
    patch.setattr(reader.MarkedReader, "_pass_marker", _passes_calls)


def _passes_calls(self: reader.MarkedReader, marker: str, written: str) -> None:
    if self._calls is not None and marker == self._calls.open:
        self._open_call([written])
    else:
        self._part, self._is_behind_marker = reader._Part.TEXT, True


def _ignores_the_named_choice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Conversation, "callable_tools", property(lambda self: self.tools))


def _lets_answers_end_early(patch: pytest.MonkeyPatch) -> None:
    marked = grammars._Writer.marked
    patch.setattr(grammars._Writer, "marked", lambda self: f"({marked(self)})?")


PLANTED: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Check]] = {
    "parser loses a byte at a chunk border": (_loses_a_byte_at_a_border, checks.check_divisions),
    "argument escaped twice": (_escapes_arguments_twice, checks.check_arguments_as_written),
    "tool call inside the reasoning returned as a call": (_finds_calls_in_reasoning, checks.check_reasoning),
    "named choice ignored": (_ignores_the_named_choice, checks.check_named_choice),
    "EOS allowed early": (_lets_answers_end_early, checks.check_end),
}


@pytest.mark.parametrize(("plant", "check"), PLANTED.values(), ids=PLANTED)
def test_a_planted_bug_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    check()
    plant(monkeypatch)
    with pytest.raises((AssertionError, ValueError, IndexError)):
        check()
