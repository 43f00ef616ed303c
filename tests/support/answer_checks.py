"""Checks of how answers are read and held, as functions: tests run them, and planted bugs must fail them."""

from __future__ import annotations

import json
from functools import cache, partial

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from sightline.core.answer_format import AnswerReading, HeldAnswer
from sightline.core.conversation import Conversation, ToolChoice, ToolMode, Turn, collected
from sightline.structured.compiler import GrammarCompiler
from sightline.structured.matcher import GrammarMatcher
from sightline.structured.vocabulary import Vocabulary, read_vocabulary
from sightline.text.answers.choosing import choose_format
from sightline.text.answers.opening import reading_of, render_conversation
from sightline.text.answers.reading import answer_reader
from sightline.text.templates.chat_template import ChatTemplate, Ending
from sightline.text.tokenizers.tokenizer import PromptTokens, Tokenizer
from support.answer_templates import ANSWERS, ARGUMENTS, CLOCK, TEMPLATES, TOOLS, WEATHER, format_named

END = "<|im_end|>"
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]")
HEADERS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>")
HERMES = format_named("hermes", "think")


@cache
def byte_tokenizer(has_markers: bool = True) -> Tokenizer:
    """A token for each byte, and for each marker unless the model spells them out."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    added = (END, *MARKERS, *HEADERS) if has_markers else (END,)
    backend.add_special_tokens([AddedToken(each, special=True) for each in added])
    template = ChatTemplate(TEMPLATES["hermes"], None, END)
    ends = frozenset(token for token in [backend.token_to_id(END)] if token is not None)
    return Tokenizer(backend, PromptTokens(None, ends), template, choose_format(template))


@cache
def byte_vocabulary(has_markers: bool = True) -> Vocabulary:
    tokenizer = byte_tokenizer(has_markers)
    return read_vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)


def matcher_of(held: HeldAnswer, has_markers: bool = True) -> GrammarMatcher:
    compiler = GrammarCompiler(partial(byte_vocabulary, has_markers))
    try:
        return compiler.prepare(held).result().matcher()
    finally:
        compiler.close()


def admits(held: HeldAnswer, text: str, has_markers: bool = True) -> bool:
    """True if a text is the beginning of an answer."""
    tokens = byte_tokenizer(has_markers).encode_text(text)
    return matcher_of(held, has_markers).num_admitted(tokens) == len(tokens)


def may_end(held: HeldAnswer, text: str, has_markers: bool = True) -> bool:
    """True if an answer may end behind a text, or must."""
    matcher = matcher_of(held, has_markers)
    matcher.consume(byte_tokenizer(has_markers).encode_text(text))
    return matcher.is_complete or matcher.num_admitted(sorted(byte_tokenizer().eos_ids)) == 1


def call_of(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def check_divisions() -> None:
    """Every way to divide a text in two is read as the whole is."""
    for name, text in ANSWERS.items():
        reading = AnswerReading(format_named(name), TOOLS)
        for cut in range(0, len(text), 3):
            reader = answer_reader(reading, lambda _: "id")
            said = collected([*reader.push(text[:cut]), *reader.push(text[cut:]), *reader.finish()])
            assert json.loads(said.calls[0].arguments) == json.loads(ARGUMENTS), (name, cut)
            assert said.content in ("Well.", None), (name, cut)


def check_arguments_as_written() -> None:
    reader = answer_reader(AnswerReading(HERMES, TOOLS))
    [call] = collected([*reader.push(call_of("get_weather", ARGUMENTS)), *reader.finish()]).calls
    assert call.arguments == ARGUMENTS
    messages = Conversation((Turn("user", "?"), Turn("assistant", None, calls=(call,))))
    # The prompt of the next turn says the same value, once.
    prompt = render_conversation(byte_tokenizer(), messages, Ending.CLOSED)
    said = prompt.partition('"arguments": ')[2].partition("}\n</tool_call>")[0]
    assert json.loads(said) == json.loads(ARGUMENTS)


def check_reasoning() -> None:
    """A call in the reasoning is no call."""
    text = f"<think>\n{call_of('get_time', '{}')}\n</think>\n\nDone."
    reader = answer_reader(AnswerReading(HERMES, TOOLS))
    said = collected([*reader.push(text), *reader.finish()])
    assert not said.calls
    assert (said.content, reader.has_calls) == ("Done.", False)


def check_named_choice() -> None:
    """The named tool is called, and no other."""
    conversation = Conversation((Turn("user", "?"),), TOOLS, ToolChoice(ToolMode.REQUIRED, ("get_time",)))
    tokenizer = byte_tokenizer()
    reading = reading_of(tokenizer, conversation, render_conversation(tokenizer, conversation, Ending.NEXT_TURN))
    assert reading is not None
    held = HeldAnswer(reading)
    assert admits(held, call_of("get_time", "{}"))
    assert not admits(held, '<tool_call>\n{"name": "get_weather"')
    assert not admits(held, "No")


def check_end() -> None:
    """An answer that must call may end behind the call only, and reasoning that the prompt opened must close."""
    required = AnswerReading(HERMES, (WEATHER, CLOCK), ToolMode.REQUIRED)
    whole = call_of("get_time", "{}")
    for text in ("", "<think>\nHm", "<think>\nHm\n</think>\n\n", whole[:20], whole[:-12]):
        assert not may_end(HeldAnswer(required), text), text
    assert may_end(HeldAnswer(required), whole)
    assert may_end(HeldAnswer(required), f"<think>\nHm\n</think>\n\n{whole}\n{whole}")
