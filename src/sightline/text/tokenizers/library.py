"""The boundary to the `tokenizers` library, which reads the vocabularies of models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sightline.core.errors import CheckpointError, SightlineError


@contextmanager
def library_faults(source: Path | str) -> Iterator[None]:
    """Turns every fault of the library into a `CheckpointError` that names the `source`.

    The library raises plain exceptions, and panics on some files: a `PanicException`, which is no `Exception` and has
    no name to import.
    """
    try:
        yield
    except (SightlineError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise CheckpointError(
            f"{source}: expected a tokenizer, got a fault: {str(error)[:200]}. Get the file again."
        ) from error
