"""Compiles constraints to grammars in threads of its own, and keeps those that were asked for lately.

    StructuredOutputs ─ checks ─ source text ─ llguidance, in a thread ─▶ CompiledGrammar, kept

llguidance lets other threads run while it compiles. What a compilation may cost is bounded by the size of its source
and by llguidance's own limits; a time-out ends the wait for it, and callers get turns. Does not know requests or
sequences.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from weakref import WeakValueDictionary

from llguidance import LLMatcher, LLParserLimits

from sightline.core.answer_format import AnswerRule, HeldAnswer
from sightline.core.errors import RequestError
from sightline.core.structured import OutputKind, StructuredOutputs
from sightline.structured.answers import answer_source
from sightline.structured.intersections import MAX_INTERSECTED
from sightline.structured.matcher import CompiledGrammar
from sightline.structured.schemas import any_source, named_fault, schema_source
from sightline.structured.turns import Compilation, CompileTurns
from sightline.structured.vocabulary import Vocabulary

logger = logging.getLogger("sightline")


@dataclass(frozen=True)
class CompileLimits:
    """What compiling and keeping grammars may cost."""

    seconds: float = 10.0
    """How long a request waits for its grammar."""
    num_kept: int = 64
    """Grammars that are kept when no request needs them."""
    max_lexer_states: int = 50_000
    """States of one grammar's lexer, of about 2 kB each, that may be made while it is followed."""
    max_grammar_size: int = 200_000
    """Symbols in the rules of one grammar."""

    def of_library(self) -> LLParserLimits:
        return LLParserLimits(
            max_lexer_states=self.max_lexer_states, max_grammar_size=self.max_grammar_size, verbose_errors=False
        )


@dataclass(frozen=True, eq=False)
class PendingGrammar:
    """A grammar that is being compiled, or was. Whoever holds it keeps it."""

    compilation: Compilation[CompiledGrammar]
    due_at: float
    """When waiting for it ends, in `time.monotonic`."""

    @property
    def grammar(self) -> Future[CompiledGrammar]:
        return self.compilation.result

    @property
    def is_settled(self) -> bool:
        """True if `result` would not wait."""
        return self.grammar.done() or time.monotonic() >= self.due_at

    def settle(self) -> None:
        """Waits until `result` would not."""
        wait([self.grammar], max(0.0, self.due_at - time.monotonic()))

    def result(self) -> CompiledGrammar:
        """Waits for it. Raises `RequestError` if it cannot be held, or takes too long."""
        try:
            return self.grammar.result(max(0.0, self.due_at - time.monotonic()))
        except (TimeoutError, CancelledError) as error:
            if self.compilation.started_at is None:
                raise RequestError(
                    "expected structured_outputs that are compiled in time, got some whose turn did not come: too many "
                    "others are being compiled; try again"
                ) from error
            raise RequestError(
                "expected structured_outputs that are compiled in time, got some that take longer; send simpler ones"
            ) from error


class GrammarCompiler:
    """The compiled grammars of an engine. Thread-safe."""

    def __init__(self, read: Callable[[], Vocabulary], limits: CompileLimits = CompileLimits()) -> None:  # noqa: B008
        """`read` makes the vocabulary; it is called once, for the first grammar or by `warm_up`."""
        self._read = read
        self._limits = limits
        self._turns = CompileTurns[CompiledGrammar](limits.seconds)
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._kept: OrderedDict[AnswerRule, Compilation[CompiledGrammar]] = OrderedDict()
        self._alive: WeakValueDictionary[AnswerRule, Compilation[CompiledGrammar]] = WeakValueDictionary()
        """Also those that only a caller of `prepare` still holds."""
        self.num_compiled = 0

    def warm_up(self) -> str | None:
        """Reads the vocabulary, so that the first request does not wait for it. Returns why every request will be
        refused; None if they can be held."""
        try:
            with _library_faults("a tokenizer"):
                self._read_once()
        except RequestError as error:
            return str(error)
        return None

    def prepare(self, constraint: AnswerRule, caller: str = "") -> PendingGrammar:
        """Begins to compile a constraint in the caller's turn, unless that was done."""
        with self._lock:
            found = self._alive.get(constraint)
            if found is None or found.is_dropped:
                found = self._alive[constraint] = Compilation(partial(self._compile, constraint))
            self._kept[constraint] = found
            self._kept.move_to_end(constraint)
            while len(self._kept) > self._limits.num_kept:
                self._kept.popitem(last=False)
        self._turns.submit(found, caller)
        return PendingGrammar(found, found.due_at.get(caller, 0.0))

    def prepared(self, constraint: AnswerRule, caller: str = "") -> PendingGrammar:
        """What `prepare` returned to the caller, if somebody holds it; otherwise as `prepare`. What was not compiled in
        time is not waited for again."""
        with self._lock:
            found = self._alive.get(constraint)
        if found is None or caller not in found.due_at:
            return self.prepare(constraint, caller)
        return PendingGrammar(found, found.due_at[caller])

    def close(self) -> None:
        """Ends the threads, after what they compile."""
        self._turns.close()

    def _read_once(self) -> Vocabulary:
        with self._reading:
            if self._vocabulary is None:
                self._vocabulary = self._read()
            return self._vocabulary

    def _compile(self, constraint: AnswerRule) -> CompiledGrammar:
        what = _named(constraint)
        with _library_faults(what):
            vocabulary = self._read_once()
            source = _source(constraint, vocabulary)
            state = LLMatcher(vocabulary.tokens, source, log_level=0, limits=self._limits.of_library())
        # A warning says that something of a schema was passed over.
        faults = [state.get_error()] if state.is_error() else state.get_grammar_warnings()
        if faults:
            told = named_fault(" ".join("; ".join(faults).split()))
            raise RequestError(f"expected {what} that can be held, got: {told[:400]}")
        self.num_compiled += 1
        return CompiledGrammar(state, vocabulary)


@contextmanager
def _library_faults(what: str) -> Iterator[None]:
    """Turns every fault of the library into a `RequestError`.

    The library reports errors without raising. Where it has a fault it may panic, which is no `Exception`; the thread
    is the compiler's own, so that nothing else can come from it.
    """
    try:
        yield
    except RequestError:
        raise
    except BaseException as error:
        logger.error("a grammar could not be compiled: %s", error, exc_info=error)
        raise RequestError(f"expected {what} that can be compiled, got a fault: {str(error)[:200]}") from error


def _named(constraint: AnswerRule) -> str:
    match constraint:
        case HeldAnswer():
            return "tools and a response format"
        case StructuredOutputs(kind=kind):
            return f"structured_outputs {kind}"


def _source(constraint: AnswerRule, vocabulary: Vocabulary) -> str:
    match constraint:
        case HeldAnswer():
            return answer_source(constraint, vocabulary, grammar_source)
        case StructuredOutputs():
            return grammar_source(constraint)


def grammar_source(constraint: StructuredOutputs) -> str:
    """A constraint as llguidance reads it. Raises `RequestError` for what would be passed over."""
    match constraint.kind:
        case OutputKind.JSON:
            return schema_source(constraint.source)
        case OutputKind.JSON_OBJECT:
            return any_source('{"type":"object"}')
        case OutputKind.REGEX:
            return LLMatcher.grammar_from_regex(constraint.source)
        case OutputKind.CHOICE:
            return LLMatcher.grammar_from_lark(f"start: {' | '.join(map(json.dumps, constraint.choice or ()))}")
        case OutputKind.GRAMMAR:
            _check_grammar(constraint.source)
            return LLMatcher.grammar_from_lark(constraint.source)


def _check_grammar(source: str) -> None:
    """Raises `RequestError` for parts of a grammar of which the cost or the strictness is not bounded."""
    if "%json" in source:
        raise RequestError("structured_outputs grammar with %json is not supported: its keywords are not checked")
    if source.count("&") + source.count("~") >= MAX_INTERSECTED:
        raise RequestError(
            f"expected structured_outputs grammar with fewer than {MAX_INTERSECTED} of the characters & and ~, which "
            "intersect and negate, got more"
        )
