"""Triton's interpreter without needless work: it prepares the language again for each function that a kernel calls."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

INTERPRETER = "triton.runtime.interpreter"


@contextmanager
def language_prepared_once() -> Iterator[None]:
    """Prepares the language once for each kernel that is launched.

    Before it calls a function, the interpreter replaces every builtin of the language in the function's module. A
    kernel has done that for the functions that it calls; to look at each name again takes a third of the time.
    """
    if INTERPRETER not in sys.modules:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        interpreter = sys.modules[INTERPRETER]
        patch.setattr(interpreter, "_patch_lang", _once(interpreter))
        yield


class _Prepared:
    """Stands for changes to the language that another call takes back."""

    def restore(self) -> None:
        pass


def _once(interpreter: Any) -> Callable[[Any], Any]:
    prepare, core = interpreter._patch_lang, interpreter.tl.core
    languages = (interpreter.tl, core)

    def prepared(function: Any) -> Any:
        seen = [each for each in languages if any(value is each for value in function.__globals__.values())]
        # `load` stands for all builtins: they are replaced together.
        if seen and not any(core.is_builtin(each.load) for each in seen):
            return _Prepared()
        return prepare(function)

    return prepared
