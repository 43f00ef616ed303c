"""JSON in text that arrives in pieces: where a value ends, and where it stops being JSON. Builds no values."""

from __future__ import annotations

import re
from enum import Enum, auto

MAX_DEPTH = 64
"""The most objects and arrays around a value. More is no JSON that anybody can use."""
MAX_NUMBER = 256
"""The most characters of a number."""
WHITE_SPACE = " \t\n\r"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SPACE = re.compile(r"[ \t\n\r]+")
_WORDS = {"t": "true", "f": "false", "n": "null"}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_LETTERS = frozenset("0123456789+-.eE")
_HEX = frozenset("0123456789abcdefABCDEF")


class _Next(Enum):
    """What may come next."""

    VALUE = auto()
    FIRST_VALUE = auto()
    """A value, or the end of an array."""
    FIRST_KEY = auto()
    """A key, or the end of an object."""
    KEY = auto()
    COLON = auto()
    MORE = auto()
    """A comma, or the end of what is open."""
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    WORD = auto()
    NUMBER = auto()
    NOTHING = auto()


class JsonScanner:
    """Follows one JSON value."""

    def __init__(self, *, first: str = "") -> None:
        """`first` are the characters with which the value may begin; empty: any."""
        self._first = first
        self._next = _Next.VALUE
        self._open: list[str] = []
        """The closing characters of what is open, the innermost last."""
        self._is_key = False
        self._word = ""
        """What is left of a word or of an escape, or a number so far."""
        self.is_broken = False
        """True if what follows the taken characters is no JSON."""

    @property
    def is_done(self) -> bool:
        return self._next is _Next.NOTHING

    def feed(self, text: str, place: int = 0) -> int:
        """Takes characters from a place on. Returns the place behind the last that belongs to the value."""
        while place < len(text) and not self.is_done and not self.is_broken:
            place = self._take(text, place)
        return place

    def _take(self, text: str, place: int) -> int:
        """Takes one character, or a run of them."""
        match self._next:
            case _Next.STRING:
                return self._in_string(text, place)
            case _Next.ESCAPE | _Next.HEX | _Next.WORD | _Next.NUMBER:
                return place + self._in_word(text[place])
        if (space := _SPACE.match(text, place)) is not None:
            return space.end()
        return place + self._at(text[place])

    def _in_string(self, text: str, place: int) -> int:
        if (plain := _PLAIN.match(text, place)) is not None:
            return plain.end()
        match text[place]:
            case '"':
                self._next = _Next.COLON if self._is_key else self._behind()
            case "\\":
                self._next = _Next.ESCAPE
            case _:
                self.is_broken = True
                return place
        return place + 1

    def _in_word(self, letter: str) -> int:
        """Takes a character of an escape, a word or a number. Returns how many were taken: 1, or 0 at the end."""
        match self._next:
            case _Next.ESCAPE if letter in '"\\/bfnrt':
                self._next = _Next.STRING
            case _Next.ESCAPE if letter == "u":
                self._next, self._word = _Next.HEX, "uuuu"
            case _Next.HEX if letter in _HEX:
                self._word = self._word[1:]
                self._next = _Next.HEX if self._word else _Next.STRING
            case _Next.WORD if letter == self._word[0]:
                self._word = self._word[1:]
                self._next = _Next.WORD if self._word else self._behind()
            case _Next.NUMBER if letter in _NUMBER_LETTERS and len(self._word) < MAX_NUMBER:
                self._word += letter
            case _Next.NUMBER if _NUMBER.fullmatch(self._word):
                self._next = self._behind()
                return 0
            case _:
                self.is_broken = True
                return 0
        return 1

    def _at(self, letter: str) -> int:
        """Takes a character between values. Returns how many were taken: 1, or 0 if it is wrong there."""
        match self._next, letter:
            case ((_Next.VALUE | _Next.FIRST_VALUE), _) if self._begins(letter):
                pass
            case ((_Next.FIRST_KEY | _Next.KEY), '"'):
                self._next, self._is_key = _Next.STRING, True
            case _Next.COLON, ":":
                self._next = _Next.VALUE
            case _Next.MORE, ",":
                self._next = _Next.KEY if self._open[-1] == "}" else _Next.VALUE
            case ((_Next.MORE | _Next.FIRST_KEY | _Next.FIRST_VALUE), _) if letter == self._open[-1]:
                self._open.pop()
                self._next = self._behind()
            case _:
                self.is_broken = True
                return 0
        return 1

    def _begins(self, letter: str) -> bool:
        """Begins a value. Returns False if none begins so."""
        if self._first and not self._open and letter not in self._first:
            return False
        if letter in "{[" and len(self._open) < MAX_DEPTH:
            self._open.append("}" if letter == "{" else "]")
            self._next = _Next.FIRST_KEY if letter == "{" else _Next.FIRST_VALUE
        elif letter == '"':
            self._next, self._is_key = _Next.STRING, False
        elif letter in _WORDS:
            self._next, self._word = _Next.WORD, _WORDS[letter][1:]
        elif letter == "-" or (letter.isascii() and letter.isdigit()):
            self._next, self._word = _Next.NUMBER, letter
        else:
            return False
        return True

    def _behind(self) -> _Next:
        """What may follow a whole value."""
        return _Next.MORE if self._open else _Next.NOTHING
