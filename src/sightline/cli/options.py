"""Options that commands share, and how their values are read. Imports nothing heavy, and does nothing but parse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import reduce, wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import click
from click.core import ParameterSource

from sightline.core.command_line import flag
from sightline.core.config import EngineConfig, EngineKeywords
from sightline.core.errors import ConfigError
from sightline.core.request import SamplingParams
from sightline.core.settings import Alias, Setting, aliases_of, stated, with_fields

_CommandT = TypeVar("_CommandT", bound=Callable[..., None])
_SUFFIXES = {"k": 1024, "m": 1024**2}


def parse_count(text: str) -> int:
    """A whole number; `32k` is 32 × 1024."""
    digits, factor = text.strip().lower(), 1
    if digits[-1:] in _SUFFIXES:
        digits, factor = digits[:-1], _SUFFIXES[digits[-1]]
    if not digits.isdecimal():
        raise click.BadParameter(f"expected a whole number such as 4096 or 4k, got {text!r}")
    return int(digits) * factor


def parse_counts(text: str) -> list[int]:
    """Whole numbers of at least 1, separated by commas."""
    return [parse_positive_count(part) for part in text.split(",")]


def parse_target(text: str) -> Path:
    """A file that can be written when the work is done: no measurement is lost for want of a folder."""
    path = Path(text)
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise click.BadParameter(f"expected a file in a folder that exists, got {text!r}; make the folder first")
    return path


def counts_option(name: str, *, help: str, default: str) -> Callable[[_CommandT], _CommandT]:
    """An option whose value is a list of counts."""
    return click.option(name, type=parse_counts, metavar="NUMBERS", default=default, show_default=True, help=help)


def parse_positive_count(text: str) -> int:
    """A whole number of at least 1."""
    count = parse_count(text)
    if count < 1:
        raise click.BadParameter(f"expected a whole number of at least 1, got {text!r}")
    return count


def count_option(
    *names: str, help: str, default: int | None = None, parse: Callable[[str], int] = parse_count
) -> Callable[[_CommandT], _CommandT]:
    """An option whose value is a count."""
    shown = None if default is None else str(default)
    return click.option(
        *names, type=parse, metavar="NUMBER", default=shown, show_default=default is not None, help=help
    )


def measure_option(name: str, *, help: str, default: int) -> Callable[[_CommandT], _CommandT]:
    """An option of a measurement, of which nothing is no measurement."""
    return count_option(name, help=help, default=default, parse=parse_positive_count)


def collected(name: str, **options: Callable[[_CommandT], _CommandT]) -> Callable[[_CommandT], _CommandT]:
    """Options that a command takes together, as one dictionary under `name`."""

    def decorate(command: _CommandT) -> _CommandT:
        @wraps(command)
        def collecting(**given: object) -> None:
            values = {option: given.pop(option) for option in options}
            command(**given, **{name: values})

        return reduce(
            lambda decorated, option: option(decorated), reversed(options.values()), cast("_CommandT", collecting)
        )

    return decorate


def option_of(
    owner: type, name: str, *, default: object = None, repeats: type | None = None, note: str = ""
) -> Callable[[_CommandT], _CommandT]:
    """The option of a setting of `owner`, and a hidden one for each alias; those that are given must agree.

    `default` replaces the setting's own. An option that `repeats` takes one value of that type at a time. `note` is
    added to the help.
    """
    setting = stated(owner)[name]
    aliases = {other: alias for other, alias in aliases_of(owner).items() if alias.of == name}
    usual = setting.default if default is None else default
    is_pair = setting.kind is bool and usual is not False
    shape = _shape(setting) if repeats is None else {"type": repeats, "multiple": True}
    also = f" Also {', '.join(map(flag, aliases))}." if aliases else ""
    options = [
        click.option(
            f"{flag(name)}/{flag(name, negated=True)}" if is_pair else flag(name),
            *setting.flags,
            name,
            default=str(usual) if setting.kind is int and usual is not None else usual,
            show_default=bool(usual),
            help=setting.help + also + (" May be repeated." if repeats else "") + note,
            callback=_agreeing(name, Alias(name)),
            **shape,
        )
    ]
    for other, alias in aliases.items():
        agreeing = _agreeing(name, alias) if alias.fields is None else _adding(name, alias.fields)
        form = shape if alias.fields is None else _shape(Setting("", low=0, kind=alias.kind))
        options.append(
            click.option(flag(other), other, default=None, hidden=True, expose_value=False, callback=agreeing, **form)
        )
    return lambda command: reduce(lambda decorated, option: option(decorated), reversed(options), command)


def _shape(setting: Setting) -> dict[str, Any]:
    """How click reads a value of the setting."""
    if setting.kind is bool:
        return {"is_flag": True}
    if setting.choices:
        return {"metavar": f"[{'|'.join(setting.choices)}]"}
    counts = setting.low is not None and setting.low >= 0
    number = {int: parse_count if counts else int, float: float}.get(setting.kind)
    return {} if number is None else {"type": number, "metavar": "NUMBER"}


def options_given(context: click.Context, name: str) -> dict[str, object]:
    """The options on the command line that gave a setting its value, aliases included, and what each means."""
    given: dict[str, object] = context.meta.setdefault(f"sightline.{name}", {})
    return given


def _agreeing(name: str, alias: Alias) -> Callable[[click.Context, click.Parameter, object], object]:
    """A callback that gives a setting its value, whichever of its options it came by."""

    def agree(context: click.Context, option: click.Parameter, value: object) -> object:
        said = options_given(context, name)
        if context.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE:
            said[option.opts[0]] = alias.meaning(value)
        parts = _parts_given(context, name)
        if parts:
            return with_fields(flag(name), value, parts, click.UsageError)
        first, *others = said.values() or [value]
        if any(other != first for other in others):
            raise click.UsageError(
                f"expected {' or '.join(said)}, which are one setting, got {' and '.join(map(str, said.values()))}; "
                "leave one out"
            )
        return first

    return agree


def _parts_given(context: click.Context, name: str) -> dict[str, Mapping[str, object]]:
    """The fields of a setting that options of their own gave, by option."""
    given: dict[str, Mapping[str, object]] = context.meta.setdefault(f"sightline.{name}.fields", {})
    return given


def _adding(
    name: str, fields: Callable[[Any], Mapping[str, object]]
) -> Callable[[click.Context, click.Parameter, object], None]:
    """A callback that gives a setting some of its fields. The setting's own option may have been read before."""

    def add(context: click.Context, option: click.Parameter, value: object) -> None:
        if context.get_parameter_source(str(option.name)) is not ParameterSource.COMMANDLINE:
            return
        try:
            part = fields(value)
        except ConfigError as error:
            raise click.UsageError(str(error)) from None
        options_given(context, name)[option.opts[0]] = part
        _parts_given(context, name)[option.opts[0]] = part
        if name in context.params:
            given = _parts_given(context, name)
            context.params[name] = with_fields(flag(name), context.params[name], given, click.UsageError)

    return add


def _without(*names: str) -> dict[str, Callable[[_CommandT], _CommandT]]:
    return {name: option for name, option in computing_options.items() if name not in names}


computing_options = {name: option_of(EngineKeywords, name) for name in stated(EngineConfig)}
"""Every setting of an engine."""
_ALONE = ("task", "max_queued_requests", "skip_tokenizer_init")
"""Settings that a command decides which runs its own requests."""
_GENERATING = [name for name, each in stated(EngineConfig).items() if each.only_generates]
serving_options = collected("settings", **_without("skip_tokenizer_init"))
engine_options = collected("settings", **_without(*_ALONE, "seed"))
measured_engine_options = collected("settings", **_without(*_ALONE, "seed", "prefix_caching", "host_cache_gib"))
"""The settings for measurements that repeat their prompts: the cache keeps nothing between rounds."""
conversing_engine_options = collected("settings", **_without(*_ALONE, "seed", "prefix_caching"))
"""The settings for measurements of what the cache keeps between requests."""
embedding_options = collected("settings", **_without(*_ALONE, *_GENERATING, "decode_attention_backend"))
prove_option = click.option(
    "--prove",
    is_flag=True,
    help="Prove attention for exactly this engine first, unless that is done, and begin only if it passes.",
)
_REPORTED = ("n", "logprobs", "prompt_logprobs")
_NOT_OPTIONS = ("logit_bias", "allowed_token_ids", "detokenize", "structured_outputs", "reading")
"""Sampling parameters that have no form on a command line, or no use where text is printed."""
_REPEATED = {"stop": str, "stop_token_ids": int, "bad_words": str}
sampling_options = collected(
    "sampling",
    **{
        name: option_of(
            SamplingParams, name, default=128 if name == "max_tokens" else None, repeats=_REPEATED.get(name)
        )
        for name in stated(SamplingParams)
        if name not in (*_REPORTED, *_NOT_OPTIONS)
    },
)
report_options = collected(
    "reported", **{name: option_of(SamplingParams, name, note=" Needs --json.") for name in _REPORTED}
)
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
quiet_option = click.option("--quiet", "-q", is_flag=True, help="Say nothing on standard error but errors.")


def with_model(config: EngineConfig, name: str | None) -> EngineConfig:
    """The config with the model that a command's argument names. Raises if an option names another one."""
    if name is None:
        return config
    if config.model not in (None, name):
        raise click.UsageError(f"expected one model, got {name} and --model {config.model}; leave one out")
    return replace(config, model=name)
