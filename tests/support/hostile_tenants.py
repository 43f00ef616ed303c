"""What a tenant with a valid key can do to the others within every limit: attacks as data, and how they are sent.

Every body is legal in size, nesting and types, and is made before the attack begins. Knows the server by HTTP only.
`tenants` measures what the others feel.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import cycle
from typing import Any

from sightline.bench.serving.http_stream import Address
from sightline.core.config import Task
from support.attacks import bearer
from support.serving import ServedProcess
from support.tenants import Reading, StallLimits

SCRIPTS: Mapping[str, str] = {
    "digits": "1",
    "letters": "abcdefghijklmnopqrstuvwxyz",
    "words": "the cat sat on a mat and ",
    "accents": "éàüñøçßåæœ",
    "greek": "αβγδεζηθικλμνξοπρστυφχψω",
    "cyrillic": "абвгдежзийклмнопрстуфхцчшщъыьэюя",
    "arabic": "العربيةمناليمينإلىاليسار",
    "chinese": "日本語中文字符漢字體繁简",
    "korean": "한국어문장가나다라마바사",
    "thai": "ภาษาไทยกขฃคฅฆงจฉช",
    "emoji": "🎉🔥👍🏽🇫🇷👩‍👩‍👧",
    "combining": "e\u0301a\u0300o\u0302",
    "spaces": " ",
    "newlines": "\n \t\r\n",
    "punctuation": "!?.,;:()[]{}<>/|@#$%^&*-_=+~`'",
    "controls": "\u0001\u0002\u007f\u200b\ufeff",
    "special": "<|im_start|><|im_end|>",
    "escapes": '"\\',
}
RECEIVE_BYTES = 4096
"""Receive buffer of a client that reads little, so that the server's own buffers fill soon."""
SIP_BYTES, SIP_SECONDS = 256, 2.0
READ_BYTES = 1 << 16
SHOWN = 160


def spelled(script: str, length: int) -> str:
    """So many characters of one script."""
    alphabet = SCRIPTS[script]
    return (alphabet * (length // len(alphabet) + 1))[:length]


def mixed(length: int, seed: int = 0) -> str:
    """So many characters of all scripts, in short runs."""
    source = random.Random(seed)
    runs: list[str] = []
    while length > 0:
        runs.append(spelled(source.choice(list(SCRIPTS)), min(length, source.randint(1, 12))))
        length -= len(runs[-1])
    return "".join(runs)


@dataclass(frozen=True)
class Target:
    """A server, and the limits that it tells."""

    address: Address
    task: Task
    vocab_size: int
    max_model_len: int
    max_body_bytes: int
    max_cost: int
    max_characters: int
    """The most characters of a text that is tokenised at all."""
    max_step_seconds: float | None
    max_front_end_bytes: int | None

    @staticmethod
    def of(server: ServedProcess, key: str, task: Task) -> Target:
        info = json.loads(server.get("/server_info", bearer(key))[1])
        context, most_bytes = info["config"]["max_model_len"], info["limits"]["max_body_bytes"]
        _, refusal, _ = server.post("/tokenize", {"prompt": "a" * (most_bytes - 1000)}, bearer(key))
        told = re.search(rb"at most ([\d,]+) characters", refusal)
        step = info["config"].get("max_step_ms")
        return Target(
            address=Address.parse(server.url),
            task=task,
            vocab_size=info["vocab_size"],
            max_model_len=context,
            max_body_bytes=most_bytes,
            max_cost=info["limits"]["max_cost"],
            max_characters=int(told[1].replace(b",", b"")) if told else most_bytes - 1000,
            max_step_seconds=None if step is None else step / 1e3,
            max_front_end_bytes=info["limits"].get("max_front_end_bytes"),
        )

    def limits(self, alone: Reading, limits: StallLimits = StallLimits()) -> StallLimits:  # noqa: B008 - frozen
        """What an attack on this server may cost; a step is the bystander's largest gap if no budget is told."""
        step = alone.gap.largest if self.max_step_seconds is None else self.max_step_seconds
        return replace(limits, step_seconds=step, front_end_bytes=self.max_front_end_bytes)


class Manner(Enum):
    """How a hostile client sends a body and reads the answer."""

    WHOLE = "reads the answer"
    UNREAD = "reads nothing"
    SIPS = "reads a few bytes at times"
    LEAVES = "leaves soon"
    BY_BYTES = "sends a byte per chunk"


@dataclass(frozen=True)
class Shot:
    """One request."""

    path: str
    body: bytes
    manner: Manner = Manner.WHOLE

    def wire(self, key: str) -> bytes:
        """All that goes over the connection."""
        head = f"POST {self.path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n"
        head += "Content-Type: application/json\r\n"
        if self.manner is Manner.BY_BYTES:
            chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in self.body)
            return f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunks + b"0\r\n\r\n"
        return f"{head}Content-Length: {len(self.body)}\r\n\r\n".encode() + self.body


def shot(path: str, manner: Manner = Manner.WHOLE, /, **fields: Any) -> Shot:
    return Shot(path, json.dumps(fields, ensure_ascii=False).encode(), manner)


@dataclass(frozen=True)
class Attack:
    """Requests that one tenant sends."""

    name: str
    make: Callable[[Target], Sequence[Shot]]
    at_once: int = 1
    seconds: float = 2.0
    """No request is begun later than that."""
    patience: float = 5.0
    """How much longer answers are awaited before the connections are closed."""
    is_first: bool = False
    """Whether it is among the few that run beside the other tests."""
    is_too_long: bool = False
    """Whether its texts are refused for their length, before anything is done with them."""


@dataclass
class Answers:
    """What came back."""

    statuses: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    """Beginnings of the bodies that are no success."""

    def __str__(self) -> str:
        counted = ", ".join(f"{count} × {status}" for status, count in sorted(self.statuses.items()))
        return counted + "".join(f"; {count} × {text}" for text, count in self.refusals.most_common(2))

    @property
    def faults(self) -> list[str]:
        """Answers that no legal body may get: errors of the server, or none at all."""
        bad = {"500", "nothing"}
        return [f"{count} × {status}: {self}" for status, count in self.statuses.items() if status in bad]

    def take(self, answer: bytes) -> None:
        head, _, body = answer.partition(b"\r\n\r\n")
        status = head[9:12].decode() or "nothing"
        self.statuses[status] += 1
        if status not in ("200", "nothing"):
            self.refusals[body[:SHOWN].decode(errors="replace")] += 1


async def carry_out(attack: Attack, target: Target, shots: Sequence[Shot], key: str) -> Answers:
    """Sends an attack's shots, made before, in the attack's way."""
    return await launch(target, shots, key, at_once=attack.at_once, seconds=attack.seconds, patience=attack.patience)


async def launch(
    target: Target, shots: Sequence[Shot], key: str, *, at_once: int, seconds: float, patience: float, seed: int = 0
) -> Answers:
    """Sends the shots in rotation on so many connections at once, until the time is over."""
    wires = cycle([(each, each.wire(key)) for each in shots])
    answers, source, loop = Answers(), random.Random(seed), asyncio.get_running_loop()
    deadline = loop.time() + seconds

    async def send() -> None:
        while True:
            each, wire = next(wires)
            try:
                await _send(target.address, each.manner, wire, answers, source)
            except OSError as error:
                answers.statuses[type(error).__name__] += 1
                await asyncio.sleep(0.05)
            if loop.time() > deadline:
                return

    senders = [asyncio.create_task(send()) for _ in range(at_once)]
    _, late = await asyncio.wait(senders, timeout=seconds + patience)
    for sender in late:
        sender.cancel()
        answers.statuses["cut by the client"] += 1
    await asyncio.gather(*senders, return_exceptions=True)
    for sender in senders:
        if not sender.cancelled() and (raised := sender.exception()) is not None:
            raise raised
    return answers


async def _send(address: Address, manner: Manner, wire: bytes, answers: Answers, source: random.Random) -> None:
    loop = asyncio.get_running_loop()
    with socket.socket() as connection:
        connection.setblocking(False)
        if manner in (Manner.UNREAD, Manner.SIPS):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        await loop.sock_connect(connection, (address.host, address.port))
        with suppress(ConnectionError):  # a refusal may come before the whole body is sent
            await loop.sock_sendall(connection, wire)
        if manner is Manner.LEAVES:
            await asyncio.sleep(source.uniform(0.0, 0.2))
            answers.statuses["left"] += 1
        elif manner is Manner.UNREAD:
            await asyncio.sleep(3600.0)
        else:
            answers.take(await _read(connection, manner))


async def _read(connection: socket.socket, manner: Manner) -> bytes:
    """The beginning of the answer, once it is over."""
    loop, kept = asyncio.get_running_loop(), b""
    while data := await loop.sock_recv(connection, SIP_BYTES if manner is Manner.SIPS else READ_BYTES):
        if len(kept) < READ_BYTES:
            kept += data
        if manner is Manner.SIPS:
            await asyncio.sleep(SIP_SECONDS)
    return kept


CHAT, COMPLETIONS, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
EMBEDDINGS, SCORE, RERANK = "/v1/embeddings", "/v1/score", "/v1/rerank"


def prompted(path: str, text: str) -> Shot:
    """A text as the prompt of a route that generates or tokenises."""
    if path == CHAT:
        return shot(path, messages=[{"role": "user", "content": text}], max_tokens=1)
    return shot(path, prompt=text) if path == TOKENIZE else shot(path, prompt=text, max_tokens=1)


def digits(path: str) -> Callable[[Target], list[Shot]]:
    # A chat template adds a few characters.
    return lambda target: [prompted(path, spelled("digits", target.max_characters - 1_000))]


def scripts(path: str) -> Callable[[Target], list[Shot]]:
    return lambda target: [prompted(path, mixed(min(400_000, target.max_characters - 64)))]


def integers(path: str, name: str) -> Callable[[Target], list[Shot]]:
    """An array that fills a body."""
    return lambda target: [Shot(path, b'{"%s":[%s1]}' % (name.encode(), b"1," * ((target.max_body_bytes - 40) // 2)))]


def filling(target: Target, letters: str = "a1 ") -> str:
    """A text that fills a body."""
    return letters * ((target.max_body_bytes - 200) // len(letters.encode()))


def nested(depth: int, width: int) -> object:
    """Containers in containers, `depth` deep, with a few values at each level."""
    value: object = "x"
    for _ in range(depth):
        value = {f"k{place}": place for place in range(width)} | {"next": [value]}
    return value


def unread(manner: Manner) -> Callable[[Target], list[Shot]]:
    endless: dict[str, Any] = {"max_tokens": 8000, "ignore_eos": True, "stream": True, "logprobs": 20}
    return lambda target: [shot(COMPLETIONS, manner, prompt=f"Story {number}", **endless) for number in range(60)]


def _logit_bias(target: Target) -> list[Shot]:
    biases = {str(token): 1 for token in range(target.vocab_size)}
    return [shot(COMPLETIONS, prompt="a", max_tokens=4, logit_bias=biases)]


def _scored_prompt(target: Target) -> list[Shot]:
    prompt = [number % target.vocab_size for number in range(target.max_model_len // 4)]
    return [shot(COMPLETIONS, prompt=prompt, max_tokens=1, prompt_logprobs=20)]


def _echoed(target: Target) -> list[Shot]:
    prompt = [7 * number % target.vocab_size for number in range(target.max_model_len // 4)]
    return [shot(COMPLETIONS, prompt=prompt, max_tokens=1, echo=True, logprobs=20)]


def _long_prompt(target: Target) -> list[Shot]:
    source = random.Random(1)
    prompt = [source.randrange(target.vocab_size) for _ in range(target.max_model_len - 2)]
    return [shot(COMPLETIONS, prompt=prompt, max_tokens=1)]


def _many_messages(target: Target) -> list[Shot]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"deep": nested(8, 2)}}}
    turns = [{"role": "assistant", "content": "x", "tool_calls": [call]} for _ in range(1_200)]
    return [shot(CHAT, messages=turns, max_tokens=1, chat_template_kwargs={"deep": nested(20, 40)})]


def _many_roles(target: Target) -> list[Shot]:
    turns = [{"role": "user", "content": [{"type": "text", "text": "a1é"}] * 2} for _ in range(4_096)]
    return [shot(CHAT, messages=turns, max_tokens=1)]


def _continuations(target: Target) -> list[Shot]:
    return [shot(COMPLETIONS, prompt="a", n=128, max_tokens=400, ignore_eos=True, stream=True, logprobs=2)]


def _stops(target: Target) -> list[Shot]:
    stops = ["a" * 1_000 + f"{place:03}" for place in range(64)]
    return [shot(COMPLETIONS, prompt="a", n=8, max_tokens=400, ignore_eos=True, stop=stops, stream=True)]


def _many_prompts(target: Target) -> list[Shot]:
    return [shot(COMPLETIONS, prompt=[f"prompt {number}" for number in range(500)], max_tokens=1)]


def _too_many_prompts(target: Target) -> list[Shot]:
    return [shot(COMPLETIONS, prompt=[f"prompt {number} é" for number in range(2_048)], max_tokens=1)]


def _detokenized(target: Target) -> list[Shot]:
    tokens = [number * 31 % target.vocab_size for number in range(target.max_model_len)]
    return [shot(DETOKENIZE, tokens=tokens), shot(TOKENIZE, prompt=mixed(60_000), return_token_strs=True)]


def _unused_fields(target: Target) -> list[Shot]:
    fields: dict[str, Any] = {f"f{place}": 1 for place in range(280_000)}
    return [shot(COMPLETIONS, prompt="a", max_tokens=1, **fields)]


def _containers(target: Target) -> list[Shot]:
    wide = {f"c{place}": [place] * 10 for place in range(30_000)}
    return [shot(COMPLETIONS, prompt="a", max_tokens=1, unused=wide)]


def _by_bytes(target: Target) -> list[Shot]:
    return [shot(COMPLETIONS, Manner.BY_BYTES, prompt="a" * 200_000, max_tokens=1)]


def _leaving(target: Target) -> list[Shot]:
    return [
        shot(COMPLETIONS, Manner.LEAVES, prompt=f"Story {number}", n=4, max_tokens=500, stream=True, logprobs=5)
        for number in range(50)
    ]


def _small(target: Target) -> list[Shot]:
    return [shot(COMPLETIONS, prompt="a", max_tokens=1)]


def _truncated(target: Target) -> list[Shot]:
    return [shot(EMBEDDINGS, input=filling(target), truncate_prompt_tokens=-1)]


def _truncated_elsewhere(target: Target) -> list[Shot]:
    text = filling(target, "é1 ")
    return [
        shot(SCORE, text_1="a", text_2=text, truncate_prompt_tokens=16),
        shot(RERANK, query="a", documents=[text], truncate_prompt_tokens=16),
    ]


def _texts(target: Target) -> list[Shot]:
    return [shot(EMBEDDINGS, input=[f"t{number}" for number in range(500)], encoding_format="float")]


def _long_texts(target: Target) -> list[Shot]:
    texts = [spelled("words", 2 * target.max_model_len) for _ in range(120)]
    return [shot(EMBEDDINGS, input=texts, encoding_format="float")]


def _too_many_texts(target: Target) -> list[Shot]:
    return [shot(EMBEDDINGS, input=[mixed(600, number) for number in range(2_000)], truncate_prompt_tokens=-1)]


def _documents(target: Target) -> list[Shot]:
    documents = [f"d{number}" for number in range(500)]
    return [shot(RERANK, query="a", documents=documents), shot(SCORE, text_1="a", text_2=documents)]


def _too_many_documents(target: Target) -> list[Shot]:
    return [shot(RERANK, query="a", documents=[mixed(600, number) for number in range(2_000)])]


GENERATING: Sequence[Attack] = (
    Attack("digits to completions", digits(COMPLETIONS), is_first=True),
    Attack("digits to chat, two at once", digits(CHAT), at_once=2),
    Attack("digits to /tokenize", digits(TOKENIZE)),
    Attack("mixed scripts to completions", scripts(COMPLETIONS), is_first=True),
    Attack("mixed scripts to chat and /tokenize", lambda target: [*scripts(CHAT)(target), *scripts(TOKENIZE)(target)]),
    Attack("logit_bias of the whole vocabulary", _logit_bias, is_first=True),
    Attack("four integer arrays of 4 MB", integers(COMPLETIONS, "prompt"), at_once=4),
    Attack("prompt_logprobs of a long prompt", _scored_prompt),
    Attack("echo with logprobs of a long prompt", _echoed),
    Attack("many messages with deep tool calls", _many_messages),
    Attack("many messages in parts", _many_roles),
    Attack("n = 128", _continuations, patience=0.5),
    Attack("64 stop strings", _stops, patience=0.5),
    Attack("500 prompts in one body", _many_prompts, patience=2.0),
    Attack("2,048 prompts in one body", _too_many_prompts, patience=2.0),
    Attack("/detokenize at the limit", _detokenized, at_once=2),
    Attack("280,000 unused fields", _unused_fields),
    Attack("30,000 arrays in an unused field", _containers),
    Attack("a body in chunks of one byte", _by_bytes),
    Attack("a storm of clients that leave", _leaving, at_once=100),
    Attack("1,000 small requests at once", _small, at_once=1_000, seconds=0.5, patience=10.0),
    Attack(
        "60 streams that read nothing", unread(Manner.UNREAD), at_once=60, seconds=10.0, patience=0.0, is_first=True
    ),
    Attack("60 streams that read a little", unread(Manner.SIPS), at_once=60, seconds=10.0, patience=0.0),
)
SLOW_ENGINE: Sequence[Attack] = (
    Attack("digits, two at once", digits(COMPLETIONS), at_once=2),
    Attack("a prompt as long as the context", _long_prompt, seconds=8.0, patience=0.0, is_first=True),
)
"""With the default model, whose steps take long enough to wait for."""
EMBEDDING: Sequence[Attack] = (
    Attack("truncate_prompt_tokens with 4 MB", _truncated, patience=15.0, is_first=True, is_too_long=True),
    Attack("truncated scores and rankings of 4 MB", _truncated_elsewhere, patience=15.0, is_too_long=True),
    Attack("mixed scripts to /tokenize", scripts(TOKENIZE)),
    Attack("four integer arrays of 4 MB", integers(EMBEDDINGS, "input"), at_once=4),
    Attack("500 texts as numbers", _texts, patience=3.0),
    Attack("120 long texts", _long_texts, patience=3.0),
    Attack("2,000 texts in one body", _too_many_texts, patience=3.0),
    Attack("500 documents", _documents, patience=3.0),
    Attack("2,000 documents in one body", _too_many_documents, patience=3.0),
)
