"""A chat in the terminal: commands, several lines, what Ctrl-C does, and who may answer."""

from __future__ import annotations

import builtins
import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from sightline.cli import app
from sightline.cli.answers import Answer, Piece
from sightline.cli.chat.conversation import HELP, ChatSession
from sightline.cli.chat.lines import typed_messages
from sightline.cli.chat.partners import LocalModel, Messages, RemoteServer
from sightline.cli.console import notes
from sightline.cli.serve import _announce
from sightline.core.errors import RequestError, SightlineError
from sightline.core.request import SamplingParams
from support.local_front_end import opened
from support.serving import ServedProcess, fake_serving

SECONDS = 60.0


def counted(num_tokens: int) -> str:
    """What the fake engine says."""
    return "".join(f"{number} " for number in range(num_tokens))


class Parrot:
    """Repeats what it hears, and keeps what it was asked."""

    def __init__(self) -> None:
        self.name = "parrot"
        self.asked: list[Messages] = []
        self.fault: BaseException | None = None
        """Raised after the first piece."""
        self.finish_reason = "stop"
        self.num_closed = 0

    def names(self) -> Sequence[str]:
        return ["parrot", "raven"]

    def switch(self, name: str) -> None:
        if name not in self.names():
            raise RequestError(f"no such bird: {name}")
        self.name = name

    def ask(self, messages: Messages) -> Answer:
        self.asked.append(messages)
        return Answer("greedy", self._pieces(str(messages[-1]["content"])))

    def _pieces(self, said: str) -> Generator[Piece]:
        try:
            yield Piece("you said ", 2, None)
            if self.fault is not None:
                raise self.fault
            yield Piece(said, 1, self.finish_reason)
        finally:
            self.num_closed += 1


@pytest.fixture
def parrot() -> Parrot:
    return Parrot()


def talk(parrot: Parrot, *said: str, system: str | None = None, quiet: bool = False) -> ChatSession:
    conversation = ChatSession(parrot, system, quiet=quiet)
    conversation.talk(said)
    return conversation


def test_a_conversation_is_remembered_and_cleared(parrot: Parrot, capsys: pytest.CaptureFixture[str]) -> None:
    talk(parrot, "one", "two", "/clear", "three", system="be kind")
    first, second, third = parrot.asked
    system = {"role": "system", "content": "be kind"}
    assert first == [system, {"role": "user", "content": "one"}]
    assert second == [
        *first,
        {"role": "assistant", "content": "you said one"},
        {"role": "user", "content": "two"},
    ]
    assert third == [system, {"role": "user", "content": "three"}]
    out, err = capsys.readouterr()
    assert out == "you said one\nyou said two\nyou said three\n"
    assert err.count("greedy") == 2, "told at the beginning of each conversation"


def test_the_system_text_is_shown_set_and_removed(parrot: Parrot, capsys: pytest.CaptureFixture[str]) -> None:
    talk(parrot, "/system", "/system speak like a pirate", "/system", "ahoy", "/system -", "bye", quiet=True)
    assert [messages[0]["role"] for messages in parrot.asked] == ["system", "user"]
    assert capsys.readouterr().out.splitlines()[:2] == ["no system text; /system TEXT sets one", "speak like a pirate"]


def test_another_model_is_listed_and_chosen(parrot: Parrot, capsys: pytest.CaptureFixture[str]) -> None:
    talk(parrot, "/model", "/model raven", "/model owl", "hello", quiet=True)
    out, err = capsys.readouterr()
    assert out.splitlines() == ["parrot", "  parrot", "  raven", "raven", "you said hello"]
    assert "no such bird: owl" in err
    assert parrot.name == "raven"


def test_a_conversation_is_saved_to_a_new_file(
    parrot: Parrot, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kept.json"
    talk(parrot, "grüß dich", f"/save {file}", f"/save {file}", f"/save {tmp_path}/no/file", "/save", system="s")
    kept = json.loads(file.read_text(encoding="utf-8"))
    assert kept["model"] == "parrot"
    assert [message["role"] for message in kept["messages"]] == ["system", "user", "assistant"]
    assert kept["messages"][1]["content"] == "grüß dich"
    out, err = capsys.readouterr()
    assert f"saved 3 messages to {file}" in out
    assert "File exists" in err
    assert "No such file or directory" in err
    assert "expected /save FILE, got no file" in err


def test_a_conversation_with_bytes_that_are_no_text_is_saved(parrot: Parrot, tmp_path: Path) -> None:
    talk(parrot, f"/save {tmp_path / 'saved'}", system="a\udcff")
    assert json.loads((tmp_path / "saved").read_text())["messages"] == [{"role": "system", "content": "a\udcff"}]


def test_help_an_unknown_command_and_a_slash_that_is_none(parrot: Parrot, capsys: pytest.CaptureFixture[str]) -> None:
    talk(parrot, "/help", "/clera", " /etc/passwd?", "/exit", "never", quiet=True)
    out, err = capsys.readouterr()
    assert HELP in out
    assert "expected a command, got /clera; /help lists them" in err
    assert [messages[-1]["content"] for messages in parrot.asked] == [" /etc/passwd?"]


def test_a_cut_answer_says_so(parrot: Parrot, capsys: pytest.CaptureFixture[str]) -> None:
    parrot.finish_reason = "length"
    talk(parrot, "tell me everything")
    assert "cut after 3 tokens: max_tokens, or the end of the context, was reached" in capsys.readouterr().err


def test_ctrl_c_stops_an_answer_keeps_what_came_and_goes_on(parrot: Parrot, capsys: pytest.CaptureFixture[str]) -> None:
    parrot.fault = KeyboardInterrupt()
    conversation = talk(parrot, "one")
    assert parrot.num_closed == 1
    assert "stopped: the answer is not whole" in capsys.readouterr().err
    parrot.fault = None
    conversation.talk(["two"])
    assert [message["content"] for message in parrot.asked[1]] == ["one", "you said ", "two"]


def test_an_error_ends_an_answer_and_not_the_conversation(parrot: Parrot, capsys: pytest.CaptureFixture[str]) -> None:
    parrot.fault = SightlineError("the bird flew away")
    conversation = talk(parrot, "one")
    assert "error: the bird flew away" in capsys.readouterr().err
    parrot.fault = None
    conversation.talk(["two"])
    assert [message["content"] for message in parrot.asked[1]] == ["two"]


def test_an_answer_cannot_control_a_terminal(
    parrot: Parrot, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "a\x1b]52;c;aGk=\x07\x9b2J\r\tb\nc"
    talk(parrot, said)
    assert capsys.readouterr().out == f"you said {said}\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    parrot.fault = SightlineError("\x1b[2J")
    talk(parrot, said)
    parrot.fault = None
    talk(parrot, said)
    told = capsys.readouterr()
    assert told.out.endswith("you said a␛]52;c;aGk=␇�2J␍\tb\nc\n")
    assert "error: ␛[2J" in told.err


def test_a_chat_without_a_model_says_so_and_takes_another(capsys: pytest.CaptureFixture[str]) -> None:
    """The new model could not be loaded, and then the old one neither."""
    loaded: list[str | None] = []

    def load(name: str | None) -> Any:
        loaded.append(name)
        if 1 < len(loaded) < 4:
            raise SightlineError(f"{name} is gone")
        return SimpleNamespace(close=lambda: None)

    conversation = ChatSession(LocalModel("old", load, SamplingParams()), None, quiet=True)
    conversation.talk(["/model new", "hi", "/model other"])
    told = capsys.readouterr()
    assert told.err.splitlines()[:1] == ["error: old is gone"]
    assert "expected a model, got none" in told.err
    assert told.out == "other\n"
    assert loaded == ["old", "new", "old", "other"]


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> list[str]:
    """The messages of some lines; an exception is raised in place of a line."""
    left = iter(lines)

    def read(prompt: str = "") -> str:
        line = next(left, EOFError)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(builtins, "input", read)
    return list(typed_messages())


@pytest.mark.parametrize(
    ("lines", "messages"),
    [
        (["one", "", "  ", "two"], ["one", "two"]),
        (["one\\", "and more\\", "", "two"], ["one\nand more\n", "two"]),
        (['"""', "def f():", "", "    return 1", '"""', "two"], ["def f():\n\n    return 1", "two"]),
        (['"""one', 'two"""'], ["one\ntwo"]),
        (['"""one"""'], ["one"]),
        (['"""', "never ended"], []),
    ],
)
def test_messages_of_several_lines(monkeypatch: pytest.MonkeyPatch, lines: list[str], messages: list[str]) -> None:
    assert typed(monkeypatch, *lines) == messages


def test_ctrl_c_at_the_prompt_drops_the_line_on_a_terminal_and_ends_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str | type[BaseException]] = ["one\\", KeyboardInterrupt, "two"]
    assert typed(monkeypatch, *lines) == []
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert typed(monkeypatch, *lines) == ["two"]


@pytest.fixture(scope="module")
def server() -> Iterator[ServedProcess]:
    with fake_serving("delay=0.02") as served:
        yield served


def chat(server: ServedProcess, *words: str, stdin: str = "") -> Result:
    return CliRunner().invoke(app, ["chat", "--url", server.url, *words], input=stdin)


def test_a_server_answers(server: ServedProcess) -> None:
    result = chat(server, "How far can you count?", "--max-tokens", "5")
    assert result.exit_code == 0
    assert result.stdout == counted(5) + "\n"
    assert "cut after 5 tokens" in result.stderr
    assert "tokens/s" in result.stderr


def test_a_server_is_talked_to_line_by_line(server: ServedProcess) -> None:
    result = chat(server, "-q", "--max-tokens", "2", stdin="one\n/model\n/model other\ntwo\n")
    assert result.exit_code == 0
    assert result.stdout == f"{counted(2)}\nfake at {server.url}\n  fake\n{counted(2)}\n"
    assert "which are fake, got 'other'" in result.stderr


def test_a_server_that_refuses_or_is_not_there_is_told(server: ServedProcess) -> None:
    result = chat(server, "hi", "--model", "other")
    assert isinstance(result.exception, RequestError)
    assert "other" in str(result.exception)
    with pytest.raises(SightlineError, match=r"expected an answer from http://127.0.0.1:1/v1/models, got Connection"):
        RemoteServer("http://127.0.0.1:1", None, None, {})


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (['{"choices": [{"delta": {"content": "a"}}]}'], "ended the answer before it was whole"),
        (["[]"], "AttributeError"),
        (['"a"'], "AttributeError"),
        (["{"], "JSONDecodeError"),
        (['{"choices": [{"delta": {"content": [1]}}]}'], "AttributeError"),
        (['{"error": "no more"}'], "no more"),
        (['{"error": {"message": "no more"}}'], "no more"),
    ],
)
def test_a_server_that_answers_badly_is_told(
    events: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    remote = RemoteServer("http://127.0.0.1:1", None, "m", {})
    monkeypatch.setattr(HTTPConnection, "request", lambda *_: None)
    lines = [f"data: {event}\n".encode() for event in events]
    monkeypatch.setattr(HTTPConnection, "getresponse", lambda _: _Response(lines))
    ChatSession(remote, None, quiet=True).talk(["hi"])
    assert message in capsys.readouterr().err


class _Response(list[bytes]):
    status = 200


def test_halves_of_characters_of_a_server_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    event = b'data: {"choices": [{"delta": {"content": "a\\ud800"}, "finish_reason": "stop"}]}\n'
    monkeypatch.setattr(HTTPConnection, "request", lambda *_: None)
    monkeypatch.setattr(HTTPConnection, "getresponse", lambda _: _Response([event]))
    ChatSession(RemoteServer("http://127.0.0.1:1", None, "m", {}), None, quiet=True).talk(["hi"])
    assert capsys.readouterr().out == "a?\n"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_is_typed_in_another_encoding_is_told(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: is_terminal)
    lines = iter(["one", "\udcff", "two"])
    monkeypatch.setattr(builtins, "input", lambda _: next(lines))
    messages = typed_messages()
    assert next(messages) == "one"
    if is_terminal:
        assert next(messages) == "two"
    else:
        with pytest.raises(RequestError, match="expected text in UTF-8"):
            next(messages)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--url", "http://x", "--dtype", "float32"], "expected no settings of an engine with --url, got --dtype"),
        (["--url", "http://x", "--prove"], "expected no settings of an engine with --url, got --prove"),
        (["--api-key", "k"], "expected --url with --api-key"),
    ],
)
def test_options_that_do_not_fit_are_refused(words: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["chat", "hi", *words])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


class Terminal:
    """A program in a terminal of its own."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._own, theirs = pty.openpty()
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=os.environ | environment,
            start_new_session=True,
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # noqa: PLW1509 - makes it the terminal
        )
        os.close(theirs)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._own, text.encode())

    def wait_for(self, text: str, *, after: int = 0) -> int:
        """Waits until the terminal shows a text, and returns where it ends."""
        end = time.monotonic() + SECONDS
        while text not in self.shown[after:]:
            assert time.monotonic() < end, f"waited in vain for {text!r} after {self.shown[after:]!r}"
            if select.select([self._own], [], [], 0.1)[0]:
                self.shown += os.read(self._own, 4096).decode(errors="replace")
        return self.shown.index(text, after) + len(text)

    def press(self, key: str, text: str, *, after: int) -> int:
        """Presses a key until the terminal shows a text: readline misses a signal that comes as it begins to read."""
        begun = again = time.monotonic()
        while text not in self.shown[after:] and time.monotonic() < begun + SECONDS:
            if time.monotonic() >= again:
                self.type(key)
                again = time.monotonic() + 2.0
            if select.select([self._own], [], [], 0.1)[0]:
                self.shown += os.read(self._own, 4096).decode(errors="replace")
        return self.wait_for(text, after=after)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._own)


def test_on_a_terminal_ctrl_c_stops_an_answer_and_lines_are_remembered(server: ServedProcess, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "sightline", "chat", "--url", server.url, "--max-tokens", "200"]
    terminal = Terminal(words, {"XDG_STATE_HOME": str(tmp_path), "NO_COLOR": "1", "TERM": "dumb"})
    try:
        place = terminal.wait_for("> ")
        terminal.type("count for me\n")
        place = terminal.wait_for(counted(5), after=place)
        terminal.type("\x03")
        place = terminal.wait_for("stopped", after=place)
        place = terminal.wait_for("> ", after=place)
        place = terminal.press("\x03", "Ctrl-D or /exit leaves", after=place)
        place = terminal.wait_for("> ", after=place)
        terminal.type("/help\n")
        place = terminal.wait_for("/save FILE", after=place)
        place = terminal.wait_for("> ", after=place)
        terminal.type("\x04")
        assert terminal.process.wait(SECONDS) == 0
    finally:
        terminal.close()
    history = tmp_path / "sightline" / "chat_history"
    assert history.read_text().splitlines()[-2:] == ["count for me", "/help"]
    assert history.stat().st_mode & 0o777 == 0o600


def test_a_url_is_never_wrapped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(notes, "width", 20)
    url = f"http://{'a' * 60}.example:8000"
    _announce(url, opened(), "front end", False, 0.0)
    shown = capsys.readouterr().err.splitlines()
    assert any(f"{url}/v1" in line and f"{url}/docs" in line for line in shown)
    assert any(f"curl -N {url}/v1/chat/completions" in line for line in shown)
