"""The life of one continuation of a request, and what it has produced.

Owns what a token means once it is chosen: its text, its log probabilities, and whether it ends the continuation. Does
not know the queue, the pages or the forward; the engine moves it along.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from sightline.core.conversation import AnswerEvent, EventKind, collected, merged
from sightline.core.errors import GrammarError
from sightline.core.request import (
    CompletionOutput,
    EffectiveParams,
    FinishReason,
    Logprob,
    PositionLogprobs,
    Request,
    TextDelta,
)
from sightline.engine.constraint import SequenceConstraint, TokenMask
from sightline.runner.sampling.adjust import TokenAdjustment
from sightline.runner.sampling.logprobs import TokenLogprobs, are_finite, read_scores
from sightline.runner.sampling.noise import derived_seed
from sightline.runner.sampling.sampler import RowSampling
from sightline.scheduler.sequence import ScheduledRow, SequenceState
from sightline.scheduler.trees import ROOT
from sightline.structured.matcher import CompiledGrammar
from sightline.text.answers.reader import AnswerReader
from sightline.text.answers.reading import answer_reader
from sightline.text.detokenizer import IncrementalDetokenizer
from sightline.text.stop import StopMatcher
from sightline.text.tokenizers.tokenizer import Tokenizer


class TextPiece(NamedTuple):
    """New output of one continuation, without the texts of the tokens in log probabilities."""

    text: str
    token_ids: tuple[int, ...]
    scores: tuple[TokenLogprobs, ...]
    """Log probabilities of each token, if the request asked for them."""
    offsets: tuple[int, ...]
    """For each of `scores`, where the token's text begins in the text of all generated tokens."""
    events: tuple[AnswerEvent, ...] = ()
    """What the text says, instead of `text`, if the request says how it is read."""
    num_reasoning: int = 0
    """Its tokens that are reasoning."""


@dataclass(eq=False)
class LiveSequence:
    """One continuation in the engine, and what it has produced."""

    sequence: SequenceState
    asked: EffectiveParams
    """The request's parameters."""
    params: EffectiveParams
    """The same, with a seed of its own."""
    tokenizer: Tokenizer | None
    detokenizer: IncrementalDetokenizer | None
    stops: StopMatcher | None
    adjustment: TokenAdjustment | None
    constraint: SequenceConstraint | None = None
    """Its place in the grammar that the answer is held to, if there is one."""
    reader: AnswerReader | None = None
    """Tells reasoning and calls apart from `text`, if the request says how."""
    events: list[AnswerEvent] = field(default_factory=list)
    """What it says, if there is a reader."""
    num_reasoning: int = 0
    """Tokens that were reasoning."""
    text: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    ending: FinishReason | None = None
    """Why it ends, from the token on that ends it; `finish_reason` follows when its last text is out."""
    num_taken_in: int = 0
    """Generated tokens whose text and meaning are known."""
    num_read_pieces: int = 0
    """Pieces of text that a stream has taken."""
    num_read_tokens: int = 0
    """Generated tokens that a stream has taken."""
    num_read_events: int = 0
    num_read_reasoning: int = 0
    end_was_read: bool = False
    """A stream has taken the finish reason."""
    _logprobs: list[TokenLogprobs] = field(default_factory=list)
    _prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One for each prompt token, from the second on."""
    _offsets: list[int] = field(default_factory=list)
    """Where the text of each token that was taken in begins, in the text of all."""
    _num_characters: int = 0
    """Length of the text of all tokens that were taken in."""

    def __post_init__(self) -> None:
        if self.constraint is not None:
            self.sequence.admits = self._num_admitted

    def generated(self, start: int = 0) -> tuple[int, ...]:
        """The generated tokens from the `start`-th on."""
        return tuple(self.sequence.tokens[len(self.sequence.request.prompt_token_ids) + start :])

    @cached_property
    def greedy(self) -> RowSampling | None:
        """The one choice for all tokens of a greedy continuation without adjusted logits or a grammar; otherwise
        None."""
        is_greedy = self.params.temperature == 0.0 and self.adjustment is None and self.constraint is None
        return RowSampling(self.params, 0) if is_greedy else None

    def sampling_behind_drafts(self, row: ScheduledRow) -> list[RowSampling]:
        """How the token behind each guess of a row is chosen, if all guesses on the way there are right."""
        first, found = self._place(row) - len(row.drafts), list[RowSampling]()
        for parent, token in zip(row.draft_parents, row.drafts, strict=True):
            place, adjustment = first, self.adjustment
            if parent != ROOT:
                place, adjustment = found[parent].place, found[parent].adjustment
            found.append(RowSampling(self.params, place + 1, None if adjustment is None else adjustment.after(token)))
        if found and self.constraint is not None and self.error is None:
            try:
                masks = self.constraint.behind(row.drafts, row.draft_parents, [each.adjustment for each in found])
            except GrammarError as error:
                self.error, masks = str(error), [None] * len(found)
            for each, mask in zip(found, masks, strict=True):
                each.mask = mask
        return found

    def sampling(self, row: ScheduledRow, last_input: int) -> RowSampling:
        """How the token behind a row's known tokens is chosen; `last_input` is where the step's tokens hold the last of
        them."""
        place = self._place(row) - len(row.drafts)
        if self.adjustment is None:
            return RowSampling(self.params, place, mask=self._mask(place))
        if not self.adjustment.is_whole:
            self.adjustment = TokenAdjustment(self.params, self.sequence.request.prompt_token_ids)
        self.adjustment.count(self.generated(self.adjustment.num_counted))
        is_read = self.adjustment.num_counted == place
        return RowSampling(self.params, place, self.adjustment, None if is_read else last_input, self._mask(place))

    def _mask(self, place: int) -> TokenMask | None:
        """The tokens that the grammar admits behind the first `place` generated ones; None without a grammar.

        Without a token that it admits, the continuation fails, and its choice means nothing.
        """
        if self.constraint is None:
            return None
        try:
            self.constraint.follow(self.generated, place)
            return self.constraint.mask(self.adjustment)
        except GrammarError as error:
            self.error = str(error)
            return None

    def _num_admitted(self, guesses: Sequence[int]) -> int:
        """How many of some guesses, from the first on, the grammar admits behind the generated tokens."""
        if self.constraint is None:
            return len(guesses)
        try:
            self.constraint.follow(self.generated, self.sequence.num_generated)
            return self.constraint.num_admitted(guesses)
        except GrammarError:
            # The next mask says why.
            return 0

    def _is_complete(self) -> bool:
        """True if the grammar admits only the end. Raises `GrammarError` if that is before `min_tokens`."""
        if self.constraint is None:
            return False
        self.constraint.follow(self.generated, self.num_taken_in)
        if not self.constraint.is_complete:
            return False
        if self.num_taken_in < self.params.min_tokens:
            raise GrammarError(
                f"expected structured_outputs that go on for min_tokens, {self.params.min_tokens}, got some that are "
                f"complete after {self.num_taken_in} tokens; lower min_tokens"
            )
        return True

    def keep_logprobs(self, row: ScheduledRow, entries: Sequence[TokenLogprobs]) -> None:
        """Keeps the log probabilities of the tokens behind a row's known tokens. Idempotent."""
        self._logprobs[self._place(row) - len(row.drafts) :] = entries

    def _place(self, row: ScheduledRow) -> int:
        """Tokens that were generated before the one behind a row."""
        return row.context_len + row.num_tokens - len(self.sequence.request.prompt_token_ids)

    def prompt_followers(self, row: ScheduledRow) -> tuple[int, ...]:
        """The prompt tokens that follow the row's tokens."""
        return self.sequence.request.prompt_token_ids[row.context_len + 1 : row.seq_len + 1]

    def keep_prompt_logprobs(self, row: ScheduledRow, scores: Sequence[Sequence[float]]) -> None:
        """Keeps the scores of the tokens that follow the row's. Idempotent."""
        first = row.context_len
        if not all(map(are_finite, scores)):
            self.error = _not_finite(first)
            return
        num_best = self.params.prompt_logprobs or 0
        self._prompt_logprobs[first : first + len(scores)] = [read_scores(each, num_best) for each in scores]

    def fail_at(self, position: int) -> None:
        """The logits at `position` were no numbers."""
        self.error = _not_finite(position)

    def take_in(self) -> FinishReason | None:
        """Reads the generated tokens that were not read yet: their text, and whether one is an end.

        Tokens behind an end were guessed, and are dropped.
        """
        if self.ending is None:
            try:
                self.ending = self._read_tokens()
            except GrammarError as error:
                self.error, self.ending = str(error), FinishReason.ERROR
        if self.ending is not None:
            del self.sequence.tokens[len(self.sequence.request.prompt_token_ids) + self.num_taken_in :]
        return self.ending

    def _read_tokens(self) -> FinishReason | None:
        params, sequence = self.params, self.sequence
        num_prompt_tokens = len(sequence.request.prompt_token_ids)
        for token in sequence.tokens[num_prompt_tokens + self.num_taken_in :]:
            ends = token in params.eos_token_ids or token in params.stop_token_ids
            text, was_reasoning = "", self._is_reasoning
            if self.detokenizer is not None and (not ends or params.include_stop_str_in_output):
                text = self.detokenizer.push([token])
            # Counted once its text is there: where an interruption lost it, the token is read again.
            self._offsets[self.num_taken_in :] = [self._num_characters]
            self.num_taken_in += 1
            self._num_characters += len(text)
            if text:
                self._say(text)
            self.num_reasoning += was_reasoning or self._is_reasoning
            if self.stops is not None and self._stopped_by_text():
                return FinishReason.STOP
            if self.reader is not None and self.reader.is_over:
                return FinishReason.STOP
            if ends:
                self.stop_reason = None if token in params.eos_token_ids else token
                return FinishReason.STOP
            if self._is_complete():
                return FinishReason.STOP
        return FinishReason.LENGTH if len(sequence.tokens) >= num_prompt_tokens + params.max_tokens else None

    @property
    def _is_reasoning(self) -> bool:
        return self.reader is not None and self.reader.is_reasoning

    def finish(self, reason: FinishReason) -> None:
        """Gives out the text that was held back. It may hold a stop string, which then is the end."""
        if self.detokenizer is not None:
            self._say(self.detokenizer.flush())
        if reason in (FinishReason.LENGTH, FinishReason.STOP) and self._stopped_by_text():
            reason = FinishReason.STOP
        if self.stops is not None:
            self._pass_on(self.stops.flush())
        if self.reader is not None:
            self._tell(self.reader.finish())
            if reason is FinishReason.STOP and self.reader.has_calls:
                reason = FinishReason.TOOL_CALLS
        self.finish_reason = reason

    def break_off(self, error: str) -> None:
        """Ends it as it stands."""
        self.error, self.finish_reason = error, FinishReason.ERROR

    @property
    def has_delta(self) -> bool:
        """True if there is new output since the last `take_delta`."""
        return not self.end_was_read and (
            self.finish_reason is not None
            or len(self.text) > self.num_read_pieces
            or self.sequence.num_generated > self.num_read_tokens
        )

    def take_piece(self) -> TextPiece | None:
        """New output since the last call; None if there is none."""
        if not self.has_delta:
            return None
        pieces, tokens = self.text[self.num_read_pieces :], self.generated(self.num_read_tokens)
        start, end = self.num_read_tokens, self.num_read_tokens + len(tokens)
        events, num_reasoning = self.events[self.num_read_events :], self.num_reasoning - self.num_read_reasoning
        scores = () if self.params.logprobs is None else tuple(self._logprobs[start:end])
        self.num_read_pieces += len(pieces)
        self.num_read_tokens += len(tokens)
        self.num_read_events += len(events)
        self.num_read_reasoning = self.num_reasoning
        self.end_was_read = self.finish_reason is not None
        offsets = self._offsets_of(start, len(scores))
        return TextPiece("".join(pieces), tokens, scores, offsets, tuple(merged(events)), num_reasoning)

    def take_delta(self) -> TextDelta | None:
        """New output since the last call, with the texts of the tokens in log probabilities."""
        piece = self.take_piece()
        if piece is None:
            return None
        return TextDelta(
            self.sequence.request.request_id,
            piece.text,
            piece.token_ids,
            self.finish_reason,
            self.error,
            self.sequence.index,
            self.stop_reason,
            None if self.params.logprobs is None else self._named(piece.scores),
            piece.events,
        )

    def output(self) -> CompletionOutput:
        tokens = self.generated()
        reason = None if self.finish_reason is None else self.finish_reason.value
        logprobs = None if self.params.logprobs is None else self._named(self._logprobs[: len(tokens)])
        said = collected(self.events)
        return CompletionOutput(
            self.sequence.index,
            "".join(self.text),
            tokens,
            reason,
            self.stop_reason,
            logprobs,
            said.reasoning,
            said.calls,
        )

    def prompt_logprobs(self) -> tuple[PositionLogprobs | None, ...] | None:
        """One for each prompt token that was computed; None where nobody asked."""
        if self.params.prompt_logprobs is None:
            return None
        return (None, *self._named(self._prompt_logprobs))

    def prompt_scores(self) -> Sequence[TokenLogprobs] | None:
        """The same without texts, from the second prompt token on."""
        return None if self.params.prompt_logprobs is None else self._prompt_logprobs

    def _named(self, scores: Iterable[TokenLogprobs]) -> tuple[PositionLogprobs, ...]:
        return tuple(_position(entry, self.tokenizer) for entry in scores)

    def _offsets_of(self, start: int, count: int) -> tuple[int, ...]:
        """The offsets of `count` tokens; those that were not taken in begin at the end of the text."""
        known = self._offsets[start : start + count]
        return (*known, *[self._num_characters] * (count - len(known)))

    def _say(self, text: str) -> None:
        if self.stops is not None:
            text = self.stops.push(text, may_end=self.num_taken_in > self.params.min_tokens)
        self._pass_on(text)

    def _pass_on(self, text: str) -> None:
        """Gives text out, or has it read first."""
        if self.reader is None:
            self.text.append(text)
            return
        self._tell(self.reader.push(text))

    def _tell(self, events: Sequence[AnswerEvent]) -> None:
        self.events += events
        self.text += [event.text for event in events if event.kind is EventKind.CONTENT]

    def _stopped_by_text(self) -> bool:
        if self.stops is None or self.stops.matched is None:
            return False
        self.stop_reason = self.stops.matched
        return True


def start(
    request: Request, asked: EffectiveParams, tokenizer: Tokenizer | None, grammar: CompiledGrammar | None = None
) -> tuple[LiveSequence, ...]:
    """The continuations of a request, before their first step. `grammar` is what `asked` holds them to."""
    leader = _start_one(SequenceState(request), asked, tokenizer, grammar)
    others = (SequenceState(request, index, leader.sequence) for index in range(1, asked.n))
    return (leader, *(_start_one(sequence, asked, tokenizer, grammar) for sequence in others))


def _start_one(
    sequence: SequenceState, asked: EffectiveParams, tokenizer: Tokenizer | None, grammar: CompiledGrammar | None
) -> LiveSequence:
    request, params = sequence.request, replace(asked, seed=derived_seed(asked.seed, sequence.index))
    detokenizer = stops = None
    if tokenizer is not None and params.detokenize:
        kept = frozenset[int]() if params.reading is None else tokenizer.marker_ids(params.reading.format)
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens, kept=kept)
    if params.stop:
        stops = StopMatcher(params.stop, include_stop=params.include_stop_str_in_output)
    adjustment = TokenAdjustment(params, request.prompt_token_ids) if params.adjusts_logits else None
    if params.temperature > 0.0:
        sequence.drawing = params.drawing
    constraint = None if grammar is None else SequenceConstraint(grammar)
    reader = None if params.reading is None else answer_reader(params.reading)
    return LiveSequence(sequence, asked, params, tokenizer, detokenizer, stops, adjustment, constraint, reader)


def _position(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> PositionLogprobs:
    named: PositionLogprobs = {}
    for token, logprob, rank in zip(entry.tokens, entry.logprobs, entry.ranks, strict=True):
        text = None if tokenizer is None else tokenizer.token_text(token)
        named.setdefault(token, Logprob(logprob, rank, text))
    return named


def _not_finite(position: int) -> str:
    return (
        f"the model's logits at position {position} held a NaN or an infinity; check the weights and the compute dtype"
    )
