"""EAGLE-3 heads give the same with every kind of kernels, and a CPU records their steps and those of their target."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from sightline.core.batch import RowWork
from sightline.core.config import EngineConfig
from sightline.core.ledger import Ledger
from sightline.layers.operations import Operations
from sightline.layers.torch_operations import TorchOperations
from sightline.models.decoder import DecoderDefinition
from sightline.models.drafting import DraftSource
from sightline.models.eagle3 import Eagle3Draft
from sightline.models.loading.opening import open_checkpoint
from sightline.models.registry import define_eagle3, define_model
from sightline.runner.build import build_runtime
from sightline.speculative.network_steps import NetworkSteps
from support.case_marks import proofs
from support.changed_runtimes import compute_with
from support.eagle3_heads import CASES, HIDDEN, TARGET_LAYERS, make_weights, reference, save_head
from support.eagle3_runs import GivenRow, HeadRun, define_head, load_head, make_target
from support.gguf_files import tiny_llama, write_llama
from support.tiny_models import VOCAB, random_prompts, relative_error

# While an engine warms up, attention reads a cache that nobody has written: Triton's interpreter warns of overflows.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
TOLERANCE = 1e-4
LATER = [7, 8]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Those of the head and its target."""
    head, target = tmp_path / "head", tmp_path / "target"
    for each in (head, target):
        each.mkdir()
    make_target().save_pretrained(target)
    return head, target


def triton_operations() -> Operations:
    pytest.importorskip("triton")
    from sightline.layers.triton_operations import TritonOperations

    return TritonOperations()


@pytest.mark.parametrize("make", [TorchOperations, triton_operations])
@pytest.mark.parametrize("name", ["all_norms", *proofs("plain", "fc_norm")])
def test_a_head_gives_the_same_with_other_kernels(
    make: type[Operations], name: str, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve tokens are so many that torch's buffers are feature-major."""
    head_folder, target = folders
    operations, case, weights = make(), CASES[name], make_weights(CASES[name])
    save_head(case, head_folder, weights)
    head = load_head(head_folder, target, torch.zeros_like(weights["embed_tokens.weight"]))
    compute_with(monkeypatch, operations)
    run = HeadRun(target, head)
    assert run.runtime.operations is operations
    [tokens], [row] = random_prompts([12]), run.open_rows(1)
    states = torch.randn(len(tokens), case.num_taps * HIDDEN, generator=torch.Generator().manual_seed(4))
    expected = reference(case, weights).run(tokens, states, LATER)
    given, new, context = run.fuse(states), tokens, 0
    for step, later in zip(expected, [*LATER, 0], strict=True):
        [logits], [made] = run.step([GivenRow(row, new, context, given)])
        assert relative_error(logits, step.logits) <= TOLERANCE
        assert relative_error(made, step.states) <= TOLERANCE
        context, new, given = context + len(new), [later], made[-1:]


@pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")
@pytest.mark.parametrize("name", ["plain", "before_residual", "norm_output"])
def test_a_cpu_records_the_steps_of_a_draft(name: str, folders: tuple[Path, Path]) -> None:
    head_folder, target = folders
    case, weights, ledger = CASES[name], make_weights(CASES[name]), Ledger(strict=True)
    save_head(case, head_folder, weights)
    draft = Eagle3Draft(define_head(head_folder, target))
    source = DraftSource(draft, open_checkpoint(head_folder, ledger))
    config = EngineConfig(cache_tokens=256, max_num_seqs=4, page_size=4, cuda_graph_sizes="1,2")
    runtime = build_runtime(config, open_checkpoint(target, ledger), ledger, taps=draft.taps, draft=source)
    [network] = runtime.draft.networks
    assert all(each.graphs.buckets for each in runtime.networks)
    assert "cuda_graph_sizes" not in {note.subject for note in ledger.notes}
    [tokens], row, steps = random_prompts([9]), runtime.store.open_row(), NetworkSteps(network)
    runtime.store.grow_row(row, len(tokens) + len(LATER))
    states = torch.randn(len(tokens), case.num_taps * HIDDEN, generator=torch.Generator().manual_seed(4))
    expected = reference(case, weights).run(tokens, states, LATER)
    given, new, context = runtime.draft.fuse(states), tokens, 0
    for step, later in zip(expected, [*LATER, 0], strict=True):
        outputs = steps.run([RowWork(row, new, context, num_logits=1)], None, given)
        assert relative_error(outputs.logits, step.logits[-1:]) <= TOLERANCE
        assert relative_error(outputs.given_states, step.states) <= TOLERANCE
        context, new, given = context + len(new), [later], outputs.given_states[-1:]
    assert network.runner.num_replayed == len(LATER)


@pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")
def test_a_head_that_is_not_quantised_drafts_for_a_target_that_stays_so(folders: tuple[Path, Path]) -> None:
    head_folder, folder = folders
    case, ledger, path = CASES["wide_target"], Ledger(strict=True), folder / "target.gguf"
    save_head(case, head_folder, make_weights(case))
    write_llama(path, tiny_llama(vocab_size=VOCAB, num_hidden_layers=TARGET_LAYERS), quantised="Q8_0")
    target, stored = open_checkpoint(path, ledger), open_checkpoint(head_folder, ledger)
    definition = define_model(target.config, ledger)
    assert isinstance(definition, DecoderDefinition)
    draft = Eagle3Draft(define_eagle3(stored.config, definition, ledger))
    config = EngineConfig(cache_tokens=256, page_size=4, quantization="keep")
    build_runtime(config, target, ledger, taps=draft.taps, draft=DraftSource(draft, stored))
    assert not ledger.degradations
