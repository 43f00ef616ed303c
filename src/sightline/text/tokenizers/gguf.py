"""Builds a tokenizer from the metadata of a GGUF file.

Owns the meaning of the `tokenizer.*` keys. Does not know how the file is parsed.

Two kinds of vocabulary exist. "gpt2" is byte-level BPE: tokens are spelled in the 256-letter byte alphabet, merges are
listed, and `tokenizer.ggml.pre` names the rule that splits text into words. "llama" is SentencePiece BPE: a space is
spelled "▁", no merges are listed, and any two neighbours whose union is a token may merge, best score first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from sightline.core.errors import CheckpointError
from sightline.text.templates.chat_template import ChatTemplate
from sightline.text.tokenizers.gguf_metadata import GgufMetadata
from sightline.text.tokenizers.library import library_faults
from sightline.text.tokenizers.tokenizer import PromptTokens, Tokenizer

SPACE = "▁"
MAX_TOKEN_CHARACTERS = 1 << 10
"""A limit on the length of a token, several times that of any known vocabulary: the work grows with its square."""


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class PreTokenizerRule:
    """How one `tokenizer.ggml.pre` splits text into words before merging."""

    pattern: str | None
    """None: the pattern of GPT-2, which the library has built in."""
    single_digits: bool = False
    """Whether each digit is split off first."""
    whole_words: bool = False
    """Whether a word that is a token is taken whole, even if no merges lead to it."""
    compose: bool = False
    """Whether text is normalised to NFC first."""
    adds_bos: bool = False
    """Whether BOS is added if the file does not say."""


_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2_PATTERN = _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")

_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased_pattern(word_end: str, digits: str) -> str:
    """A pattern that splits words where lower case turns to upper case, and keeps a slash after punctuation with it."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{start}[{_UPPER}]*[{_LOWER}]+{word_end}|{start}[{_UPPER}]+[{_LOWER}]*{word_end}|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_GPT4O_PATTERN = _cased_pattern("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}")
_TEKKEN_PATTERN = _cased_pattern("", r"\p{N}")

_GPT2_RULE = PreTokenizerRule(None)
_LLAMA3_RULE = PreTokenizerRule(_LLAMA3_PATTERN, whole_words=True, adds_bos=True)
_QWEN2_RULE = PreTokenizerRule(_QWEN2_PATTERN, compose=True)

_PRE_TOKENIZERS: Mapping[str, PreTokenizerRule] = MappingProxyType(
    {
        "default": _GPT2_RULE,
        "gpt-2": _GPT2_RULE,
        "smollm": PreTokenizerRule(None, single_digits=True),
        "llama-bpe": _LLAMA3_RULE,
        "llama3": _LLAMA3_RULE,
        "llama-v3": _LLAMA3_RULE,
        "qwen2": _QWEN2_RULE,
        "deepseek-r1-qwen": _QWEN2_RULE,
        "gpt-4o": PreTokenizerRule(_GPT4O_PATTERN, whole_words=True),
        "tekken": PreTokenizerRule(_TEKKEN_PATTERN, whole_words=True, adds_bos=True),
    }
)


@dataclass(frozen=True)
class _Vocabulary:
    tokens: list[str]
    ids: dict[str, int]
    types: Sequence[int]

    def of_type(self, token_type: TokenType) -> list[str]:
        return [token for token, found in zip(self.tokens, self.types, strict=True) if found == token_type]


def tokenizer_from_gguf(metadata: Mapping[str, object]) -> Tokenizer:
    """The tokenizer that a GGUF file describes. Raises `CheckpointError` if metadata is missing or malformed."""
    with library_faults("GGUF metadata 'tokenizer.ggml'"):
        return _read_metadata(GgufMetadata(metadata))


def _read_metadata(values: GgufMetadata) -> Tokenizer:
    kind = values.required_text("tokenizer.ggml.model")
    vocabulary = _read_vocabulary(values)
    if kind == "gpt2":
        rule = _pre_tokenizer_rule(values)
        backend, adds_bos = _byte_level(values, vocabulary, rule), rule.adds_bos
    elif kind == "llama":
        backend, adds_bos = _sentence_piece(values, vocabulary), True
    else:
        raise CheckpointError(
            f"GGUF metadata 'tokenizer.ggml.model': expected 'gpt2' or 'llama', got {kind!r}. "
            "Use the model's folder of safetensors."
        )
    _add_tokens(backend, vocabulary)
    return Tokenizer(backend, _prompt_tokens(values, adds_bos), _chat_template(values, vocabulary))


_TURN_ENDS = frozenset({"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|return|>", "<|call|>"})
"""Control tokens that end a model's turn.

Converters state one end token, which for a chat model is often the end of a text instead of the end of a turn.
"""


def end_token_ids(metadata: GgufMetadata) -> frozenset[int]:
    """The tokens that end a text, a turn or a message: those that the file states, and those known by name."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    stated = {_token_id(metadata, key) for key in keys} - {None}
    tokens = metadata.required_text_array("tokenizer.ggml.tokens")
    types = metadata.integer_array("tokenizer.ggml.token_type") or ()
    named = (token_id for token_id, token in enumerate(tokens) if token in _TURN_ENDS)
    known = {token_id for token_id in named if token_id < len(types) and types[token_id] == TokenType.CONTROL}
    return frozenset(token_id for token_id in stated | known if token_id is not None)


def _read_vocabulary(metadata: GgufMetadata) -> _Vocabulary:
    tokens = metadata.required_text_array("tokenizer.ggml.tokens")
    longest = max(map(len, tokens), default=0)
    if longest > MAX_TOKEN_CHARACTERS:
        raise CheckpointError(
            f"GGUF metadata 'tokenizer.ggml.tokens': expected tokens of at most {MAX_TOKEN_CHARACTERS} characters, "
            f"got one of {longest}. Convert the model again."
        )
    ids = {token: index for index, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        raise CheckpointError(
            f"GGUF metadata 'tokenizer.ggml.tokens': expected each token once, got {len(tokens) - len(ids)} "
            "repeated. Convert the model again."
        )
    types = metadata.integer_array("tokenizer.ggml.token_type")
    if types is None:
        types = [int(TokenType.NORMAL)] * len(tokens)
    _check_length("tokenizer.ggml.token_type", types, tokens)
    return _Vocabulary(tokens, ids, types)


def _check_length(key: str, values: Sequence[object], tokens: Sequence[str]) -> None:
    if len(values) != len(tokens):
        raise CheckpointError(
            f"GGUF metadata {key!r}: expected one value for each of {len(tokens)} tokens, got {len(values)}. "
            "Convert the model again."
        )


def _token_id(metadata: GgufMetadata, key: str) -> int | None:
    token_id = metadata.integer(key)
    tokens = metadata.required_text_array("tokenizer.ggml.tokens")
    if token_id is not None and not 0 <= token_id < len(tokens):
        raise CheckpointError(f"GGUF metadata {key!r}: expected a token id below {len(tokens)}, got {token_id}.")
    return token_id


def _prompt_tokens(metadata: GgufMetadata, adds_bos: bool) -> PromptTokens:
    bos_id = _token_id(metadata, "tokenizer.ggml.bos_token_id")
    eos_id = _token_id(metadata, "tokenizer.ggml.eos_token_id")
    stated = metadata.flag("tokenizer.ggml.add_bos_token")
    if stated and bos_id is None:
        raise CheckpointError(
            "GGUF metadata: expected 'tokenizer.ggml.bos_token_id' because 'tokenizer.ggml.add_bos_token' is "
            "true, got no such key. Convert the model again."
        )
    wants_bos = adds_bos if stated is None else stated
    wants_eos = metadata.flag("tokenizer.ggml.add_eos_token") or False
    return PromptTokens(
        bos_id=bos_id,
        eos_ids=end_token_ids(metadata),
        prefix=(bos_id,) if wants_bos and bos_id is not None else (),
        suffix=(eos_id,) if wants_eos and eos_id is not None else (),
    )


def _chat_template(metadata: GgufMetadata, vocabulary: _Vocabulary) -> ChatTemplate | None:
    source = metadata.text("tokenizer.chat_template")
    if source is None:
        return None
    bos_id = _token_id(metadata, "tokenizer.ggml.bos_token_id")
    eos_id = _token_id(metadata, "tokenizer.ggml.eos_token_id")
    return ChatTemplate(
        source,
        bos_token=None if bos_id is None else vocabulary.tokens[bos_id],
        eos_token=None if eos_id is None else vocabulary.tokens[eos_id],
    )


def _add_tokens(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    """Marks the tokens that are matched whole in a text: control and user-defined ones."""
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in vocabulary.of_type(TokenType.CONTROL)]
    )
    backend.add_tokens(
        [AddedToken(token, normalized=False, special=False) for token in vocabulary.of_type(TokenType.USER_DEFINED)]
    )


def _pre_tokenizer_rule(metadata: GgufMetadata) -> PreTokenizerRule:
    name = metadata.text("tokenizer.ggml.pre") or "default"
    rule = _PRE_TOKENIZERS.get(name)
    if rule is None:
        raise CheckpointError(
            f"GGUF metadata 'tokenizer.ggml.pre': expected one of {', '.join(_PRE_TOKENIZERS)}, got "
            f"{name!r}: words would be cut in the wrong places. Use the model's folder of safetensors."
        )
    return rule


def _byte_level(metadata: GgufMetadata, vocabulary: _Vocabulary, rule: PreTokenizerRule) -> tokenizers.Tokenizer:
    merges = [tuple(merge.split(" ")) for merge in metadata.required_text_array("tokenizer.ggml.merges")]
    backend = tokenizers.Tokenizer(_bpe(vocabulary, merges, ignore_merges=rule.whole_words))
    if rule.compose:
        backend.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if rule.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if rule.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(rule.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(metadata: GgufMetadata, vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    scores = metadata.number_array("tokenizer.ggml.scores")
    if scores is None:
        raise CheckpointError(
            "GGUF metadata: expected an array of numbers under 'tokenizer.ggml.scores' for a 'llama' "
            "vocabulary, got no such key. Convert the model again."
        )
    _check_length("tokenizer.ggml.scores", scores, vocabulary.tokens)
    unknown_id = _token_id(metadata, "tokenizer.ggml.unknown_token_id")
    unknown = None if unknown_id is None else vocabulary.tokens[unknown_id]
    if unknown is None and not all(f"<0x{byte:02X}>" in vocabulary.ids for byte in range(256)):
        raise CheckpointError(
            "GGUF metadata: expected 'tokenizer.ggml.unknown_token_id' or a token for each byte, got "
            "neither: text outside of the vocabulary would vanish. Convert the model again."
        )
    merges = _merges_by_score(vocabulary, scores)
    backend = tokenizers.Tokenizer(_bpe(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spell_space = normalizers.Replace(" ", SPACE)
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.flag("tokenizer.ggml.add_space_prefix") is False:
        backend.normalizer = spell_space
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spell_space])
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_by_score(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[tuple[str, ...]]:
    """Every way to build a token from two others: best score first, then the longer left part first.

    Only normal tokens come from merging. Control and user-defined ones are matched whole, bytes are a fallback.
    """
    normal = {
        token: score
        for token, score, token_type in zip(vocabulary.tokens, scores, vocabulary.types, strict=True)
        if token_type == TokenType.NORMAL
    }
    return [
        (token[:cut], token[cut:])
        for token in sorted(normal, key=lambda token: -normal[token])
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in normal and token[cut:] in normal
    ]


def _bpe(vocabulary: _Vocabulary, merges: list[tuple[str, ...]], **options: object) -> models.BPE:
    try:
        return models.BPE(vocab=vocabulary.ids, merges=merges, **options)  # type: ignore[arg-type]
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(
            f"GGUF metadata 'tokenizer.ggml.merges': expected pairs of tokens, got a fault: {error}. "
            "Convert the model again."
        ) from error
