"""`sightline serve` with `fake_engine` behind it, in a process of its own: nothing is computed, all else is real.

`python fake_serve.py '{"model": …, "engine": {…}, "server": {…}}'`: settings of `EngineConfig` and `ServerConfig`;
`desk` replaces the desks by `fake_desk`, with this argument.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import uvloop

from sightline.core.config import EngineConfig
from sightline.core.errors import SightlineError
from sightline.server.desks.pool import DESK
from sightline.server.http.limits import Limits
from sightline.server.logs import log_as_json
from sightline.server.serve import Server, ServerConfig

FAKE_ENGINE = (sys.executable, str(Path(__file__).with_name("fake_engine.py")))
FAKE_DESK = (sys.executable, str(Path(__file__).with_name("fake_desk.py")))


def run(settings: dict[str, Any]) -> None:
    log_as_json("debug")
    served = settings["server"]
    limits = Limits(**served.pop("limits", {}))
    desk = (*FAKE_DESK, served.pop("desk")) if "desk" in served else DESK
    for name in ("api_keys", "served_names", "allowed_hosts", "cors_origins"):
        served[name] = tuple(served.get(name, ()))

    async def serve() -> None:
        engine = EngineConfig(model=settings["model"], **settings["engine"])
        config = ServerConfig(port=0, limits=limits, **served)
        await Server(config, engine, lambda *_: None, FAKE_ENGINE, desk).run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


if __name__ == "__main__":
    try:
        run(json.loads(sys.argv[1]))
    except SightlineError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
