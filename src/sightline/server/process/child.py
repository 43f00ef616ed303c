"""Starts a child process that is connected to this one by a socket pair.

The connection has no name in the file system: nobody else can reach it, and nothing of it remains when either process
is killed. Each process reads the end of the stream when the other is gone.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Child:
    """A process that was started, and this process's end of the connection to it."""

    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


async def start_child(command: Sequence[str]) -> Child:
    """Starts `command` with one more argument: the descriptor of its socket, for `inherited_socket`.

    The child has a session of its own, so that a terminal's signals do not reach it. Raises `OSError` if it cannot be
    started.
    """
    ours, theirs = socket.socketpair()
    with theirs:  # Closed here once the child has it: a copy would hide the child's end from the reader.
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except BaseException:
            writer.close()
            raise
    return Child(process, reader, writer)


def inherited_socket(descriptor: str) -> socket.socket:
    """The child's end of the connection, from its last argument. The child's own children do not inherit it."""
    os.set_inheritable(int(descriptor), False)
    return socket.socket(fileno=int(descriptor))
