"""Small tokenizers trained on the spot, and their two forms on disk: a Hugging Face folder and a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from gguf import GGUFWriter
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXTS: tuple[str, ...] = (
    "",
    " ",
    "Hello, world!",
    "  two leading spaces and   a run of three",
    "trailing spaces   ",
    "tabs\tand\n\nnew\r\nlines\n   \n  x",
    "The year 2024 has 12 months; 3.14159 is not 1,000,000.",
    "  7 after two spaces, \n 42 after a line",
    "def f(x: int) -> int:\n    return x ** 2  # squared\n",
    "naïve café, Ångström, Straße, Ελληνικά, Русский язык",
    "e\u0301 combining versus é composed",
    "日本語のテキスト、中文字符，한국어 문장",
    "العربية من اليمين إلى اليسار ועברית",
    "emoji 🎉🔥 👩‍👩‍👧‍👦 🇫🇷 👍🏽",
    "it's you're we'll I'd they've I'm can't IT'S",
    "zero\u200bwidth, nbsp\u00a0here, bom \ufeff, nul \x00 end",
    "<|user|>hi<|eos|> and <|unknown|> <|bos|>",
    "<s>hi</s> <pad>",
    "a" * 200,
    "\U0010ffff\ue000 private",
)

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|user|>{{ message['role'] }}: {{ message['content'] | trim }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|user|>assistant:{% endif %}"
)

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
SPACE = "▁"


def train_byte_level() -> Tokenizer:
    """A fresh copy of the byte-level tokenizer: training twice need not give the same ids."""
    return Tokenizer.from_str(_byte_level().to_str())


def train_sentence_piece(*, prefix_space: bool) -> Tokenizer:
    """A fresh copy of the SentencePiece tokenizer."""
    return Tokenizer.from_str(_sentence_piece(prefix_space).to_str())


@cache
def _byte_level() -> Tokenizer:
    """A byte-level BPE as GPT-2 has it. Ids 0 to 3 are special: bos, eos, user, pad."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|bos|>", "<|eos|>", "<|user|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    return backend


@cache
def _sentence_piece(prefix_space: bool) -> Tokenizer:
    """A SentencePiece-style BPE with byte fallback. Ids 0 to 3: unk, bos, eos, pad; then the 256 bytes."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spell_space = normalizers.Replace(" ", SPACE)
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.normalizer = spell_space
    if prefix_space:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spell_space])
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<unk>", "<s>", "</s>", "<pad>", *BYTE_TOKENS],
        limit_alphabet=90,
        max_token_length=8,
        show_progress=False,
    )
    # Training cuts nothing, so keep the texts short: a merge never crosses one of them.
    space = "" if prefix_space else " "
    backend.train_from_iterator([space + word for text in TEXTS for word in text.split(" ")] * 3, trainer)
    return _without_byte_specials(backend, steps)


def _without_byte_specials(backend: Tokenizer, steps: Sequence[decoders.Decoder]) -> Tokenizer:
    """The trainer marks the byte tokens as special so as to place them; a real vocabulary does not."""
    vocabulary = backend.get_vocab(with_added_tokens=False)
    plain = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=sentence_piece_merges(vocabulary),
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    plain.normalizer = backend.normalizer
    plain.decoder = decoders.Sequence(list(steps))
    plain.add_special_tokens(["<unk>", "<s>", "</s>", "<pad>"])
    return plain


def sentence_piece_merges(vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every split of every mergeable token, in the order of ids, which is the order of falling scores."""
    pieces = {token for token, token_id in vocabulary.items() if token_id >= 4 + 256}
    return [
        (token[:cut], token[cut:])
        for token in sorted(pieces, key=vocabulary.__getitem__)
        for cut in reversed(range(1, len(token)))
        if token[:cut] in pieces and token[cut:] in pieces
    ]


def save_folder(
    backend: Tokenizer, folder: Path, *, bos: str | None, eos: str | None, **options: object
) -> PreTrainedTokenizerFast:
    """Saves as transformers does, and returns the oracle."""
    oracle = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos, **options)
    oracle.save_pretrained(folder)
    return oracle


def byte_level_metadata(backend: Tokenizer, path: Path, *, pre: str, **extra: object) -> None:
    """Writes a GGUF file without tensors around a byte-level vocabulary."""
    writer = GGUFWriter(path, "llama")
    tokens = _tokens(backend)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token_id < 4 else 1 for token_id in range(len(tokens))])
    writer.add_token_merges(merges_of(backend))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    _add_extra(writer, extra)
    _close(writer)


def sentence_piece_metadata(
    backend: Tokenizer, path: Path, *, architecture: str = "llama", extra: Mapping[str, object]
) -> None:
    """Writes a GGUF file without tensors around a SentencePiece vocabulary."""
    writer = GGUFWriter(path, architecture)
    tokens = _tokens(backend)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0 if token_id < 260 else 260.0 - token_id for token_id in range(len(tokens))])
    writer.add_token_types([2, 3, 3, 3, *[6] * 256, *[1] * (len(tokens) - 260)])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    _add_extra(writer, extra)
    _close(writer)


def merges_of(backend: Tokenizer) -> list[str]:
    merges = json.loads(backend.to_str())["model"]["merges"]
    return [" ".join(merge) for merge in merges]


def _tokens(backend: Tokenizer) -> list[str]:
    vocabulary = backend.get_vocab()
    return sorted(vocabulary, key=vocabulary.__getitem__)


def _add_extra(writer: GGUFWriter, extra: Mapping[str, object]) -> None:
    for name, value in extra.items():
        key = "tokenizer.chat_template" if name == "chat_template" else f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, str(value))


def _close(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
