"""Messages in shared memory arrive whole, in order, once, at every reader, however long they are."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Iterator

import pytest

from sightline.core.errors import RankLostError
from sightline.distributed.ring import RingReceiver, RingSender, make_ring_file

NUM_READERS, CAPACITY = 2, 4096


class Rig:
    def __init__(self) -> None:
        self.descriptor = make_ring_file(NUM_READERS, CAPACITY)
        pairs = [socket.socketpair() for _ in range(NUM_READERS)]
        self.ours, self.theirs = [ours for ours, _ in pairs], [theirs for _, theirs in pairs]
        self.sender = RingSender(self.descriptor, self.ours, 0.5)
        self.receivers = [
            RingReceiver(self.descriptor, NUM_READERS, number, each) for number, each in enumerate(self.theirs)
        ]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    os.close(rig.descriptor)
    for each in (*rig.ours, *rig.theirs):
        each.close()


def test_messages_of_all_lengths_arrive_in_order(rig: Rig) -> None:
    order = random.Random(3)
    messages = [order.randbytes(order.choice([0, 1, 80, 500, 1023, 1024, 1025, 9000])) for _ in range(400)]
    found: list[list[bytes]] = [[] for _ in range(NUM_READERS)]

    def read(number: int) -> None:
        found[number].extend(rig.receivers[number].receive() for _ in messages)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(NUM_READERS)]
    for each in threads:
        each.start()
    for message in messages:
        rig.sender.send(message)
    for each in threads:
        each.join(20)
    assert found == [messages] * NUM_READERS


def test_a_reader_that_sleeps_is_woken(rig: Rig) -> None:
    timer = threading.Timer(0.3, rig.sender.send, [b"late"])
    timer.start()
    assert rig.receivers[0].receive() == b"late"


def test_a_reader_that_takes_nothing_is_lost(rig: Rig) -> None:
    def send_much() -> None:
        for _ in range(10):
            rig.sender.send(bytes(1000))

    with pytest.raises(RankLostError, match=r"read none of its orders for 0\.5 s"):
        send_much()


def test_a_reader_hears_that_the_writer_is_gone(rig: Rig) -> None:
    rig.ours[1].close()
    with pytest.raises(RankLostError, match="the leading rank is gone"):
        rig.receivers[1].receive()


def test_a_message_that_is_damaged_is_refused(rig: Rig) -> None:
    rig.sender.send(b"a message")
    memory = rig.sender._ring._data
    memory[10] ^= 1
    with pytest.raises(RankLostError, match="got other bytes"):
        rig.receivers[0].receive()
