"""Opens models: from settings to an engine or an embedder, with the progress of the build on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from sightline.core.config import EngineConfig
from sightline.core.device import DeviceKind
from sightline.core.errors import ConfigError
from sightline.core.ledger import Ledger
from sightline.engine.engine import Engine
from sightline.engine.rehearsal import rehearse
from sightline.engine.text_embedder import TextEmbedder, build_embedder, log_ledger
from sightline.models.loading.checkpoint import Checkpoint
from sightline.models.loading.default_model import default_model_path
from sightline.models.loading.opening import open_checkpoint
from sightline.runner.build import build_runtime
from sightline.runner.crew import lead
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
