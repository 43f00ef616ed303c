"""Which part of a model a rank builds, told in the ledger."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from sightline.core.config import EngineConfig
from sightline.core.errors import ConfigError
from sightline.core.ledger import Ledger
from sightline.core.resolution import ResolvedConfig
from sightline.core.settings import stated
from sightline.core.speculation import NGRAM, read_speculation
from sightline.distributed.collectives import Collectives
from sightline.distributed.ranks import Place
from sightline.models.contract import ModelDefinition
from sightline.models.loading.checkpoint import Checkpoint
from sightline.models.loading.part import PartCheckpoint


def part_of_rank(
    definition: ModelDefinition, checkpoint: Checkpoint, place: Place, config: EngineConfig, ledger: Ledger
) -> tuple[ModelDefinition, Checkpoint]:
    """The definition and the checkpoint of a rank's part; the whole for a rank that is alone."""
    if config.enable_expert_parallel:
        _tell_of_experts(definition, place, ledger)
    if place.rank.is_alone:
        if config.dist_timeout != stated(EngineConfig)["dist_timeout"].default:
            ledger.degrade(
                "dist_timeout", f"{config.dist_timeout:g} changes nothing: there is one process", "leave it out"
            )
        return definition, checkpoint
    speculation = read_speculation(config.speculative_config)
    has_drafter = speculation is not None and speculation.method != NGRAM.name
    if has_drafter and place.num_replicas > 1:
        raise ConfigError(
            "expected data_parallel_size 1 with a drafter that is a network, which the first process computes for rows "
            f"of its own cache, got {place.num_replicas}; use {NGRAM.name}, or one replica"
        )
    division = place.division(joins_experts=config.enable_expert_parallel)
    if division.experts.is_alone:
        return definition, checkpoint
    part = definition.of_rank(division, whole_vocabulary=has_drafter)
    if has_drafter:
        ledger.note(
            "tensor_parallel_size",
            "every rank has the vectors and logits of all tokens, because the drafter, which the first rank computes "
            "alone, uses them",
        )
    for reason, count in Counter(part.whole).items():
        ledger.degrade(
            "tensor_parallel_size",
            f"{count} parts of layers are computed whole by every rank: {reason}",
            "use a number of ranks that divides them, or accept that they take as long as on one rank",
        )
    return part.definition, PartCheckpoint(checkpoint, part.cuts)


def _tell_of_experts(definition: ModelDefinition, place: Place, ledger: Ledger) -> None:
    """Tells if `enable_expert_parallel` changes nothing."""
    if not definition.expert_stacks:
        ledger.degrade("enable_expert_parallel", "the model has no experts", "leave it out")
    elif place.rank.is_alone:
        ledger.degrade("enable_expert_parallel", "there is one process, which has all experts", "leave it out")
    elif place.num_replicas == 1:
        ledger.note("enable_expert_parallel", "experts are divided among the processes of a replica in any case")


def agreed(config: ResolvedConfig, everyone: Collectives) -> ResolvedConfig:
    """The config with as many pages as every rank has room for. Raises if the ranks differ in anything else that the
    steps of all of them depend on."""
    if everyone.rank.is_alone:
        return config
    names = ("max_model_len", "max_rows", "max_step_tokens", "page_size", "states_per_row", "max_checkpoints")
    own = [*(int(vars(config)[name]) for name in names), len(config.graph_sizes), sum(config.graph_sizes)]
    num_pages, *least = everyone.least([config.num_pages, *own, *(-each for each in own)])
    most = [-each for each in least[len(own) :]]
    different = [
        f"{name} between {low} and {high}"
        for name, low, high in zip((*names, "graph_sizes", "graph_sizes"), least, most, strict=False)
        if low != high
    ]
    if different:
        raise ConfigError(
            f"expected ranks with the same limits, got {', '.join(different)}; set them, or give every rank as much "
            "free memory"
        )
    return replace(config, num_pages=num_pages)
