"""The plain reference of EAGLE-3 heads gives what speculators gives.

speculators is not installed for the tests: it needs other releases of packages that they use. To repeat the comparison
(last done with speculators 0.9.0, torch 2.13 and transformers 5.22.2):

    pip install --no-deps --target FOLDER speculators==0.9.0 hs-connectors==0.9.0 loguru pydantic-settings
    PYTHONPATH=FOLDER pytest tests/models/test_eagle3_oracle.py

The heads `original`, `rope` and `wide_target`, which speculators does not run, were also compared by hand with
`LlamaForCausalLMEagle3` of specforge 0.2.0, over three steps: the largest difference was 7e-7 of the scale.
"""

from __future__ import annotations

import importlib
import json
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from support.eagle3_heads import CASES, HIDDEN, HeadCase, make_weights, reference, save_head
from support.eagle3_runs import define_head, make_target
from support.tiny_models import VOCAB, random_prompts, relative_error

pytestmark = [
    pytest.mark.skipif(find_spec("speculators") is None, reason="speculators is not installed"),
    pytest.mark.filterwarnings("ignore"),
]
TOLERANCE = 1e-4
NUM_STEPS = 4
COMPARED = [name for name, case in CASES.items() if case.target_hidden == HIDDEN]
"""speculators does not run heads whose states have another width than the target's."""


class _Absent(ModuleType):
    """A module that is imported for training and not called here."""

    def __getattr__(self, name: str) -> type:
        return type(name, (), {})


@pytest.fixture(scope="module")
def eagle3() -> Any:
    """The module of speculators with the heads. Only its training needs `datasets`."""
    if find_spec("datasets") is None:
        sys.modules["datasets"] = _Absent("datasets")
        sys.modules["datasets"].__spec__ = ModuleSpec("datasets", None)
    return importlib.import_module("speculators.models.eagle3")


def make_oracle(eagle3: Any, case: HeadCase, weights: dict[str, Tensor]) -> Any:
    """The head as speculators builds it."""
    config = eagle3.Eagle3SpeculatorConfig(
        transformer_layer_config=case.layer_config(),
        draft_vocab_size=case.num_drafted,
        eagle_aux_hidden_state_layer_ids=None if case.layer_ids is None else list(case.layer_ids),
        **vars(case.options),
    )
    oracle = eagle3.Eagle3DraftModel(config).eval()
    found = oracle.load_state_dict(weights, strict=False)
    assert not found.unexpected_keys
    assert set(found.missing_keys) <= {"verifier_norm.weight", "verifier_lm_head.weight"}
    return oracle


def oracle_steps(oracle: Any, tokens: list[int], states: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Logits and states of each step. A step goes on from all tokens at once, each with those that were given."""
    logits: list[Tensor] = []
    normed: list[Tensor] = []
    raw: list[Tensor] = []
    oracle.lm_head.register_forward_hook(lambda _module, _inputs, out: logits.append(out[0]))
    oracle.norm.register_forward_hook(lambda _module, _inputs, out: normed.append(out[0]))
    oracle.layers[0].register_forward_hook(lambda _module, _inputs, out: raw.append(out[0]))
    with torch.no_grad():
        documents = torch.zeros(1, len(tokens), dtype=torch.long)
        oracle(states[None], torch.tensor([tokens]), documents, ttt_steps=NUM_STEPS)
    return list(zip(logits, normed if oracle.config.norm_output else raw, strict=True))


@pytest.mark.parametrize("name", COMPARED)
def test_the_reference_gives_what_speculators_gives(name: str, eagle3: Any) -> None:
    case = CASES[name]
    weights = make_weights(case)
    [tokens] = random_prompts([14])
    states = torch.randn(len(tokens), case.num_taps * HIDDEN, generator=torch.Generator().manual_seed(2)) * 3.0
    steps = oracle_steps(make_oracle(eagle3, case, weights), tokens, states)
    for last in (0, 5, 9):
        given, later = tokens[: last + 1], tokens[last + 1 : last + NUM_STEPS]
        for (logits, state), step in zip(
            steps, reference(case, weights).run(given, states[: last + 1], later), strict=True
        ):
            assert relative_error(step.logits[-1], logits[last]) <= TOLERANCE
            assert relative_error(step.states[-1], state[last]) <= TOLERANCE


def test_what_speculators_saves_is_read(eagle3: Any, tmp_path: Path) -> None:
    config = importlib.import_module("speculators.config")
    greedy = importlib.import_module("speculators.proposals.greedy")
    case = CASES["fc_norm"]
    oracle = make_oracle(eagle3, case, make_weights(case))
    oracle.config.speculators_config = config.SpeculatorsConfig(
        algorithm="eagle3",
        proposal_methods=[greedy.GreedyTokenProposalConfig(speculative_tokens=3)],
        default_proposal_method="greedy",
        verifier=config.VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )
    for folder in ("oracle", "own", "target"):
        (tmp_path / folder).mkdir()
    make_target().save_pretrained(tmp_path / "target")
    oracle.save_pretrained(tmp_path / "oracle")
    save_head(case, tmp_path / "own", make_weights(case))
    assert json.loads((tmp_path / "oracle/config.json").read_text())["speculators_version"] == "0.9.0"
    saved, own = (define_head(tmp_path / folder, tmp_path / "target") for folder in ("oracle", "own"))
    assert saved == own
    assert saved.num_tokens == VOCAB
