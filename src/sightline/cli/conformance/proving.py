"""`--prove`: conformance for exactly the engine that is about to start, in a process of its own.

Knows command lines and processes. What is proven, and how, is `sightline conformance --model`'s to know: neither this
process nor a server's imports the kit.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from sightline.cli.console import notes
from sightline.cli.signals import ended_by

_END_SECONDS = 10.0
"""What the process has to end in, once it is told to."""
_INTERRUPTED = 128 + signal.SIGINT


def prove_first(settings: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The settings of an engine, with its proof required, once attention is proven for them.

    Exits with the code of the process that could not prove it. `more` are settings that change nothing here.
    """
    from sightline.core.command_line import prove_words
    from sightline.core.config import EngineConfig
    from sightline.models.loading.default_model import default_model_path

    config = EngineConfig(**settings, **more)
    words = prove_words(config, str(default_model_path()) if config.model is None else config.model)
    code = _run([sys.executable, "-P", "-m", "sightline", *words])
    if code != 0:
        notes.print(f"[bold red]error[/]: not started: attention is not proven for this engine (exit code {code})")
        sys.exit(code if code > 0 else 128 - code)
    return {**settings, "require_proof": True}


def _run(command: list[str]) -> int:
    """Waits for a command whose output is notes, not answers. What ends this process ends it too."""
    with (
        ended_by(signal.SIGTERM, signal.SIGHUP),
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr) as process,
    ):
        try:
            return process.wait()
        except KeyboardInterrupt:
            # On a terminal it was interrupted too.
            _end(process, signal.SIGINT)
            sys.exit(_INTERRUPTED)
        finally:
            _end(process, signal.SIGTERM)


def _end(process: subprocess.Popen[bytes], number: int) -> None:
    if process.poll() is not None:
        return
    process.send_signal(number)
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
