"""Drafters are registered as data: what each takes and needs is known without a list of cases, for packages too."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from sightline import LLM, SamplingParams
from sightline.core.device import DeviceKind
from sightline.core.errors import ConfigError
from sightline.core.ledger import Ledger
from sightline.core.speculation import METHODS, Speculation, method_names, read_speculation
from sightline.llm import EngineSettings, TokensPrompt
from sightline.speculative import methods
from sightline.speculative.drafter import DrafterContext, DrafterKind
from support.tiny_models import make_model, random_prompts

PAGE = Path(__file__).parents[2] / "docs" / "writing_a_drafter.md"
EXAMPLE, NETWORKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
MODULE = f"""{EXAMPLE}
network = DrafterKind(
    DraftMethod("network", "a network", takes=frozenset({{"attention_backend"}}), needs=frozenset({{"model"}})), Echo
)
growing = DrafterKind(DraftMethod("growing", "a tree", takes=frozenset({{"num_branches"}})), Echo)
"""
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Makes a package known that registers drafters under names: each is an attribute of its module."""

    def write(**drafters: str) -> None:
        metadata = tmp_path / "echo_drafters-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: echo-drafters\nVersion: 1.0\n")
        lines = [f"{name} = echo_drafters:{place}" for name, place in drafters.items()]
        (metadata / "entry_points.txt").write_text("\n".join(["[sightline.drafters]", *lines]))
        (tmp_path / "echo_drafters.py").write_text(MODULE)
        monkeypatch.syspath_prepend(str(tmp_path))

    return write


def context(**settings: object) -> DrafterContext:
    config = read_speculation(settings)
    assert config is not None
    return DrafterContext(config, DeviceKind.CPU, Ledger(), 512)


def test_every_method_of_sightline_has_a_drafter_and_no_other() -> None:
    assert tuple(each.method for each in methods.BUILT_IN.values()) == METHODS


def test_a_drafter_of_a_package_guesses_for_an_engine(install: Install, tmp_path: Path) -> None:
    install(echo="echo")
    folder = tmp_path / "model"
    make_model("llama").save_pretrained(folder)
    settings = {"skip_tokenizer_init": True, "cache_tokens": 512}
    prompt = TokensPrompt(prompt_token_ids=random_prompts([9])[0])
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    plain = LLM(str(folder), **cast("EngineSettings", settings))
    guessing = LLM(str(folder), **cast("EngineSettings", settings), speculative_config={"method": "echo"})
    answers = [llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids for llm in (plain, guessing)]
    assert answers[0] == answers[1]
    assert guessing.engine.metrics().spec_decode_num_draft_tokens > 0


def test_a_package_is_only_imported_if_its_method_is_asked_for(install: Install) -> None:
    install(echo="echo", broken="nothing_of_that_name")
    assert method_names() == (*methods.BUILT_IN, "broken", "echo")
    methods.find("ngram")
    assert Speculation(method="broken").method == "broken"
    with pytest.raises(ConfigError, match="expected drafter 'broken' of echo-drafters to be importable, got Attr"):
        methods.find("broken")


def test_an_unknown_method_lists_what_is_installed(install: Install) -> None:
    install(echo="echo")
    for ask in (lambda: Speculation(method="echos"), lambda: methods.find("echos")):
        with pytest.raises(ConfigError, match=r"expected a speculative method out of ngram, .*, echo, got 'echos'"):
            ask()


@pytest.mark.parametrize("place", ["Echo", "network"])
def test_an_entry_point_that_is_no_drafter_of_its_name_is_refused(install: Install, place: str) -> None:
    install(echo=place)
    with pytest.raises(ConfigError, match=r"to be a DrafterKind whose method is named echo, got .*; mend its entry"):
        methods.find("echo")


def test_two_drafters_of_one_name_are_an_error_that_names_both_packages(install: Install) -> None:
    install(ngram="echo")
    with pytest.raises(ConfigError, match="one drafter named 'ngram', got one of sightline and one of echo-drafters"):
        methods.make_drafts(context(method="ngram"))


def test_a_method_says_as_data_which_settings_it_takes_and_needs(install: Install) -> None:
    install(network="network")
    methods.make_drafts(context(method="network", model="small", attention_backend="torch"))
    with pytest.raises(ConfigError, match="expected model in speculative_config with the method network, got none"):
        methods.make_drafts(context(method="network"))
    with pytest.raises(
        ConfigError, match=r"expected no prompt_lookup_max in .* network, which has no use for it, got 5"
    ):
        methods.make_drafts(context(method="network", model="small", prompt_lookup_max=5))


def test_a_drafter_makes_trees_if_it_takes_branches_and_some_are_asked_for(install: Install) -> None:
    install(growing="growing", echo="echo")
    assert methods.make_drafts(context(method="growing", num_branches=2)).num_branches == 2
    with pytest.raises(ConfigError, match=r"expected no num_branches in .* echo, which has no use for it, got 2"):
        methods.make_drafts(context(method="echo", num_branches=2))


def test_the_example_with_networks_is_a_kind_that_needs_a_model() -> None:
    names: dict[str, object] = {}
    exec(NETWORKS, names)
    kind = names["mine"]
    assert isinstance(kind, DrafterKind)
    assert kind.networks is names["networks"]
    kind.method.check(Speculation(model="folder", method="draft_model"))
    with pytest.raises(ConfigError, match="expected model in speculative_config with the method mine"):
        kind.method.check(Speculation())
