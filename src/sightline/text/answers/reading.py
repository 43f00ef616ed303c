"""Chooses the reader of an answer."""

from __future__ import annotations

from sightline.core.answer_format import AnswerReading
from sightline.core.conversation import new_call_id
from sightline.text.answers.channels import ChannelReader
from sightline.text.answers.reader import AnswerReader, MakeId, MarkedReader


def answer_reader(reading: AnswerReading, make_id: MakeId = new_call_id) -> AnswerReader:
    """The reader of an answer. `make_id` makes an id of a given length for a call, if the model writes none."""
    if (channels := reading.format.channels) is not None:
        return ChannelReader(reading, channels, make_id)
    return MarkedReader(reading, make_id)
