"""Stop strings in text that arrives in pieces.

The text ends at the first character that completes a stop string; if one character completes several, the longest
counts. So the result does not depend on how the text was divided. Knows strings only: no tokens, no tokenizer.

    ... text that is certain | could be the beginning of a stop string
         returned            | held back
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopMatcher:
    """Passes text on until a stop string is complete."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """`include_stop` says that the stop string is part of the returned text."""
        if not stops or "" in stops:
            raise ValueError(f"expected stop strings of at least one character, got {list(stops)}")
        self._automata = [_Automaton(stop) for stop in dict.fromkeys(stops)]
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str, *, may_end: bool = True) -> str:
        """Returns the text that became certain with `text`; nothing once a stop string is complete.

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
        """Returns the text that was held back. The text ends here."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """Matches one stop string character by character (Knuth, Morris and Pratt)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.progress = 0
        """Length of the longest beginning of the stop string, less than all of it, that the text ends with."""
        self._borders = _borders(stop)

    def advance(self, character: str) -> bool:
        """Takes one character. Returns whether it completes the stop string."""
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

    Cached: all continuations of a request have the same stop strings, and most requests share theirs with others.
    """
    borders = [0]
    for character in stop[1:]:
        length = borders[-1]
        while length and stop[length] != character:
            length = borders[length - 1]
        borders.append(length + 1 if stop[length] == character else 0)
    return tuple(borders)
