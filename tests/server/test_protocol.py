"""What front end and engine process say to each other: every message survives, and nothing else gets through."""

from __future__ import annotations

from contextlib import suppress
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sightline.core.config import EngineConfig
from sightline.core.metrics import STEP_TOKEN_BOUNDS, EngineMetrics, PhaseSeconds
from sightline.core.request import SamplingParams, Terms
from sightline.server.process.frames import LENGTH_BYTES, Codec, ProtocolError
from sightline.server.process.protocol import (
    Accepted,
    Cancel,
    Command,
    Configure,
    Delta,
    Ended,
    Failed,
    Loading,
    Opened,
    Probe,
    Progress,
    Read,
    Refused,
    Report,
    Stop,
    Vector,
    command_codec,
    report_codec,
)
from sightline.server.process.window import UnreadLimit
from support.commands import submit

T = TypeVar("T")
PARAMS = SamplingParams(
    0.5, 0.9, 4, 0.1, 2**64 - 1, 9, (1, 2), True, False, 1.1, 0.5, -0.5, {3: -1.0}, ("a", "é"), True, 1, 2, 3, 4
)
COMMANDS: list[Command] = [
    Configure(EngineConfig(model="m", seed=3, speculative_config={"method": "ngram"}), "info"),
    submit({1: (1, 2, 3), 2: ()}, PARAMS, Terms("key-1", -3, 2.5)),
    submit({3: (4, 5)}, None, Terms("key-1"), UnreadLimit(64, 100, 200)),
    Read(1, 16, 300),
    Cancel(2),
    Probe(),
    Stop(),
]
TOKENS = (0,) * (len(STEP_TOKEN_BOUNDS) + 1)
REPORTS: list[Report] = [
    Loading("reading weights (0 of 9)"),
    Opened("m", b"tokenizer", 9, 5, 8, 7, 6, {"a": None, "b": 1.5}, ("x",), ("y",), ("z",)),
    Failed("no"),
    Accepted(1, b'{"seed": 7}'),
    Accepted(2, b""),
    Refused(1, is_full=True, message="full"),
    Delta(1, 2, "té", 3, "stop", "end", b"logprobs"),
    Delta(1, 0, "", 0, None),
    Ended(1, None, 4, PhaseSeconds(0.25, 0.5, 1.5), b"logprobs"),
    Vector(3, b"\0\1\2\3"),
    Progress(
        EngineMetrics(
            1,
            2,
            15,
            0.5,
            21,
            3,
            4,
            5,
            6,
            7,
            {"stop": 8},
            9,
            10,
            11,
            18,
            12,
            0.5,
            13,
            14,
            1.5,
            16,
            TOKENS,
            17,
            19,
            20,
            21,
            (9, 4),
        )
    ),
]


def survive(codec: Codec[T], messages: list[T]) -> None:
    frame = codec.encode(messages)
    assert codec.length(frame[:LENGTH_BYTES]) == len(frame) - LENGTH_BYTES
    assert codec.decode(frame[LENGTH_BYTES:]) == messages


def test_every_command_and_every_report_survives_the_way() -> None:
    survive(command_codec(), COMMANDS)
    survive(report_codec(), REPORTS)


def test_a_report_is_no_command() -> None:
    body = report_codec().encode(REPORTS[1:2])[LENGTH_BYTES:]
    with pytest.raises(ProtocolError):
        command_codec().decode(body)


@given(st.binary(max_size=200))
def test_garbage_is_refused(body: bytes) -> None:
    for codec in (command_codec(), report_codec()):
        with suppress(ProtocolError):
            assert codec.decode(body) == []


def test_a_frame_that_is_too_long_is_refused_before_it_is_read_and_before_it_is_sent() -> None:
    codec: Codec[Command] = Codec(list[Command], 64)
    with pytest.raises(ProtocolError, match="at most 64"):
        codec.length((65).to_bytes(LENGTH_BYTES, "big"))
    assert codec.length((64).to_bytes(LENGTH_BYTES, "big")) == 64
    with pytest.raises(ProtocolError, match="at most 64"):
        codec.encode([Cancel(1)] * 100)


def test_what_is_nested_without_end_is_refused() -> None:
    with pytest.raises(ProtocolError):
        command_codec().decode(b"\x91" * 100_000)


def test_a_request_with_parameters_that_cannot_be_is_refused_by_the_receiver() -> None:
    body = command_codec().encode([submit({1: (1,)}, SamplingParams(), Terms())])[LENGTH_BYTES:]
    assert b"temperature" in body
    with pytest.raises(ProtocolError):
        command_codec().decode(body.replace(b"\xabtemperature\xc0", b"\xabtemperature\xa1x"))
