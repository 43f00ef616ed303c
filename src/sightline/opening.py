"""Opens models: from settings to an engine or an embedder, with the progress of the build on a terminal.

Opens descriptions of models too, from which an engine is planned without its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from sightline.core.config import EngineConfig, Task
from sightline.core.device import Device, DeviceKind
from sightline.core.errors import ConfigError
from sightline.core.ledger import Ledger
from sightline.distributed.ranks import Place, Rank
from sightline.engine.engine import Engine
from sightline.engine.rehearsal import rehearse
from sightline.engine.text_embedder import TextEmbedder, build_embedder, embedder_config, log_ledger
from sightline.models.contract import Definition, Model
from sightline.models.described_weights import with_described_weights
from sightline.models.drafting import DraftSource
from sightline.models.loading.checkpoint import Checkpoint
from sightline.models.loading.config_only import ConfigCheckpoint
from sightline.models.loading.default_model import default_model_path
from sightline.models.loading.opening import open_checkpoint, open_description
from sightline.models.registry import define_embedder, define_model
from sightline.models.weights import WeightReader
from sightline.runner.build import Blueprint, build_runtime, draw_up, usage_of
from sightline.runner.crew import lead
from sightline.runner.demand import AttentionUsage
from sightline.runner.parts import part_of_rank
from sightline.runner.progress import BuildPhase, BuildStep, OnBuildStep, ignore
from sightline.runner.roles import ALONE_ROLE, Role
from sightline.speculative.methods import drafter_needs
from sightline.text.answers.choosing import choose_format
from sightline.text.templates.chat_template import read_template
from sightline.text.tokenizers.tokenizer import Tokenizer


def build_engine(config: EngineConfig, on_step: OnBuildStep = ignore, temperature: float = 0.0) -> Engine:
    """Opens the model and builds an engine for it, with a progress bar on a terminal.

    `on_step` is told first that weights are read: by then the model is known to be supported. `temperature` is for
    requests that name none, unless the model's own files say how to sample.
    """
    ledger = Ledger(strict=config.strict)
    return build_engine_of(config, open_named(config, ledger), ledger, on_step, temperature)


def build_engine_of(
    config: EngineConfig,
    checkpoint: Checkpoint,
    ledger: Ledger,
    on_step: OnBuildStep = ignore,
    temperature: float = 0.0,
    role: Role = ALONE_ROLE,
) -> Engine:
    """Like `build_engine`, for a checkpoint that is open. `role` is that of this process if the model is divided
    and the other processes run already; without it, this one starts them."""
    if config.num_ranks > 1 and role is ALONE_ROLE:
        role = lead(config, checkpoint.location)
    try:
        return _build(config, checkpoint, ledger, on_step, temperature, role)
    except BaseException:
        role.close()
        raise


def _build(
    config: EngineConfig,
    checkpoint: Checkpoint,
    ledger: Ledger,
    on_step: OnBuildStep,
    temperature: float,
    role: Role,
) -> Engine:
    with _shown(on_step) as show:
        needs = drafter_needs(config, checkpoint, ledger)
        runtime = build_runtime(config, checkpoint, ledger, show, needs.taps, needs.source, role)
        tokenizer = None if config.skip_tokenizer_init else checkpoint.load_tokenizer()
        if config.chat_template is not None and tokenizer is not None:
            tokenizer = tokenizer.with_template(read_template(Path(config.chat_template)))
        if tokenizer is not None:
            tokenizer = with_chosen_answers(tokenizer, config, ledger)
        log_ledger(ledger)
        engine = Engine(runtime, tokenizer, checkpoint.generation.with_temperature(temperature), ledger)
        if runtime.config.device.kind is DeviceKind.CUDA:
            rehearse(engine, show)
        role.begin_serving()
    return engine


def with_chosen_answers(tokenizer: Tokenizer, config: EngineConfig, ledger: Ledger) -> Tokenizer:
    """The tokenizer, with how its model writes reasoning and calls. Notes how that is known."""
    answers = choose_format(
        tokenizer.chat_template,
        tokenizer.response_template,
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
    )
    ledger.note("answers", str(answers))
    return tokenizer.with_answers(answers)


def open_embedder(config: EngineConfig, on_step: OnBuildStep = ignore) -> TextEmbedder:
    """Like `build_engine`, for a model that embeds."""
    if config.model is None:
        raise ConfigError("expected a model to embed with, got none: the default model only generates; name one")
    ledger = Ledger(strict=config.strict)
    checkpoint = open_named(config, ledger)
    with _shown(on_step) as show:
        return build_embedder(config, checkpoint, ledger, show)


def open_named(config: EngineConfig, ledger: Ledger) -> Checkpoint:
    """Opens the model that a config names, or the default model."""
    return open_checkpoint(default_model_path() if config.model is None else config.model, ledger)


@dataclass(frozen=True)
class ModelDescription:
    """A model that is opened to be planned for, not to be run: no weight of it is read."""

    config: EngineConfig
    """With what the model's own files say of texts' lengths."""
    checkpoint: Checkpoint
    """The part of the first rank."""
    definition: Definition
    load: Callable[[WeightReader], Model]
    """Builds the network."""
    usage: AttentionUsage
    draft: DraftSource | None

    def draw_up(self, ledger: Ledger, device: Device | None = None) -> Blueprint:
        """Decides what would run, on the config's own device or another one, which need not be here."""
        return draw_up(self.config, self.checkpoint, self.definition, self.usage, ledger, self.draft, device)


def describe_model(config: EngineConfig, ledger: Ledger) -> ModelDescription:
    """Opens the model that a config names. A config.json alone is enough: the weights are then those it describes."""
    checkpoint = open_description(default_model_path() if config.model is None else config.model, ledger)
    if Task(config.task) is Task.EMBED:
        config, _ = embedder_config(config, checkpoint, ledger)
        embedder = define_embedder(checkpoint.config, ledger)
        checkpoint = _with_weights(checkpoint, embedder, embedder.load_states, ledger)
        return ModelDescription(config, checkpoint, embedder, embedder.load_states, usage_of(embedder), None)
    definition = define_model(checkpoint.config, ledger)
    checkpoint = _with_weights(checkpoint, definition, definition.load, ledger)
    draft = drafter_needs(config, checkpoint, ledger).source
    # All ranks have as many heads, if heads are divided.
    first = Place(Rank(0, config.num_ranks), config.data_parallel_size)
    part, its_checkpoint = part_of_rank(definition, checkpoint, first, config, ledger)
    return ModelDescription(config, its_checkpoint, part, part.load, AttentionUsage.GENERATE, draft)


def _with_weights(
    checkpoint: Checkpoint, definition: Definition, load: Callable[[WeightReader], object], ledger: Ledger
) -> Checkpoint:
    """The checkpoint, with the weights that its config describes if it is nothing else."""
    if not isinstance(checkpoint, ConfigCheckpoint):
        return checkpoint
    ledger.note("weights", f"their sizes are those that {checkpoint.location.name} describes: there is no file of them")
    return with_described_weights(checkpoint, definition, load)


@contextmanager
def _shown(on_step: OnBuildStep) -> Iterator[OnBuildStep]:
    """Shows the phases of a build, a bar each, and tells `on_step` too; yields the function to tell."""
    with progress_bar(enabled=True) as bar:
        tasks = dict[BuildPhase, TaskID]()

        def show(step: BuildStep) -> None:
            if step.phase not in tasks:
                tasks[step.phase] = bar.add_task(step.title)
            bar.update(tasks[step.phase], description=step.title, completed=step.done, total=step.total)
            on_step(step)

        yield show


def progress_bar(*, enabled: bool) -> Progress:
    """A bar on a terminal's standard error; silent elsewhere."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not (enabled and console.is_terminal),
        transient=True,
    )
