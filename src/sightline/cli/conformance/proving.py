"""`--prove`: runs `sightline conformance --model` for the engine that is about to start, in a process of its own.

Neither this process nor a server's imports the kit.
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
"""Time for the process to exit after a signal."""
_INTERRUPTED = 128 + signal.SIGINT


def prove_first(settings: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Proves attention for the settings of an engine, and returns them with the proof required.

    If that fails, exits with the code of the process. `more` are settings that do not matter for the proof.
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
    """Runs a command with its output on standard error, and returns its exit code. It ends with this process."""
    with (
        ended_by(signal.SIGTERM, signal.SIGHUP),
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr) as process,
    ):
        try:
            return process.wait()
        except KeyboardInterrupt:
            # On a terminal, Ctrl-C has reached the command too.
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
