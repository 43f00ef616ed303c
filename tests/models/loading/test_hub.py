"""Models by Hugging Face id, against a stand-in for the hub on this machine and a cache laid out by hand."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from sightline.core.errors import CheckpointError, ModelError
from sightline.core.ledger import Ledger
from sightline.models.loading.checkpoint import Checkpoint
from sightline.models.loading.hub import HubReference, fetch, parse_reference
from sightline.models.loading.opening import open_checkpoint, open_description
from support.gguf_files import tiny_llama, write_llama
from support.hub_server import COMMIT, GATED, HubServer, serving

FOLDER, ONE_GGUF, GGUFS, PICKLED = "owner/folder", "owner/one-gguf", "owner/ggufs", "owner/pickled"
POOLING = ("modules.json", "sentence_bert_config.json", "1_Pooling/config.json")
EXTRAS = (
    "pytorch_model.bin",
    "modeling_tiny.py",
    "training_args.pt",
    "original/model.safetensors",
    "onnx/config.json",
    "README.md",
)


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hub")
    model = tiny_llama()
    folders = {name: root / name for name in (FOLDER, ONE_GGUF, GGUFS, PICKLED)}
    model.save_pretrained(folders[FOLDER], max_shard_size="100KB")
    for extra in (*EXTRAS, "consolidated.safetensors"):
        (folders[FOLDER] / extra).parent.mkdir(exist_ok=True)
        (folders[FOLDER] / extra).write_bytes(b"not to be fetched")
    for pooled in POOLING:
        (folders[FOLDER] / pooled).parent.mkdir(exist_ok=True)
        (folders[FOLDER] / pooled).write_text(json.dumps({"file": pooled}))
    for name in (ONE_GGUF, GGUFS, PICKLED):
        folders[name].mkdir(parents=True)
        (folders[name] / "config.json").write_text("{}")
    write_llama(folders[ONE_GGUF] / "tiny.gguf", model)
    write_llama(folders[GGUFS] / "tiny-F32.gguf", model)
    (folders[GGUFS] / "Q8").mkdir()
    write_llama(folders[GGUFS] / "Q8" / "tiny-Q8_0.gguf", model, quantised="Q8_0")
    (folders[PICKLED] / "pytorch_model.bin").write_bytes(b"pickle")
    return folders


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@pytest.fixture
def hub(repositories: dict[str, Path], cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with serving(repositories) as server:
        use_endpoint(server.endpoint, monkeypatch)
        yield server


def use_endpoint(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def opened(location: str) -> Checkpoint:
    return open_checkpoint(location, Ledger())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("owner/name", HubReference("owner/name")),
        ("owner/name@main", HubReference("owner/name", "main")),
        ("owner/name@refs/pr/1", HubReference("owner/name", "refs/pr/1")),
        ("owner/name:file.gguf", HubReference("owner/name", None, "file.gguf")),
        ("owner/name@v1:Q8/file.gguf", HubReference("owner/name", "v1", "Q8/file.gguf")),
        ("name", None),
        ("./owner/name", None),
        ("/owner/name", None),
        ("~/name", None),
        ("../name", None),
        ("owner/..", None),
        ("owner/name@../../x", None),
        ("owner/name:../x.gguf", None),
        ("owner/name:weights.bin", None),
        ("owner/file.gguf@main", HubReference("owner/file.gguf", "main")),
        ("owner/name.gguf:file.gguf", HubReference("owner/name.gguf", None, "file.gguf")),
        ("owner/name-GGUF", HubReference("owner/name-GGUF")),
        ("models/deep/file.gguf", None),
        ("a/b/c", None),
        ("owner/na me", None),
        ("owner/name\n", None),
    ],
)
def test_what_is_an_id_and_what_only_a_path(text: str, expected: HubReference | None) -> None:
    assert parse_reference(text) == expected
    if expected is not None:
        assert str(expected) == text


@pytest.mark.parametrize(
    "text",
    [
        "models/foo.bin",
        "weights/model.gguf",
        "models/foo.safetensors",
        "models/foo.GGUF",
        "a/b.pt",
        "a/b.pth",
        "a/b.ckpt",
    ],
)
def test_a_path_with_a_slip_in_it_is_not_taken_for_an_id(text: str, hub: HubServer) -> None:
    with pytest.raises(ModelError) as caught:
        opened(text)
    assert f"got {text!r}: read as a path, there is no such file; read as an id, its name is" in str(caught.value)
    assert f"Check the path, or write {text}@main" in str(caught.value)
    assert hub.fetched == []


def test_a_folder_is_fetched_once_and_without_pickles_or_code(hub: HubServer) -> None:
    checkpoint = opened(FOLDER)
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]
    assert checkpoint.load("model.norm.weight").shape == (64,)
    assert "model.safetensors.index.json" in hub.fetched
    assert sum(name.endswith(".safetensors") for name in hub.fetched) > 1
    assert not set(hub.fetched) & {*EXTRAS, "consolidated.safetensors"}
    assert set(POOLING) <= set(hub.fetched)
    hub.fetched.clear()
    opened(f"{FOLDER}@main")
    opened(f"{FOLDER}@{COMMIT}")
    assert hub.fetched == []


def test_an_existing_path_comes_before_an_id(hub: HubServer, repositories: dict[str, Path]) -> None:
    Path("owner").mkdir()
    Path(FOLDER).symlink_to(repositories[FOLDER])
    assert opened(FOLDER).location == Path(FOLDER)
    assert hub.fetched == []


def test_the_only_gguf_file_is_taken(hub: HubServer) -> None:
    assert opened(ONE_GGUF).location.name == "tiny.gguf"
    assert hub.fetched.count("tiny.gguf") == 1


def test_several_gguf_files_are_listed_and_one_can_be_named(hub: HubServer) -> None:
    with pytest.raises(ModelError, match=r"2 GGUF files.*owner/ggufs:Q8/tiny-Q8_0\.gguf, out of: .*, tiny-F32\.gguf"):
        opened(GGUFS)
    assert not any(name.endswith(".gguf") for name in hub.fetched)
    checkpoint = opened(f"{GGUFS}:Q8/tiny-Q8_0.gguf")
    assert checkpoint.tensors["lm_head.weight"].stored_as == "Q8_0"
    with pytest.raises(ModelError, match=r"'no\.gguf' in owner/ggufs.*Its GGUF files: Q8/tiny-Q8_0\.gguf, tiny-F32"):
        opened(f"{GGUFS}:no.gguf")


def test_a_model_that_has_only_pickles_is_refused(hub: HubServer) -> None:
    with pytest.raises(ModelError, match=r"pytorch_model\.bin: it is a pickle, which is never fetched"):
        opened(PICKLED)
    assert "pytorch_model.bin" not in hub.fetched


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("owner/nothing", "no such path, and Hugging Face shows no such model.*spelling.*HF_TOKEN"),
        (f"{FOLDER}@v9", "expected a revision of owner/folder, got 'v9'"),
        (GATED, "gated.*terms.*HF_TOKEN"),
    ],
)
def test_what_the_hub_refuses_is_explained(hub: HubServer, location: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        opened(location)


def test_an_unreachable_hub_is_explained(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving({}) as server:
        endpoint = server.endpoint
    use_endpoint(endpoint, monkeypatch)
    with pytest.raises(ModelError, match=r"no such path.*cache.*fetching it failed.*HF_HUB_OFFLINE=1.*HF_TOKEN"):
        opened(FOLDER)


def test_a_cached_model_opens_while_the_hub_is_unreachable(hub: HubServer) -> None:
    fetch(HubReference(FOLDER))
    fetch(HubReference(ONE_GGUF))
    hub.shutdown()
    hub.server_close()
    assert opened(FOLDER).load("model.norm.weight").shape == (64,)
    assert opened(ONE_GGUF).location.name == "tiny.gguf"


def lay_out(cache: Path, repository: str, source: Path, leave_out: str = "") -> None:
    """The hub's cache layout: a ref to a commit, whose files link to blobs."""
    root = cache / f"models--{repository.replace('/', '--')}"
    snapshot = root / "snapshots" / COMMIT
    for folder in (root / "refs", root / "blobs", snapshot):
        folder.mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    for number, path in enumerate(sorted(source.glob("*.*"))):
        if path.is_file() and path.name != leave_out:
            (root / "blobs" / str(number)).write_bytes(path.read_bytes())
            (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))


def test_offline_a_cache_laid_out_by_hand_is_enough(
    repositories: dict[str, Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    lay_out(cache, FOLDER, repositories[FOLDER])
    lay_out(cache, ONE_GGUF, repositories[ONE_GGUF])
    assert opened(FOLDER).load("model.norm.weight").shape == (64,)
    assert opened(f"{FOLDER}@{COMMIT}").load("model.norm.weight").shape == (64,)
    assert opened(ONE_GGUF).location.name == "tiny.gguf"
    assert opened(f"{ONE_GGUF}:tiny.gguf").location.name == "tiny.gguf"
    with pytest.raises(ModelError, match=r"'owner/other'.*not complete in the cache.*HF_HUB_OFFLINE forbids.*path"):
        opened("owner/other")


def test_offline_a_missing_part_is_noticed(
    repositories: dict[str, Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    part = next(path.name for path in sorted(repositories[FOLDER].glob("model-*.safetensors")))
    lay_out(cache, FOLDER, repositories[FOLDER], leave_out=part)
    with pytest.raises(CheckpointError, match=part):
        opened(FOLDER)


def read_terminal(controller: int) -> bytes:
    """All that is written to the terminal until its last writer closes it."""
    shown = b""
    try:
        while data := os.read(controller, 1 << 16):
            shown += data
    except OSError:  # how Linux says that the other side is closed
        pass
    return shown


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_shows_on_a_terminal_only(repositories: dict[str, Path], tmp_path: Path, terminal: bool) -> None:
    code = f"from sightline.models.loading.hub import *; print(fetch(HubReference({FOLDER!r})))"
    reader, writer = pty.openpty() if terminal else os.pipe()
    if terminal:
        termios.tcsetwinsize(writer, (24, 120))
    with serving(repositories) as server:
        settings = {"HF_ENDPOINT": server.endpoint, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_TELEMETRY": "1"}
        command = [sys.executable, "-c", code]
        with subprocess.Popen(
            command, env={**os.environ, **settings}, stdout=subprocess.PIPE, stderr=writer
        ) as process:
            os.close(writer)
            shown = read_terminal(reader)
            out, _ = process.communicate(timeout=120)
    os.close(reader)
    assert Path(out.decode().strip()) == tmp_path / f"hub/models--owner--folder/snapshots/{COMMIT}"
    if terminal:
        assert b"100%" in shown
    else:
        assert shown == b""


def test_a_local_model_does_not_import_the_hub_package(tmp_path: Path) -> None:
    write_llama(tmp_path / "tiny.gguf", tiny_llama())
    code = (
        "import sys; from sightline.core.ledger import Ledger\n"
        "from sightline.models.loading.opening import open_checkpoint, open_description\n"
        "open_checkpoint(sys.argv[1], Ledger()); print('huggingface_hub' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "tiny.gguf")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"


def test_a_description_fetches_the_config_and_no_weights(hub: HubServer) -> None:
    checkpoint = open_description(FOLDER, Ledger())
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]
    assert not any("safetensors" in path for path in hub.fetched)


def test_a_description_of_a_gguf_file_is_its_header(hub: HubServer) -> None:
    # Its config.json says nothing.
    assert open_description(ONE_GGUF, Ledger()).config["architectures"] == ["LlamaForCausalLM"]
