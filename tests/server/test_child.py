"""Child processes that are connected by a socket pair, on both event loops."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

import pytest
import uvloop

from sightline.server.process.child import Child, start_child

ECHO = """
import subprocess, sys
from sightline.server.process.child import inherited_socket
with inherited_socket(sys.argv[-1]) as connection:
    kept = subprocess.run(["sh", "-c", f": <&{connection.fileno()}"], close_fds=False, capture_output=True)
    connection.sendall(connection.recv(5) + bytes([kept.returncode != 0]))
"""


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_both_ends_talk_and_a_childs_children_do_not_inherit_the_socket(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def talk() -> None:
        children = [await start_child([sys.executable, "-c", ECHO]) for _ in range(2)]
        for child in children:
            child.writer.write(b"hello")
            # The end of the stream says that the child is gone: no other process holds its end.
            assert await asyncio.wait_for(child.reader.read(), 30) == b"hello\x01"
            assert await child.process.wait() == 0
            await _close(child)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(talk())


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_command_that_does_not_exist_is_an_os_error(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def fail() -> None:
        await start_child(["/nowhere/to/be/found"])

    with asyncio.Runner(loop_factory=new_loop) as runner, pytest.raises(FileNotFoundError):
        runner.run(fail())


async def _close(child: Child) -> None:
    child.writer.close()
    await child.writer.wait_closed()
