"""Reads the text of one answer as it comes: what is reasoning, what is content, and which calls it asks for.

    text ─▶ AnswerReader ─▶ AnswerEvents
              └─ held back: what may be the beginning of a marker, and white space before one

All text is told, but for markers, the white space beside them and what the syntax of calls puts around names and
arguments. A call whose name is not known yet is told as content if it turns out to be none. A call in the reasoning is
reasoning. The result does not depend on how the text is divided. Knows strings only: no tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum, auto

from sightline.core.answer_format import AnswerReading, CallFormat, ReasoningFormat
from sightline.core.conversation import AnswerEvent, EventKind, ToolMode, merged, new_call_id
from sightline.text.answers.calls import READERS, CallReader, CallState
from sightline.text.answers.markers import MAX_SPACE, find_marker, match_marker

MakeId = Callable[[int | None], str]


class AnswerReader(ABC):
    """Reads one answer."""

    def __init__(self, reading: AnswerReading, make_id: MakeId = new_call_id) -> None:
        """`make_id` makes an id of a given length for a call, if the model writes none."""
        self._reading = reading
        callable_tools = () if reading.mode is ToolMode.NONE else reading.tools
        self._tools = {tool.name: tool for tool in callable_tools}
        self._make_id = make_id
        self._events: list[AnswerEvent] = []
        self._held = ""
        """Text that was not taken yet."""
        self._ids: set[str] = set()
        """The ids of its calls. Results are told apart by them, so one that a model writes twice counts once."""
        self.num_whole = 0
        """Calls that are whole."""
        self.num_begun = 0
        """Calls that have begun."""

    @property
    def is_over(self) -> bool:
        """True if the answer has all calls that it may have."""
        return self.num_whole > 0 and not self._reading.parallel_calls

    @property
    def has_calls(self) -> bool:
        """True if the answer has calls, and all of them are whole."""
        return 0 < self.num_begun == self.num_whole

    @property
    @abstractmethod
    def is_reasoning(self) -> bool:
        """True if the text that comes is reasoning."""

    def push(self, text: str) -> list[AnswerEvent]:
        """Takes text. Returns what became certain."""
        self._held += text
        while self._held and not self.is_over and self._step():
            pass
        if self.is_over:
            self._held = ""
        return self._take_events()

    def finish(self) -> list[AnswerEvent]:
        """Returns what was held back. The answer ends here."""
        self._end()
        self._held = ""
        return self._take_events()

    @abstractmethod
    def _step(self) -> bool:
        """Takes some of the held text. Returns False if more text is needed."""

    @abstractmethod
    def _end(self) -> None:
        """Tells the held text as it stands."""

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken

    def _tell(self, kind: EventKind, text: str) -> None:
        if text:
            self._events.append(AnswerEvent(kind, text))

    def _take_events(self) -> list[AnswerEvent]:
        events, self._events = self._events, []
        return merged(events) if len(events) > 1 else events

    def _begin_call(self, name: str, call_id: str, id_length: int | None) -> None:
        self.num_begun += 1
        number = self.num_begun - 1
        told = call_id if call_id and call_id not in self._ids else self._make_id(id_length)
        self._ids.add(told)
        self._events.append(AnswerEvent(EventKind.CALL, "", number, told, name))

    def _tell_arguments(self, text: str) -> None:
        if text:
            self._events.append(AnswerEvent(EventKind.ARGUMENTS, text, self.num_begun - 1))

    def _end_call(self) -> None:
        self.num_whole += 1
        self._events.append(AnswerEvent(EventKind.CALL_END, "", self.num_begun - 1))


class _Part(Enum):
    """The parts of an answer with markers."""

    TEXT = auto()
    REASONING = auto()
    SECTION = auto()
    """Between the calls of a section."""
    CALL = auto()
    CLOSE = auto()
    """Behind a call, before what closes it."""


class MarkedReader(AnswerReader):
    """Reads an answer whose parts are between markers."""

    def __init__(self, reading: AnswerReading, make_id: MakeId = new_call_id) -> None:
        super().__init__(reading, make_id)
        self._reasoning: ReasoningFormat | None = reading.format.reasoning
        self._calls: CallFormat | None = reading.format.calls if self._tools else None
        self._part = _Part.REASONING if reading.in_reasoning else _Part.TEXT
        self._is_first = True
        """True at the beginning, where reasoning may be opened, and calls without markers may begin."""
        self._is_behind_marker = reading.in_reasoning
        self._call: CallReader | None = None
        self._raw: list[str] = []
        """What was taken of a call whose name is not known."""
        self._is_section = False

    @property
    def is_reasoning(self) -> bool:
        return self._part is _Part.REASONING

    def _step(self) -> bool:
        match self._part:
            case _Part.TEXT:
                return self._in_text(EventKind.CONTENT)
            case _Part.REASONING:
                return self._in_text(EventKind.REASONING)
            case _Part.SECTION:
                return self._in_section()
            case _Part.CALL:
                return self._in_call()
            case _Part.CLOSE:
                return self._behind_call()

    def _markers(self) -> list[str]:
        """What may end the text that comes."""
        if self._part is _Part.REASONING:
            return [] if self._reasoning is None else [self._reasoning.close]
        return [] if self._calls is None else [each for each in (self._calls.section_open, self._calls.open) if each]

    def _in_text(self, kind: EventKind) -> bool:
        if self._is_behind_marker:
            self._held = self._held.lstrip()
        if self._is_first and (moved := self._at_start()) is not None:
            return moved
        found = find_marker(self._held, self._markers())
        certain = found.start
        while certain and found.start - certain < MAX_SPACE and self._held[certain - 1].isspace():
            certain -= 1
        if certain:
            self._tell(kind, self._take(certain))
            self._is_behind_marker = False
        if found.marker is None:
            return False
        self._pass_marker(found.marker, self._take(found.end - certain))
        return True

    def _at_start(self) -> bool | None:
        """Looks for what only stands at the beginning: a marker that opens reasoning, or a call without a marker.

        Returns True if it was taken, False if more text is needed, None if the beginning is other text.
        """
        stripped, reasoning = self._held.lstrip(), self._reasoning
        num_spaces = len(self._held) - len(stripped)
        if not stripped and num_spaces <= MAX_SPACE:
            return False
        end = None if reasoning is None or num_spaces > MAX_SPACE else match_marker(stripped, 0, reasoning.open)
        if end == -1:
            return False
        self._is_first = False
        if end is not None:
            # Behind reasoning that the prompt has opened, it is opened again: some models do.
            self._take(num_spaces + end)
            self._part, self._is_behind_marker = _Part.REASONING, True
            return True
        if self._part is _Part.TEXT and self._is_bare and stripped.startswith("{") and num_spaces <= MAX_SPACE:
            self._open_call([self._take(num_spaces)])
            return True
        return None

    @property
    def _is_bare(self) -> bool:
        """True if no marker opens calls."""
        return self._calls is not None and not self._calls.open and not self._calls.section_open

    def _pass_marker(self, marker: str, written: str) -> None:
        """Goes on behind a marker. `written` is how the text has it, with the white space before it."""
        self._is_behind_marker = True
        reasoning, calls = self._reasoning, self._calls
        if reasoning is not None and self.is_reasoning:
            self._part, self._is_first = _Part.TEXT, self._is_bare
        elif calls is not None and marker == calls.section_open:
            self._part, self._is_section = _Part.SECTION, True
        else:
            self._open_call([written])

    def _open_call(self, raw: list[str]) -> None:
        if self._calls is not None:
            self._part, self._raw = _Part.CALL, raw
            self._call = READERS[self._calls.syntax](self._calls, self._tools)

    def _in_section(self) -> bool:
        """Between the calls of a section: another one, or its end."""
        calls = self._calls
        self._held = self._held.lstrip()
        if calls is None or not self._held:
            return False
        if not calls.open and self._held[0] == "{":
            self._open_call([])
            return True
        found = find_marker(
            self._held, [each for each in (calls.open, calls.section_close, calls.separator) if each.strip()]
        )
        if found.start > 0:
            self._part, self._is_section = _Part.TEXT, False
            return True
        if found.marker is None:
            return False
        written = self._take(found.end)
        if found.marker == calls.section_close:
            self._part, self._is_section, self._is_behind_marker = _Part.TEXT, False, True
        elif found.marker == calls.open:
            self._open_call([written])
        return True

    def _in_call(self) -> bool:
        call = self._call
        if call is None:
            return False
        had_name = call.name is not None
        taken = self._take(call.feed(self._held))
        if not had_name:
            self._raw.append(taken)
        if call.name is not None:
            self._raw = []
            self._tell_call(call, begins=not had_name)
        return self._after_feed(call, bool(taken))

    def _tell_call(self, call: CallReader, *, begins: bool) -> None:
        if begins and call.name is not None and self._calls is not None:
            self._begin_call(call.name, call.call_id, self._calls.id_length)
        self._tell_arguments(call.take_said())

    def _after_feed(self, call: CallReader, moved: bool) -> bool:
        match call.state:
            case CallState.WHOLE:
                self._end_call()
                self._part = _Part.CLOSE
                return True
            case CallState.BROKEN:
                self._leave_call()
                return True
            case CallState.OPEN:
                return moved and bool(self._held)

    def _leave_call(self) -> None:
        """Tells a call that is none as content."""
        self._tell(EventKind.CONTENT, self._untold())
        self._call, self._raw, self._part = None, [], _Part.TEXT
        self._is_behind_marker = self._is_section = False

    def _untold(self) -> str:
        """What was taken of the call, and is not told."""
        return "".join(self._raw) + ("" if self._call is None else self._call.untold)

    def _behind_call(self) -> bool:
        """Takes what closes a call, if it is there."""
        calls = self._calls
        if calls is None:
            return False
        wanted = calls.separator if self._is_bare else calls.close
        self._held = self._held.lstrip()
        if not self._held:
            return False
        found = find_marker(self._held, [wanted] if wanted else [])
        if wanted and found.start == 0 and found.marker is None:
            return False
        self._is_behind_marker = True
        self._part = _Part.SECTION if self._is_section else _Part.TEXT
        if wanted and found.start == 0:
            self._take(found.end)
            if self._is_bare:
                self._part = _Part.SECTION
        return True

    def _end(self) -> None:
        match self._part:
            case _Part.REASONING:
                self._tell(EventKind.REASONING, self._held)
            case _Part.TEXT if self._held.strip() or not self._is_behind_marker:
                self._tell(EventKind.CONTENT, self._held)
            case _Part.CALL:
                self._tell(EventKind.CONTENT, self._untold() + self._held)
            case _Part.SECTION | _Part.CLOSE if self._held.strip():
                self._tell(EventKind.CONTENT, self._held)
            case _:
                pass
