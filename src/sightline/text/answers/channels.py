"""Reads answers that are messages with headers, as those of gpt-oss: `<|channel|>analysis<|message|>...<|end|>`.

A message with a recipient that is an offered function is a call, whatever its channel; the channel of reasoning is
reasoning; everything else is text. A header whose message never begins is none of it.
"""

from __future__ import annotations

from enum import Enum, auto

from sightline.core.answer_format import AnswerReading, ChannelFormat
from sightline.core.conversation import EventKind, new_call_id
from sightline.text.answers.headers import Header, read_header
from sightline.text.answers.json_text import JsonScanner
from sightline.text.answers.markers import MAX_SPACE, find_marker
from sightline.text.answers.reader import AnswerReader, MakeId

MAX_HEADER = 512


class _Part(Enum):
    HEADER = auto()
    """In a header, or before one."""
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()
    AFTER_CALL = auto()


class ChannelReader(AnswerReader):
    """Reads an answer made of messages. The prompt has opened the first one's header, or its reasoning."""

    def __init__(self, reading: AnswerReading, form: ChannelFormat, make_id: MakeId = new_call_id) -> None:
        super().__init__(reading, make_id)
        self._form = form
        self._part = _Part.REASONING if reading.in_reasoning else _Part.HEADER
        self._interrupted: _Part | None = None
        """The part in which a header may have begun, though no marker ended it; None if one did."""
        self._arguments = JsonScanner(first="{")
        self._has_arguments = False

    @property
    def is_reasoning(self) -> bool:
        return _Part.REASONING in (self._part, self._interrupted)

    def _step(self) -> bool:
        match self._part:
            case _Part.HEADER:
                return self._in_header()
            case _Part.CALL:
                return self._in_call()
            case _Part.AFTER_CALL:
                return self._behind_call()
            case _Part.REASONING | _Part.CONTENT:
                return self._in_body()

    def _in_header(self) -> bool:
        stripped = self._held.lstrip()
        num_spaces = len(self._held) - len(stripped)
        if num_spaces <= MAX_SPACE and not stripped:
            return False
        if num_spaces > MAX_SPACE or not self._may_be_header(stripped):
            # No header: an answer that is only text.
            self._part = _Part.CONTENT
            return True
        found = find_marker(self._held, (self._form.message, *self._form.ends))
        if found.end > MAX_HEADER:
            self._go_back(num_spaces + 1)
            return True
        if found.marker is None:
            return False
        # Another header may begin before this one has a message.
        again = self._held.find(self._form.start, num_spaces + 1, found.start)
        has_message = found.marker == self._form.message and again < 0
        header = read_header(self._form, self._held[: again if again > 0 else found.start])
        if self._interrupted is not None and not (has_message and self._is_certain(header)):
            self._go_back(num_spaces + 1)
            return True
        written, self._interrupted = self._take(again if again > 0 else found.end), None
        if has_message:
            self._open(header, written)
        else:
            self._close(header, written)
        return True

    def _may_be_header(self, text: str) -> bool:
        """True if a text begins as a header does, or may once there is more of it."""
        form = self._form
        begins = (form.start, form.channel, form.message, form.content_type, form.recipient)
        return any(text.startswith(each) or each.startswith(text) for each in begins)

    def _is_certain(self, header: Header) -> bool:
        """True if a header within a message is one: it says what only a header says."""
        is_own = header.role in ("", self._form.role)
        is_named = header.channel in (self._form.reasoning, *self._form.others)
        return is_own and is_named and len(header.rest.split()) <= 1

    def _go_back(self, count: int) -> None:
        """Tells the first letters of what is no header, though it begins as one: the same would be looked for again."""
        self._part, self._interrupted = self._interrupted or _Part.CONTENT, None
        self._tell(EventKind.REASONING if self.is_reasoning else EventKind.CONTENT, self._take(count))

    def _open(self, header: Header, written: str) -> None:
        """Begins a message. `written` is its header, which is told if it is not for the client to act on."""
        form = self._form
        name = header.recipient.removeprefix(form.namespace)
        is_own = header.role in ("", form.role)
        if is_own and name in self._tools:
            self._begin_call(name, "", None)
            self._arguments, self._has_arguments, self._part = JsonScanner(first="{"), False, _Part.CALL
        elif is_own and header.channel == form.reasoning:
            self._part = _Part.REASONING
        else:
            self._part = _Part.CONTENT
            if not is_own or header.recipient not in ("", form.role, "all", "user"):
                # A message of somebody else, or a call of a function that there is not, or not for the client.
                self._tell(EventKind.CONTENT, written)

    def _close(self, header: Header, written: str) -> None:
        """Passes a header that ends without a message: what it says beside its channel is the message."""
        is_reasoning = header.channel == self._form.reasoning
        if is_reasoning or self._is_plain(header):
            self._tell(EventKind.REASONING if is_reasoning else EventKind.CONTENT, header.rest)
        else:
            self._tell(EventKind.CONTENT, written)

    def _is_plain(self, header: Header) -> bool:
        """True if a header names nobody else, and no channel that there is not."""
        form = self._form
        is_own = header.role in ("", form.role) and not header.recipient
        return is_own and header.channel in ("", form.reasoning, *form.others)

    def _in_body(self) -> bool:
        form = self._form
        found = find_marker(self._held, (*form.ends, form.start, form.channel))
        self._tell(EventKind.REASONING if self.is_reasoning else EventKind.CONTENT, self._take(found.start))
        if found.marker is None:
            return False
        if found.marker in form.ends:
            self._take(found.end - found.start)
        else:
            self._interrupted = self._part
        self._part = _Part.HEADER
        return True

    def _in_call(self) -> bool:
        taken = self._take(self._arguments.feed(self._held))
        said = taken if self._has_arguments else taken.lstrip()
        self._has_arguments = self._has_arguments or bool(said)
        self._tell_arguments(said)
        if self._arguments.is_done:
            self._end_call()
            self._part = _Part.AFTER_CALL
            return True
        if self._arguments.is_broken:
            self._part = _Part.CONTENT
            return True
        return False

    def _behind_call(self) -> bool:
        """Drops the white space behind arguments: other text there is told."""
        self._held = self._held.lstrip()
        self._part = _Part.CONTENT if self._held else _Part.AFTER_CALL
        return bool(self._held)

    def _end(self) -> None:
        match self._part:
            case _Part.REASONING:
                self._tell(EventKind.REASONING, self._held)
            case _Part.CONTENT:
                self._tell(EventKind.CONTENT, self._held)
            case _Part.HEADER if self.is_reasoning:
                self._tell(EventKind.REASONING, self._held)
            case _Part.HEADER if self._held.strip() and not self._is_cut_header():
                self._tell(EventKind.CONTENT, self._held)
            case _:
                pass

    def _is_cut_header(self) -> bool:
        """True if what is held is a header that was cut off. One of a call is told, as far as it went."""
        form, text = self._form, self._held.lstrip()
        if self._interrupted is not None or not text.startswith((form.start, form.channel, form.content_type)):
            return False
        header = read_header(form, text)
        is_named = any(each.startswith(header.channel) for each in (form.reasoning, *form.others))
        return is_named and form.role.startswith(header.role) and not header.recipient and not header.rest
