"""Runs a Dockerfile without a container runtime, and serves from what it made. deploy/README.md says how.

Each stage is a chroot into an overlay: this machine's files below, a temporary folder above. All mounts are in a
namespace of their own, which ends with the process. What is not checked is the base image: this machine's files and
the Python that runs this script stand for it.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shlex
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from urllib.request import Request, urlopen

ROOT = Path(__file__).parents[1]
START_SECONDS = 180.0
BASE_PATH = f"{sys.base_prefix}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PASSED = re.compile("(HTTPS?|NO)_PROXY|SSL_CERT_FILE|PIP_.*", re.IGNORECASE)
"""What a build takes from its surroundings: how packages are reached."""


def read_instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yields each instruction of a Dockerfile and its arguments, with continued lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        name, _, rest = line.strip().partition(" ")
        yield name.upper(), " ".join(rest.split())


@dataclass
class Stage:
    """An image in the making."""

    root: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": BASE_PATH})
    arguments: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "0:0"
    volumes: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)

    def filled(self, text: str) -> str:
        """Replaces $NAME and ${NAME}."""
        known = {**self.arguments, **self.environment}
        return re.sub(r"\$\{?(\w+)\}?", lambda found: known.get(found[1], ""), text)

    def inside(self, path: str) -> Path:
        return self.root / os.path.join(self.folder, path).lstrip("/")

    def chroot(self, command: Sequence[str], user: str) -> list[str]:
        moved = ["sh", "-c", 'cd "$0" && exec "$@"', self.folder, *command]
        return ["chroot", f"--userspec={user}", "--groups=", str(self.root), *moved]


class Build:
    """The stages of a Dockerfile. Every instruction that it may use has a method of its name."""

    def __init__(self, scratch: Path, arguments: Mapping[str, str]) -> None:
        self._scratch = scratch
        self._given = arguments
        self._stages: dict[str, Stage] = {}

    @property
    def stage(self) -> Stage:
        return list(self._stages.values())[-1]

    def follow(self, text: str) -> Stage:
        for name, rest in read_instructions(text):
            print(f"{name} {rest}", flush=True)
            getattr(self, f"do_{name.lower()}")(rest)
        return self.stage

    def do_from(self, rest: str) -> None:
        name = rest.rpartition(" AS ")[2]
        root = overlay(self._scratch / f"stage{len(self._stages)}")
        self._stages[name] = Stage(root)
        # The image's user must reach the Python that stands for the base's.
        for parent in Path(sys.base_prefix).parents:
            inside = root / str(parent).lstrip("/")
            inside.chmod(inside.stat().st_mode | 0o011)

    def do_arg(self, rest: str) -> None:
        name, _, default = rest.partition("=")
        self.stage.arguments[name] = self._given.get(name, default)

    def do_env(self, rest: str) -> None:
        for pair in shlex.split(rest):
            name, _, value = pair.partition("=")
            self.stage.environment[name] = self.stage.filled(value)

    def do_workdir(self, rest: str) -> None:
        self.stage.folder = rest
        self.stage.inside(".").mkdir(parents=True, exist_ok=True)

    def do_copy(self, rest: str) -> None:
        words = rest.split()
        source = ROOT
        if words[0].startswith("--from="):
            source = self._stages[words.pop(0).removeprefix("--from=")].root
        *names, target = words
        for name in names:
            origin = source / name.lstrip("/")
            if source == ROOT and not in_context(name):
                raise SystemExit(f"expected {name} in the build context, got a .dockerignore that leaves it out")
            goal = self.stage.inside(target)
            if origin.is_dir():
                shutil.copytree(origin, goal, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(origin, goal)

    def do_run(self, rest: str) -> None:
        passed = {name: value for name, value in os.environ.items() if PASSED.fullmatch(name)}
        environment = {**passed, **self.stage.arguments, **self.stage.environment}
        command = self.stage.chroot(["sh", "-c", rest], self.stage.user)
        if subprocess.run(command, env=environment, check=False).returncode != 0:
            raise SystemExit(f"expected exit code 0 of RUN {rest}")

    def do_user(self, rest: str) -> None:
        self.stage.user = rest

    def do_volume(self, rest: str) -> None:
        self.stage.volumes.append(rest)

    def do_expose(self, rest: str) -> None:
        """Says something to people only."""

    def do_healthcheck(self, rest: str) -> None:
        self.stage.health = json.loads(rest.partition("CMD ")[2])

    def do_entrypoint(self, rest: str) -> None:
        self.stage.entrypoint = json.loads(rest)


def in_context(name: str) -> bool:
    """Whether .dockerignore lets a file or folder through: the last line that matches decides."""
    kept = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#") and fnmatch(name, line.lstrip("!")):
            kept = line.startswith("!")
    return kept


def overlay(folder: Path) -> Path:
    """A writable view of the machine's files."""
    upper, work, merged = (folder / name for name in ("upper", "work", "merged"))
    for each in (upper, work, merged):
        each.mkdir(parents=True)
    mount("-t", "overlay", "overlay", "-o", f"lowerdir=/,upperdir={upper},workdir={work}", str(merged))
    for name in ("dev", "proc", "sys"):
        mount("--rbind", f"/{name}", str(merged / name))
    mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", str(merged / "tmp"))
    return merged


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def serve(stage: Stage) -> None:
    """Starts what the image would start, waits until it is healthy, asks it once and ends it."""
    for volume in stage.volumes:
        inside = stage.root / volume.lstrip("/")
        owner = inside.stat()
        mount("-t", "tmpfs", "-o", f"uid={owner.st_uid},gid={owner.st_gid}", "tmpfs", str(inside))
    mount("-o", "remount,ro", str(stage.root))
    bring_loopback_up()
    if stage.user.split(":")[0] in ("0", "root"):
        raise SystemExit("expected a USER other than root")
    server = subprocess.Popen(stage.chroot(stage.entrypoint, stage.user), env=stage.environment)
    try:
        deadline = time.monotonic() + START_SECONDS
        health = stage.chroot(stage.health, stage.user)
        while subprocess.run(health, env=stage.environment, stderr=subprocess.DEVNULL, check=False).returncode != 0:
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"expected a healthy server within {START_SECONDS:.0f} s, got none")
            time.sleep(1)
        print("healthy", flush=True)
        print(ask(deadline), flush=True)
    finally:
        server.terminate()
        code = server.wait(60)
    if code != 0:
        raise SystemExit(f"expected exit code 0 after SIGTERM, got {code}")


def ask(deadline: float) -> str:
    """One completion, as soon as the model is loaded."""
    while True:
        try:
            with urlopen("http://127.0.0.1:8000/ready", timeout=10):
                break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1)
    with urlopen("http://127.0.0.1:8000/v1/models", timeout=10) as answer:
        model = json.load(answer)["data"][0]["id"]
    body = {"model": model, "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    request = Request("http://127.0.0.1:8000/v1/completions", json.dumps(body).encode(), headers)
    with urlopen(request, timeout=60) as answer:
        return f"{body['prompt']}{json.load(answer)['choices'][0]['text']}"


def bring_loopback_up() -> None:
    """A new network namespace has a loopback interface that is down."""
    get_flags, set_flags, is_up = 0x8913, 0x8914, 0x1
    with socket.socket() as any_socket:
        asked = struct.pack("16sh14x", b"lo", 0)
        _, flags = struct.unpack("16sh14x", fcntl.ioctl(any_socket, get_flags, asked))
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sh14x", b"lo", flags | is_up))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=ROOT / "Dockerfile")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    given = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("expected root, which mounts need; run it with sudo")
    with tempfile.TemporaryDirectory() as folder:
        inner = [sys.executable, __file__, "--in-namespace", folder, str(given.file), *given.build_arg]
        sys.exit(subprocess.run(["unshare", "--mount", "--", *inner], check=False).returncode)


def in_namespace(folder: str, file: str, *arguments: str) -> None:
    """The part of `main` that mounts. A child serves, in a network of its own."""
    given = dict(each.split("=", 1) for each in arguments)
    stage = Build(Path(folder), given).follow(Path(file).read_text())
    described = json.dumps({**vars(stage), "root": str(stage.root)})
    child = ["unshare", "--net", "--mount", "--", sys.executable, __file__, "--serve", described]
    sys.exit(subprocess.run(child, check=False).returncode)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--in-namespace", folder, file, *arguments]:
            in_namespace(folder, file, *arguments)
        case ["--serve", described]:
            values = json.loads(described)
            serve(Stage(**{**values, "root": Path(values["root"])}))
        case _:
            main()
