"""What people who write Python find: types, a version, a tokenizer, and parameters by their usual names."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

import sightline
from sightline import LLM, SamplingParams
from sightline.core.errors import RequestError
from sightline.core.ledger import Ledger
from sightline.models.loading.default_model import default_model_path
from sightline.models.loading.gguf.checkpoint import GgufCheckpoint
from sightline.text.tokenizers.tokenizer import Tokenizer
from support.embedding_folder import save_embedder

ROOT = Path(__file__).parent.parent
CONVERSATION = [{"role": "user", "content": "Hi"}]


def test_the_package_says_that_it_is_typed() -> None:
    assert (files("sightline") / "py.typed").is_file()
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert build == {"packages": ["src/sightline"]}, "every file of the package is in the wheel"
    ignored = subprocess.run(["git", "-C", str(ROOT), "check-ignore", "src/sightline/py.typed"], check=False)
    assert ignored.returncode != 0


def test_the_version_is_said_everywhere() -> None:
    done = subprocess.run([sys.executable, "-m", "sightline", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"sightline {sightline.__version__}\n"
    assert importlib.metadata.version("sightline") == sightline.__version__


@pytest.mark.parametrize("name", sorted(set(sightline.__all__) - {"__version__"}))
def test_every_name_of_the_package_is_there(name: str) -> None:
    assert getattr(sightline, name).__name__ == name


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return GgufCheckpoint(default_model_path(), Ledger()).load_tokenizer()


def test_a_tokenizer_encodes_and_decodes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The capital of France")
    assert ids == tokenizer.encode_prompt("The capital of France")
    assert tokenizer.decode(ids) == "The capital of France"
    assert tokenizer.encode("<|im_start|>Hi", add_special_tokens=False)[0] in tokenizer.special_ids


def test_a_tokenizer_applies_the_chat_template(tokenizer: Tokenizer) -> None:
    text = tokenizer.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.apply_chat_template(CONVERSATION, add_generation_prompt=True) == tokenizer.encode_rendered(text)
    assert not tokenizer.apply_chat_template(CONVERSATION, tokenize=False).endswith("assistant\n")


def test_a_tokenizer_without_a_chat_template_refuses(tmp_path: Path) -> None:
    llm = LLM(str(save_embedder(tmp_path)), task="embed")
    with pytest.raises(RequestError, match="expected a model with a chat template, got one without"):
        llm.get_tokenizer().apply_chat_template(CONVERSATION)


def test_tokens_may_be_left_without_text() -> None:
    llm = LLM(cache_tokens=1024, max_model_len=128)
    assert isinstance(llm.get_tokenizer(), Tokenizer)
    params = SamplingParams(max_tokens=2, detokenize=False, logprobs=0)
    [output] = llm.generate("The capital of France is", params, use_tqdm=False)
    assert output.outputs[0].text == ""
    assert llm.get_tokenizer().decode(output.outputs[0].token_ids) == " Paris."
    [note] = [str(note) for note in llm.engine.ledger.notes if "--quantization keep" in str(note)]
    found = re.search(r"would hold the weights in (\d+) MiB instead of (\d+) MiB", note)
    assert found is not None
    assert 0 < 3 * int(found[1]) < int(found[2])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"detokenize": False, "stop": "x"}, "expected detokenize with stop, got False"),
        ({"best_of": 2}, "best_of is not a sampling parameter; nearest: n"),
        ({"use_beam_search": True}, "use_beam_search is not supported yet: beam search outside LLM.beam_search"),
    ],
)
def test_parameters_that_are_not_supported_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**given)
