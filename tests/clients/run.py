"""Runs other projects' clients against a server, each in an environment of its own. README.md says which."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

from recording_proxy import Recording, recording

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDER = ROOT / ".clients"
MODEL_FOLDER = FOLDER / "model"
START_SECONDS = 180.0
PINNED_TORCH = [line for line in (ROOT / "constraints.txt").read_text().split() if line.startswith("torch==")]
"""For clients that compute with torch, so that both sides compute with the same one."""


@dataclass(frozen=True)
class Client:
    """A client, what installs it, and the script that uses it."""

    packages: Sequence[str]
    script: str
    needs_folder: bool = False
    """Whether it reads a tokenizer or weights from `MODEL_FOLDER`."""


CLIENTS = {
    "openai": Client(["openai"], "ask_openai.py"),
    "openai-js": Client(["openai", "zod"], "ask_openai.mjs"),
    "ai-js": Client(["ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic", "zod"], "ask_ai.mjs"),
    "anthropic": Client(["anthropic"], "ask_anthropic.py"),
    "instructor": Client(["instructor"], "ask_instructor.py"),
    "pydantic-ai": Client(["pydantic-ai-slim[openai,anthropic]"], "ask_pydantic_ai.py"),
    "openai-agents": Client(["openai-agents"], "ask_openai_agents.py"),
    "litellm": Client(["litellm"], "ask_litellm.py"),
    "langchain": Client(["langchain-openai"], "ask_langchain.py"),
    "llama-index": Client(["llama-index-llms-openai-like"], "ask_llama_index.py"),
    "llm": Client(["llm"], "ask_llm.py"),
    "guidellm": Client(["guidellm"], "ask_guidellm.py", needs_folder=True),
    "lm-eval": Client(["lm-eval[api,hf]", *PINNED_TORCH], "ask_lm_eval.py", needs_folder=True),
}


def install(name: str, client: Client) -> list[str]:
    """Installs a client unless that is done, and returns the command that runs its script."""
    folder = FOLDER / name
    ready = folder / "ready"
    in_node = client.script.endswith(".mjs")
    if not ready.exists() or ready.read_text() != " ".join(client.packages):
        folder.mkdir(parents=True, exist_ok=True)
        if in_node:
            subprocess.run(["npm", "install", "--silent", "--no-audit", *client.packages], cwd=folder, check=True)
        else:
            subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
            pip = [
                folder / "venv/bin/python",
                "-m",
                "pip",
                "--disable-pip-version-check",
                "install",
                "-qq",
                "--no-compile",
            ]
            subprocess.run([*pip, *client.packages], check=True)
        ready.write_text(" ".join(client.packages))
    # Node resolves imports from the folder of a module, or from the current one for standard input.
    return ["node", "--input-type=module"] if in_node else [str(folder / "venv/bin/python"), str(HERE / client.script)]


@contextmanager
def served() -> Iterator[str]:
    """The address of a server with the default model."""
    log = FOLDER / "server.log"
    command = [sys.executable, "-m", "sightline", "serve", "--port", "0", "--cache-tokens", "32k"]
    command += ["--chat-template", str(HERE / "tools.jinja")]
    with log.open("w") as file:
        server = subprocess.Popen(command, stderr=file)
    try:
        yield wait_for(lambda: opened_at(log), f"expected the server to open, see {log}")
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def opened_at(log: Path) -> str | None:
    events = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{") and line.endswith("}")]
    return next((event["url"] for event in events if event["message"] == "open"), None)


def wait_for(look: Callable[[], str | None], otherwise: str) -> str:
    deadline = time.monotonic() + START_SECONDS
    while (found := look()) is None:
        if time.monotonic() > deadline:
            raise SystemExit(otherwise)
        time.sleep(0.5)
    return found


def run(name: str, url: str, model: str) -> bool:
    """Runs a client's script, and prints what it sent."""
    client = CLIENTS[name]
    command = install(name, client)
    if client.needs_folder and not (MODEL_FOLDER / "tokenizer.json").exists():
        subprocess.run([sys.executable, HERE / "make_model_folder.py", MODEL_FOLDER], check=True)
    with recording(url) as proxy:
        environment = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            "BASE_URL": f"{proxy.url}/v1",
            "OPENAI_BASE_URL": f"{proxy.url}/v1",
            "OPENAI_API_KEY": "none",
            "MODEL": model,
            "MODEL_FOLDER": str(MODEL_FOLDER),
            "HF_HUB_OFFLINE": "1",
            "PATH": f"{FOLDER / name / 'venv/bin'}:{os.environ['PATH']}",
        }
        script = (HERE / client.script).open() if command[0] == "node" else subprocess.DEVNULL
        print(f"--- {name}", flush=True)
        began = time.monotonic()
        code = subprocess.run(command, stdin=script, cwd=FOLDER / name, env=environment, check=False).returncode
        print(f"--- {name}: {'ok' if code == 0 else f'FAILED ({code})'} in {time.monotonic() - began:.0f} s")
        show(proxy)
    return code == 0


def show(proxy: Recording) -> None:
    for path, calls in sorted(proxy.calls.items()):
        statuses = ", ".join(f"{count} × {status}" for status, count in sorted(calls.statuses.items()))
        print(f"    {path}: {statuses}; fields: {', '.join(sorted(calls.fields)) or 'none'}")
        if calls.unused:
            print(f"    {path}: NOT USED by the server: {', '.join(sorted(calls.unused))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"out of {', '.join(CLIENTS)}; all without any")
    parser.add_argument("--url", help="a server that runs already, such as http://127.0.0.1:8000")
    given = parser.parse_args()
    if unknown := set(given.clients) - set(CLIENTS):
        parser.error(f"expected clients out of {', '.join(CLIENTS)}, got {', '.join(sorted(unknown))}")
    FOLDER.mkdir(exist_ok=True)
    names = given.clients or list(CLIENTS)
    if given.url:
        failed = run_all(names, given.url)
    else:
        with served() as url:
            failed = run_all(names, url)
    print(
        f"{len(names) - len(failed)} of {len(names)} clients are content" + "".join(f"; not {name}" for name in failed)
    )
    sys.exit(1 if failed else 0)


def run_all(names: Sequence[str], url: str) -> list[str]:
    with urlopen(f"{url}/v1/models", timeout=30) as answer:
        model = json.load(answer)["data"][0]["id"]
    return [name for name in names if not run(name, url, model)]


if __name__ == "__main__":
    main()
