"""The modules for multi-token prediction give what transformers' give, over prompts and rounds of guesses."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.cache_utils import MtpCache

from sightline.cache.layout import Layout, arrange_free_pages
from sightline.core.config import EngineConfig
from sightline.core.errors import CheckpointError, ConfigError
from sightline.core.ledger import Ledger
from sightline.layers.linear import Linear
from sightline.models.contract import Taps
from sightline.models.decoder import Decoder
from sightline.models.drafting import DraftSource, LoadedDraft
from sightline.models.loading.opening import open_checkpoint
from sightline.models.mtp import FINAL, MtpDefinition, MtpModule, define_mtp
from sightline.models.registry import define_model
from sightline.models.weights import WeightReader
from sightline.runner.build import build_runtime
from sightline.runner.runtime import Runtime
from sightline.testing.conformance.rig import Unused, fill_pools
from support.attention_cases import CPU
from support.case_marks import proofs, routine
from support.mtp_rounds import DepthOracle, Rounds
from support.tiny_models import make_model, random_prompts
from support.tiny_mtp import Oracle, change_tensors, save_with_modules
from support.tiny_sparse_mtp import SparseOracle, as_sparse

TOLERANCE = 1e-4
VISIBLE = 100 * TOLERANCE
FAMILIES = ("deepseek_v3", "glm4_moe")
CASES = [(family, count) for family in FAMILIES for count in (1, 2)]
PROMPT_LENS = (19, 1, 40)
Case = tuple[str, int]
"""A family, and its number of modules."""
Change = Callable[[MtpModule], MtpModule]


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Oracle]:
    return {case: save_with_modules(*case, tmp_path_factory.mktemp(case[0])) for case in CASES}


def unchanged(module: MtpModule) -> MtpModule:
    return module


@dataclass(frozen=True)
class Changed(MtpDefinition):
    """The modules with something wrong."""

    states: Taps = FINAL
    change: Change = unchanged

    @property
    def taps(self) -> Taps:
        return self.states

    def load(self, target: Decoder, weights: WeightReader) -> LoadedDraft:
        super().load(target, weights)  # which checks that every tensor is used
        return LoadedDraft(tuple(self.change(module.load(target, weights)) for module in self.modules))


def build(
    folder: Path,
    count: int | None = None,
    states: Taps = FINAL,
    change: Change = unchanged,
    page_size: int = 16,
    layer_kernels: str = "auto",
    *,
    strict: bool = True,
) -> Runtime:
    ledger = Ledger(strict=strict)
    checkpoint = open_checkpoint(folder, ledger)
    found = define_mtp(define_model(checkpoint.config, ledger), checkpoint, count)
    config = EngineConfig(
        page_size=page_size, layer_kernels=layer_kernels, dtype="float32", cache_tokens=1024, max_num_seqs=4
    )
    draft = DraftSource(Changed(found.target, found.num_modules, states, change), checkpoint)
    runtime = build_runtime(config, checkpoint, ledger, taps=draft.definition.taps, draft=draft)
    fill_pools(runtime.store, Unused.NAN)
    arrange_free_pages(runtime.store, Layout.SHUFFLED, seed=3)
    return runtime


def run_rounds(
    runtime: Runtime, oracle: DepthOracle, *, chunk: int = 7, spoil: Callable[[Rounds], None] = lambda rounds: None
) -> float:
    """The largest error over a prefill and rounds in which from none to all of the guesses are accepted."""
    # With these texts every router prefers its experts by 1e-4 or more, so that rounding changes no choice.
    texts = random_prompts([length + 24 for length in PROMPT_LENS], seed=1)
    rounds = Rounds(runtime, oracle, texts, chunk)
    spoil(rounds)
    most = rounds.num_modules
    accepted = [(0, most, 0), (most, 0, 0), (0, 0, most), (most // 2, most, most // 2), (0, 0, 0), (most, most, most)]
    rounds.prefill(PROMPT_LENS, accepted[0])
    for number, now in enumerate(accepted):
        following: Sequence[int] = accepted[number + 1] if number + 1 < len(accepted) else (0, 0, 0)
        rounds.verify(now, following)
    assert len(rounds.errors) > 40
    return max(rounds.errors)


@pytest.mark.parametrize(
    ("page_size", "chunk"),
    [(16, 7), pytest.param(1, 64, marks=pytest.mark.prove), pytest.param(64, 5, marks=pytest.mark.prove)],
)
@pytest.mark.parametrize(
    ("family", "count"), [pytest.param(*each, marks=() if each[1] == 2 else pytest.mark.prove) for each in CASES]
)
def test_states_and_logits_of_every_depth_are_those_of_transformers(
    oracles: dict[Case, Oracle], family: str, count: int, page_size: int, chunk: int
) -> None:
    oracle = oracles[family, count]
    assert run_rounds(build(oracle.folder, page_size=page_size), oracle, chunk=chunk) <= TOLERANCE


@pytest.mark.parametrize("kernels", [*proofs("torch"), "numba"])
@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_the_same_with_all_kernels_of_a_cpu(oracles: dict[Case, Oracle], family: str, kernels: str) -> None:
    oracle = oracles[family, 2]
    assert run_rounds(build(oracle.folder, layer_kernels=kernels), oracle) <= TOLERANCE


@pytest.mark.prove
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(("family", "count"), [("deepseek_v32", 1), ("deepseek_v32", 2), ("glm_moe_dsa", 1)])
def test_modules_of_sparse_models_are_composed_of_the_layers_of_transformers(
    tmp_path: Path, family: str, count: int, page_size: int
) -> None:
    """Each has an indexer of its own, even where the last layer of the model shares one."""
    oracle = SparseOracle(family, count, tmp_path)
    runtime = build(tmp_path, page_size=page_size, strict=False)
    groups = [each.group.name for network in runtime.networks for each in network.bindings]
    assert [name for name in groups if "index" in name] == [
        "index0",
        *(f"draft{depth}.index0" for depth in range(count)),
    ]
    assert run_rounds(runtime, oracle) <= TOLERANCE


@pytest.mark.prove
def test_modules_of_v32_that_choose_everything_are_those_of_v3(oracles: dict[Case, Oracle], tmp_path: Path) -> None:
    oracle = oracles["deepseek_v3", 1]
    dense = as_sparse(oracle.folder, tmp_path, top_k=128)
    assert run_rounds(build(dense, strict=False), oracle) <= TOLERANCE


def exchange_norms(module: MtpModule) -> MtpModule:
    return replace(module, embedding_norm=module.state_norm, state_norm=module.embedding_norm)


def take_another_final_norm(module: MtpModule) -> MtpModule:
    states = module.decoder.states
    other = replace(states, final_norm=states.layers[0].attention_norm)
    return replace(module, decoder=replace(module.decoder, states=other))


def exchange_inputs(module: MtpModule) -> MtpModule:
    """Joins the state and the embedding in the other order."""
    size = module.states_in
    columns = torch.zeros(2 * size, size)
    module.joint(torch.eye(2 * size), columns)
    weight = torch.cat((columns[size:], columns[:size])).t().contiguous()
    return replace(module, joint=Linear(weight, None))


def keep_guessed(rounds: Rounds) -> None:
    rounds.remakes_guessed = False


def give_states_of_model(rounds: Rounds) -> None:
    rounds.takes_states_of_model = True


def give_earlier_tokens(rounds: Rounds) -> None:
    rounds.num_behind = 1


FAULTS: dict[str, dict[str, Any]] = {
    "state before the final norm": {"states": Taps(streams=(3,))},
    "state of the layer before the last": {"states": Taps(streams=(2,))},
    "state of the embedding": {"states": Taps(streams=(0,))},
    "norms of the inputs exchanged": {"change": exchange_norms},
    "inputs exchanged": {"change": exchange_inputs},
    "another norm behind the layer": {"change": take_another_final_norm},
    "guessed entries kept": {"spoil": keep_guessed},
    "state of the model at every depth": {"spoil": give_states_of_model},
    "token of the place instead of the next": {"spoil": give_earlier_tokens},
}


@pytest.mark.parametrize(
    "planted",
    routine(
        {f"{family} {fault}": (family, fault) for family in FAMILIES for fault in FAULTS},
        "glm4_moe state before the final norm",
        "deepseek_v3 guessed entries kept",
    ),
)
def test_a_planted_fault_is_caught(oracles: dict[Case, Oracle], planted: tuple[str, str]) -> None:
    family, fault = planted
    oracle, options = oracles[family, 2], dict(FAULTS[fault])
    spoil = options.pop("spoil", lambda rounds: None)

    def spoil_modules(rounds: Rounds) -> None:
        rounds.compares_model = False  # its states are others if the fault is that others are given
        spoil(rounds)

    assert run_rounds(build(oracle.folder, **options), oracle, spoil=spoil_modules) >= VISIBLE


def test_every_depth_has_a_cache_and_a_group_of_its_own_and_shares_the_vocabulary(
    oracles: dict[Case, Oracle],
) -> None:
    folder = oracles["glm4_moe", 2].folder
    runtime = build(folder)
    names = [binding.group.name for network in runtime.networks for binding in network.bindings]
    assert names == ["group0", "draft0.group0", "draft1.group0"]
    pools = [pool for network in runtime.store.networks for pool in network.pools]
    assert len({pool.table_id for pool in pools}) == len(pools) == 3
    target, modules, _ = load(folder)
    for module in modules:
        assert module.decoder.head is target.head
        assert module.decoder.states.embedding is target.states.embedding
        assert (module.states_in, module.states_out) == (48, 48)


def test_a_model_without_a_drafter_leaves_the_modules_in_the_ledger(oracles: dict[Case, Oracle]) -> None:
    ledger = Ledger(strict=True)
    build_runtime(EngineConfig(cache_tokens=256), open_checkpoint(oracles["glm4_moe", 2].folder, ledger), ledger)
    facts = [note.fact for note in ledger.notes if note.subject == "multi-token prediction"]
    assert [fact.split(" are ")[0] for fact in facts] == [f"58 tensors model.layers.{layer}.*" for layer in (3, 4)]


def test_modules_that_a_drafter_loads_are_not_in_the_ledger(oracles: dict[Case, Oracle]) -> None:
    _, modules, ledger = load(oracles["glm4_moe", 2].folder)
    assert len(modules) == 2
    assert "multi-token prediction" not in [note.subject for note in ledger.notes]


def test_modules_beyond_those_that_are_wanted_stay_in_the_ledger(oracles: dict[Case, Oracle]) -> None:
    _, modules, ledger = load(oracles["glm4_moe", 2].folder, count=1)
    assert len(modules) == 1
    [fact] = [note.fact for note in ledger.notes if note.subject == "multi-token prediction"]
    assert "58 tensors model.layers.4.* are not loaded" in fact


def load(folder: Path, count: int | None = None) -> tuple[Decoder, list[MtpModule], Ledger]:
    ledger = Ledger(strict=True)
    checkpoint = open_checkpoint(folder, ledger)
    definition = define_model(checkpoint.config, ledger)
    found = define_mtp(definition, checkpoint, count)

    def reader(*elsewhere: str) -> WeightReader:
        return WeightReader(
            checkpoint, torch.float32, CPU, ledger, lambda done, total: None, loaded_elsewhere=elsewhere
        )

    target = definition.load(reader(*found.target_tensors), found.taps)
    modules = [module for module in found.load(target, reader()).models if isinstance(module, MtpModule)]
    return target, modules, ledger


def test_copies_may_be_missing(tmp_path: Path) -> None:
    oracle = save_with_modules("glm4_moe", 1, tmp_path)
    for name in ("embed_tokens", "shared_head.head"):
        change_tensors(tmp_path, {}, removed=f"model.layers.3.{name}")
    assert len(load(tmp_path)[1]) == 1
    assert run_rounds(build(tmp_path), oracle) <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "original"),
    [("embed_tokens.weight", "model.embed_tokens.weight"), ("shared_head.head.weight", "lm_head.weight")],
)
def test_a_copy_with_other_values_is_refused(tmp_path: Path, name: str, original: str) -> None:
    save_with_modules("glm4_moe", 1, tmp_path)
    change_tensors(tmp_path, {f"model.layers.3.{name}": torch.ones(101, 48)})
    with pytest.raises(CheckpointError, match=rf"expected model\.layers\.3\.{name} .* to be {original} again"):
        load(tmp_path)


def test_a_tensor_that_no_module_uses_is_refused(tmp_path: Path) -> None:
    save_with_modules("glm4_moe", 1, tmp_path)
    change_tensors(tmp_path, {"model.layers.3.novelty.weight": torch.ones(3)})
    with pytest.raises(CheckpointError, match=r"got 1 that it would ignore: model\.layers\.3\.novelty\.weight"):
        load(tmp_path)


def test_scales_of_the_cache_are_left_and_named(tmp_path: Path) -> None:
    save_with_modules("glm4_moe", 1, tmp_path)
    change_tensors(tmp_path, {f"model.layers.3.self_attn.{name}_scale": torch.tensor(0.5) for name in "kv"})
    _, modules, ledger = load(tmp_path)
    assert len(modules) == 1
    [fact] = [note.fact for note in ledger.notes if note.subject == "cache scales of a drafter"]
    assert fact.startswith(
        "2 tensors such as model.layers.3.self_attn.k_scale are not loaded: its cache has the scale 1"
    )


def test_a_module_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    save_with_modules("glm4_moe", 1, tmp_path)
    change_tensors(tmp_path, {}, removed="model.layers.3.hnorm")
    with pytest.raises(CheckpointError, match=r"expected tensor model\.layers\.3\.hnorm\.weight"):
        load(tmp_path)


def test_modules_that_only_the_config_has_are_refused(tmp_path: Path) -> None:
    save_with_modules("glm4_moe", 1, tmp_path)
    change_tensors(tmp_path, {}, removed="model.layers.3.")
    with pytest.raises(
        ConfigError, match=r"expected tensors model\.layers\.3\.\* .* got none in .*; use a checkpoint that has them"
    ):
        load(tmp_path)


@pytest.mark.parametrize(
    ("family", "described", "count"), [("glm4_moe", 0, None), ("deepseek_v3", 1, 2), ("llama", 0, None)]
)
def test_a_model_without_enough_modules_is_refused(
    tmp_path: Path, family: str, described: int, count: int | None
) -> None:
    make_model(family).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    own = {} if family == "llama" else {"num_nextn_predict_layers": described}
    (tmp_path / "config.json").write_text(json.dumps(config | own))
    with pytest.raises(ConfigError, match=rf"method mtp needs, got one whose config has {described} .*; use another"):
        load(tmp_path, count)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_oracle_drafts_as_generate_does(oracles: dict[Case, Oracle], family: str) -> None:
    """What is compared above runs on whole texts; `generate(use_mtp=True)` runs with a cache and feeds its guesses."""
    oracle = oracles[family, 2]
    [text] = random_prompts([20])
    states = oracle.depths([*text, 0], 19)[0].states
    with torch.no_grad():
        guesses, logits, _ = oracle.modules(
            input_ids=torch.tensor([text[1:]]),
            last_hidden_states=states.unsqueeze(0),
            attention_mask=None,
            position_ids=torch.arange(1, 20).unsqueeze(0),
            mtp_cache=MtpCache(config=oracle.model.config.get_mtp_config()),
        )
    made = oracle.depths([*text, *guesses[0].tolist()], 19)
    for depth in (1, 2):
        torch.testing.assert_close(made[depth].logits[-1], logits[0, depth - 1], rtol=1e-4, atol=1e-4)
        assert made[depth].logits[-1].argmax() == guesses[0, depth - 1]
