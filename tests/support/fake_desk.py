"""A desk that does what a body says, for tests of those who keep desks.

`python fake_desk.py [raise] SOCKET`. A body with the word `hang` makes it hang, `die` ends it, `lie` makes it give the
result of another job, `mumble` makes it send nonsense, `stammer` two results, `shrug` none. Otherwise a body of
`key=value` with commas between says how long to `sleep` and what to `say`. With `raise`, every job raises.
"""

from __future__ import annotations

import os
import sys
import time

from sightline.server.desks.protocol import Broken, Job, ReadBody, Ready, WrittenAnswer, job_codec, result_codec
from sightline.server.process.child import inherited_socket
from sightline.server.process.frames import LENGTH_BYTES


def main() -> None:
    jobs, results = job_codec(), result_codec()
    connection = inherited_socket(sys.argv[-1])
    stream = connection.makefile("rb")

    def taken() -> Job:
        header = stream.read(LENGTH_BYTES)
        if len(header) < LENGTH_BYTES:
            os._exit(0)
        [job] = jobs.decode(stream.read(jobs.length(header)))
        return job

    taken()
    connection.sendall(results.encode([Ready()]))
    while True:
        job = taken()
        assert isinstance(job, ReadBody)
        if "raise" in sys.argv:
            connection.sendall(results.encode([Broken(job.number, "PanicException", ("lib.rs:1 encode",))]))
            continue
        if b"hang" in job.body:
            time.sleep(1e6)
        if job.body == b"die":
            os._exit(3)
        if job.body == b"mumble":
            connection.sendall(b"\0\0\0\3abc")
            continue
        if job.body in (b"stammer", b"shrug"):
            connection.sendall(
                results.encode([WrittenAnswer(job.number, b"{}")] * (2 if job.body == b"stammer" else 0))
            )
            continue
        said = dict(part.partition("=")[::2] for part in job.body.decode().split(","))
        time.sleep(float(said.get("sleep", 0)))
        number = job.number + 1 if job.body == b"lie" else job.number
        connection.sendall(results.encode([WrittenAnswer(number, said.get("say", "{}").encode())]))


if __name__ == "__main__":
    main()
