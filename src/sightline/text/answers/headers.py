"""Headers of messages in answers that are made of them: `<|start|>assistant to=functions.f<|channel|>commentary json`.

Reads what openai-harmony reads: the recipient before or behind the channel, with or without `to=`, and a content type
with or without its marker. Also reads what models are known to write beside that: channels that are doubled or begin
with other characters.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from sightline.core.answer_format import ChannelFormat

_CHANNEL = re.compile(r"[^\w<]*(\w*)[^\s<]*")
"""The name of a channel, without what is no letter around it."""


class Header(NamedTuple):
    """What a header says about its message."""

    role: str
    """Empty if it names none: the message is the model's own."""
    channel: str
    """Empty if it names none."""
    recipient: str
    """Whom the message is for; empty if it names nobody."""
    rest: str
    """Words that are neither of these."""


def read_header(form: ChannelFormat, text: str) -> Header:
    """Reads a header without the marker behind it."""
    _, start, rest = text.rpartition(form.start)
    role = form.role if start and rest.startswith(form.role) else ""
    before, marker, behind = rest.removeprefix(role).partition(form.channel)
    named = _CHANNEL.match(behind) if marker else None
    channel = named.group(1) if named else ""
    behind = behind[named.end() :] if named else behind
    words = _words(form, before)
    if words and (words[0] == form.role or (start and not role and not words[0].startswith(form.recipient))):
        role = words.pop(0)
    words += _words(form, behind)
    recipient = next((word for word in words if _is_recipient(form, word)), "")
    if recipient:
        words.remove(recipient)
    return Header(role, channel, recipient.removeprefix(form.recipient), " ".join(words))


def _words(form: ChannelFormat, text: str) -> list[str]:
    # A second channel counts nothing, and neither does the type of the text.
    parts = text.split(form.channel)
    kept = [parts[0], *(part[found.end() :] for part in parts[1:] if (found := _CHANNEL.match(part)))]
    return [word for part in kept for word in part.replace(form.content_type, f" {form.content_type}").split()]


def _is_recipient(form: ChannelFormat, word: str) -> bool:
    return word.startswith((form.recipient, form.namespace))


def opens_reasoning(form: ChannelFormat, prompt: str) -> bool:
    """True if a prompt ends within a message of reasoning, which the answer goes on with."""
    _, start, last = prompt.rpartition(form.start)
    head, message, body = last.partition(form.message)
    if not (start and message) or any(end in body for end in form.ends):
        return False
    header = read_header(form, start + head)
    return header.role == form.role and header.channel == form.reasoning and not header.recipient
