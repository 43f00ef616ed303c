"""The command line. Parses, prints, and sets exit codes; everything else is elsewhere.

Text that was asked for goes to standard output; everything said about it goes to standard error. Heavy imports wait
until a command needs them, so that `--help` is quick.
"""

from sightline.cli.application import app, main

__all__ = ["app", "main"]
