"""Where an answer ends by its own words: stop strings in text that comes in pieces.

Owns the rule of what may be shown. A stop string ends the text at the first character that completes one; of several
that the same character completes, the longest counts. So the cut does not depend on how the text was divided. Knows
strings only: no tokens, no tokenizer.

    ... text that is certain | could be the beginning of a stop string
         given out           | held back
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopMatcher:
    """Passes text on until a stop string is complete."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """`include_stop`: the stop string itself is given out too."""
        if not stops or "" in stops:
            raise ValueError(f"expected stop strings of at least one character, got {list(stops)}")
        self._automata = [_Automaton(stop) for stop in dict.fromkeys(stops)]
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str, *, may_end: bool = True) -> str:
        """What became certain with `text`. Nothing follows once a stop string is complete.

        A stop string that is completed while `may_end` is False is text like any other.
        """
        if self.matched is not None:
            return ""
        pending, start = self._held + text, len(self._held)
        for end, character in enumerate(text, start + 1):
            complete = [automaton.stop for automaton in self._automata if automaton.advance(character)]
            if complete and may_end:
                self.matched = max(complete, key=len)
                self._held = ""
                return pending[: end if self._include_stop else end - len(self.matched)]
        certain = len(pending) - max(automaton.progress for automaton in self._automata)
        self._held = pending[certain:]
        return pending[:certain]

    def flush(self) -> str:
        """What was held back. The text ends here."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """How much of one stop string the text ends with, character by character (Knuth, Morris and Pratt)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.progress = 0
        """Characters of the stop string, less than all, that the text ends with."""
        self._borders = _borders(stop)

    def advance(self, character: str) -> bool:
        """Takes one character; True where it completes the stop string."""
        progress = self.progress
        while progress and self.stop[progress] != character:
            progress = self._borders[progress - 1]
        if self.stop[progress] == character:
            progress += 1
        complete = progress == len(self.stop)
        self.progress = self._borders[progress - 1] if complete else progress
        return complete


@lru_cache(maxsize=1024)
def _borders(stop: str) -> tuple[int, ...]:
    """For each beginning of `stop`, the length of the longest shorter beginning that it ends with.

    All continuations of a request have the same stop strings, and most requests the same as others.
    """
    borders = [0]
    for character in stop[1:]:
        length = borders[-1]
        while length and stop[length] != character:
            length = borders[length - 1]
        borders.append(length + 1 if stop[length] == character else 0)
    return tuple(borders)
