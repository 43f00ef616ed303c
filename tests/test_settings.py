"""A setting is said once: Python, the command line, HTTP and the docs have its name, bounds, default and help."""

from __future__ import annotations

import ast
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click
import msgspec
import pytest
from click.testing import CliRunner

import sightline
from sightline import LLM
from sightline.cli import app
from sightline.core.answer_format import AnswerFormat, AnswerReading
from sightline.core.command_line import flag
from sightline.core.config import EngineConfig, EngineKeywords, KeptSettings
from sightline.core.errors import ConfigError, RequestError
from sightline.core.request import EffectiveParams, SamplingParams, Terms
from sightline.core.resolution import ResolvedConfig
from sightline.core.settings import Setting, aliases_of, stated
from sightline.core.words import MEANINGS, REFUSED, UNSUPPORTED
from sightline.engine.intake import Intake
from sightline.models.loading.generation import GenerationDefaults
from sightline.server.api.schema import SAMPLED, ChatRequest, CompletionRequest
from sightline.text.tokenizers.tokenizer import Tokenizer
from support.fake_engine import VOCAB_SIZE, tokenizer_data
from support.settings_page import PAGE, settings_page

ALIASES = {name: each for name, each in aliases_of(EngineKeywords).items() if each.fields is None}
PARTS = aliases_of(EngineKeywords).keys() - ALIASES.keys()
"""Names for fields of `speculative_config`: see tests/core/test_speculation_words.py."""
PARAMETERS: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "seed": 7,
    "max_tokens": 9,
    "stop_token_ids": (3,),
    "ignore_eos": True,
    "skip_special_tokens": False,
    "detokenize": False,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {3: 1.0},
    "stop": ("x",),
    "include_stop_str_in_output": True,
    "min_tokens": 2,
    "n": 2,
    "logprobs": 3,
    "prompt_logprobs": 2,
    "truncate_prompt_tokens": 3,
    "allowed_token_ids": (3, 4),
    "bad_words": ("x",),
    "structured_outputs": {"regex": "x+"},
    "reading": AnswerReading(AnswerFormat()),
}
"""A value for each that is not its default."""
OWN_OPTIONS = {
    "generate": {"text", "as_json", "quiet", "prove"},
    "chat": {"message", "system", "url", "api_key", "quiet", "prove"},
    "embed": {"texts", "input_path", "input_format", "named_field", "output", "output_format", "truncate"}
    | {"dimensions", "quiet", "prove"},
    "serve": {"name", "prove", "host", "port", "api_key", "served_model_name", "allowed_host", "max_body_bytes"}
    | {
        "max_answer_bytes",
        "max_stored_responses",
        "max_stored_bytes",
        "max_request_cost",
        "request_timeout",
        "drain_timeout",
        "stall_timeout",
        "log_level",
    }
    | {"text_processes", "text_timeout", "allow_unknown_fields", "cors_origin", "otlp_traces_endpoint"},
}
"""Options and arguments that say what a command does, not how its engine is set."""


def sample(setting: Setting) -> Any:
    """A value that is not the default."""
    if setting.name == "speculative_config":
        return '{"method": "ngram"}'
    if setting.name == "hisparse_config":
        return '{"top_k": 4}'
    if setting.choices:
        return setting.choices[-1]
    return {bool: setting.default is not True, int: 1, float: 0.25, str: "x"}[setting.kind]


def parsed(command: str, *words: str) -> dict[str, Any]:
    """The values that a command would be given."""
    with app.commands[command].make_context(command, list(words)) as context:
        return dict(context.params)


@pytest.mark.parametrize("kind", [EngineConfig, SamplingParams])
def test_every_field_is_a_setting_with_help(kind: type) -> None:
    assert {each.name for each in fields(kind)} == stated(kind).keys()
    for setting in stated(kind).values():
        assert len(setting.help) > 10, setting.name
        assert setting.help.endswith("."), setting.name


def test_every_keyword_of_llm_is_a_setting_or_an_alias_of_one_with_its_type() -> None:
    hints = get_type_hints(EngineKeywords)
    assert hints.keys() - {"_"} == stated(EngineConfig).keys() | ALIASES.keys() | PARTS
    for name, alias in ALIASES.items():
        kinds = set(get_args(hints[name])) - {type(None)}
        assert kinds == {stated(EngineConfig)[alias.of].kind}, name


def test_no_setting_is_accepted_and_ignored() -> None:
    read = {
        node.attr
        for path in Path(str(sightline.__file__)).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    assert stated(EngineConfig).keys() <= read
    assert "no_such_setting" not in read


def test_settings_that_are_kept_are_those_of_both_configs() -> None:
    kept = {each.name for each in fields(KeptSettings)}
    assert kept == {each.name for each in fields(ResolvedConfig)} & stated(EngineConfig).keys() - {
        *("max_model_len", "page_size", "prefix_caching", "device", "dtype", "quantization"),
        *("async_scheduling", "layer_kernels"),
    }


def effective(**given: Any) -> EffectiveParams:
    intake = Intake(
        vocab_size=VOCAB_SIZE,
        max_model_len=20,
        generation=GenerationDefaults(frozenset({9})),
        tokenizer=Tokenizer.from_data(tokenizer_data()),
        seed=0,
    )
    return intake.request([1], SamplingParams(**given), "x", Terms(), 0.0)[1]


@pytest.mark.parametrize("name", stated(SamplingParams))
def test_no_sampling_parameter_is_accepted_and_ignored(name: str) -> None:
    assert effective(**{name: PARAMETERS[name]}) != effective()
    assert effective() == effective(), "nothing is left to chance"


@pytest.mark.parametrize("command", OWN_OPTIONS)
def test_every_option_is_one_of_a_setting_or_of_the_command_itself(command: str) -> None:
    names = {str(each.name) for each in app.commands[command].params}
    spellings = {each for setting in stated(EngineConfig).values() for each in setting.flags}
    settings = names - OWN_OPTIONS[command] - {each[2:].replace("-", "_") for each in spellings}
    assert OWN_OPTIONS[command] <= names
    assert settings <= stated(EngineConfig).keys() | ALIASES.keys() | PARTS | stated(SamplingParams).keys()
    for name in settings & ALIASES.keys():
        assert ALIASES[name].of in settings, name


@pytest.mark.parametrize("command", OWN_OPTIONS)
def test_options_say_what_the_settings_say(command: str) -> None:
    options = {str(each.name): each for each in app.commands[command].params if isinstance(each, click.Option)}
    sampling = stated(SamplingParams) if command in ("generate", "chat") else {}
    for name, setting in {**stated(EngineConfig), **sampling}.items():
        if name not in options or name in OWN_OPTIONS[command]:
            continue
        option = options[name]
        assert option.help is not None
        assert option.help.startswith(setting.help)
        assert option.opts[0] == flag(name)
        if name != "max_tokens":
            assert parsed(command, *(["x"] if command == "generate" else []))[name] == setting.default or (
                option.multiple and not setting.default
            )


@pytest.mark.parametrize("name", sorted(stated(EngineConfig).keys() - {"skip_tokenizer_init", "tensor_parallel_size"}))
def test_the_command_line_takes_every_setting(name: str) -> None:
    setting = stated(EngineConfig)[name]
    value = sample(setting)
    words = [flag(name)] if setting.kind is bool else [flag(name), str(value)]
    needed = {"hisparse_config": ["--enable-hisparse"], "enable_two_batch_overlap": ["--tp", "2"]}
    words += needed.get(name, [])
    found = parsed("serve", *words)
    assert found[name] == value
    own = OWN_OPTIONS["serve"]
    assert getattr(EngineConfig(**{key: each for key, each in found.items() if key not in own}), name) == value


def alias_values(name: str) -> tuple[Any, Any]:
    """A value for an alias, and the one for its setting that means the same."""
    alias = ALIASES[name]
    value = sample(stated(EngineConfig)[alias.of])
    value = True if stated(EngineConfig)[alias.of].kind is bool else value
    return value, alias.meaning(value)


@pytest.mark.parametrize("name", ALIASES)
def test_an_alias_means_its_setting_in_python_and_on_the_command_line(name: str) -> None:
    value, meaning = alias_values(name)
    target = ALIASES[name].of
    for given in ({name: value}, {name: value, target: meaning}, {name: None, target: meaning}):
        config = EngineKeywords(**given)
        assert (getattr(config, target), getattr(config, name)) == (meaning, None)
    words = [flag(name)] if value is True else [flag(name), str(value)]
    assert parsed("serve", *words)[target] == meaning
    assert name not in parsed("serve", *words)


@pytest.mark.parametrize("name", sorted(ALIASES))
def test_a_setting_and_its_alias_with_different_values_are_refused_with_both_names(name: str) -> None:
    value, meaning = alias_values(name)
    target = ALIASES[name].of
    other = not meaning if isinstance(meaning, bool) else meaning * 2
    for given in ({name: value, target: other}, {target: other, name: value}):
        with pytest.raises(ConfigError, match=f"{' or '.join(given)}, which are one setting, got .* leave one out"):
            EngineKeywords(**given)
    if isinstance(value, bool):
        words = [flag(name), flag(target, negated=not other)]
        if target == "enforce_eager" and not other:
            return
    else:
        words = [flag(name), str(value), flag(target), str(other)]
    result = CliRunner().invoke(app, ["serve", *words])
    assert result.exit_code == 2
    assert f"expected {flag(name)} or {flag(target)}, which are one setting" in " ".join(result.output.split())


def test_a_value_that_equals_nothing_does_not_disagree_with_itself() -> None:
    value = parsed("serve", "--mem-fraction-static", "nan")["memory_fraction"]
    with pytest.raises(ConfigError, match="expected memory_fraction to be a finite number, got nan"):
        EngineConfig(memory_fraction=value)


def test_two_aliases_of_one_setting_must_agree_too() -> None:
    with pytest.raises(ConfigError, match="expected enable_prefix_caching or disable_radix_cache"):
        EngineKeywords(enable_prefix_caching=True, disable_radix_cache=True)
    assert EngineKeywords(enable_prefix_caching=True, disable_radix_cache=False).prefix_caching is True


@pytest.mark.parametrize("value", ["false", "no", 0, 1])
@pytest.mark.parametrize("name", [name for name, alias in ALIASES.items() if alias.is_negated])
def test_only_a_bool_has_an_opposite(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"expected {ALIASES[name].of} to be True or False, got {value!r}"):
        EngineKeywords(**{name: value})


def test_a_template_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected no chat_template with skip_tokenizer_init"):
        EngineConfig(chat_template="template.jinja", skip_tokenizer_init=True)


@pytest.mark.parametrize("given", [{"model": 5}, {"attention_backend": 5}, {"device": 5}], ids=str)
def test_a_number_for_a_name_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"expected \w+ to be text, got 5"):
        EngineConfig(**given)


@pytest.mark.parametrize("name", ["tensor_parallel_size", "tp", "tp_size"])
def test_ranks_have_the_names_of_other_engines(name: str) -> None:
    given: dict[str, Any] = {name: 2}
    assert EngineKeywords(**given).tensor_parallel_size == 2
    assert parsed("serve", flag(name), "2")["tensor_parallel_size"] == 2


FROZEN = {"speculative_config": {"method": "frozen_kv_mtp", "model": "a/drafter"}}


@pytest.mark.parametrize("ranks", ["tensor_parallel_size", "data_parallel_size"])
@pytest.mark.parametrize("given", [{"enable_hisparse": True}, {"host_cache_gib": 1.0}, FROZEN], ids=str)
def test_what_ranks_do_not_have_is_refused_with_the_reason(given: dict[str, Any], ranks: str) -> None:
    asked: dict[str, Any] = {ranks: 2, **given}
    with pytest.raises(ConfigError, match="expected one process with"):
        EngineConfig(**asked)


@pytest.mark.parametrize("name", ["data_parallel_size", "dp", "dp_size"])
def test_replicas_have_the_names_of_other_engines(name: str) -> None:
    given: dict[str, Any] = {name: 2}
    assert EngineKeywords(**given).data_parallel_size == 2
    assert parsed("serve", flag(name), "2")["data_parallel_size"] == 2


def test_more_processes_than_one_engine_may_have_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"at most 64 processes, got tensor_parallel_size 16 × data_parallel_size 8"):
        EngineConfig(tensor_parallel_size=16, data_parallel_size=8)


def test_steps_of_replicas_are_not_cut_in_two() -> None:
    with pytest.raises(ConfigError, match="data_parallel_size 1 with enable_two_batch_overlap"):
        EngineConfig(tensor_parallel_size=2, data_parallel_size=2, enable_two_batch_overlap=True)


def test_the_share_of_a_card_has_the_names_of_both_big_engines() -> None:
    for name in ("gpu_memory_utilization", "mem_fraction_static"):
        assert parsed("serve", flag(name), "0.25")["memory_fraction"] == 0.25
        given: dict[str, Any] = {name: 0.25}
        assert EngineKeywords(**given).memory_fraction == 0.25
    with pytest.raises(ConfigError, match="gpu_memory_utilization or mem_fraction_static, which are one setting"):
        EngineKeywords(gpu_memory_utilization=0.8, mem_fraction_static=0.9)


UNKNOWN_SETTINGS = {
    "n_ctx": "n_ctx is not a setting of the engine; nearest: max_model_len",
    "max_new_tokens": "max_new_tokens is not a setting of the engine; nearest: max_tokens, which is",
    "temperature": "temperature is a sampling parameter, not a setting of the engine",
    "n_gpu_layers": "n_gpu_layers is not a setting of the engine; nearest: device",
    "mem_fraction": "mem_fraction is not a setting of the engine; nearest: memory_fraction",
    "compilation_config": "compilation_config is not supported yet: compiled models",
    "cuda_graph_max_bs": "cuda_graph_max_bs is not a setting of the engine; nearest: cuda_graph_sizes",
    "pipeline_parallel_size": "pipeline_parallel_size is not supported yet: layers on several devices",
    "trust_remote_code": "trust_remote_code is not supported: code that comes with a model is never run; leave it out",
    "cache_size": "cache_size is not a setting of the engine; nearest: cache_tokens, kv_cache_dtype",
    "max_model_lenn": "max_model_lenn is not a setting of the engine; nearest: max_model_len",
    "colour": "colour is not a setting of the engine; expected model, task, device, ",
}
UNKNOWN_PARAMETERS = {
    "max_new_tokens": "max_new_tokens is not a sampling parameter; nearest: max_tokens",
    "do_sample": "do_sample is not a sampling parameter; nearest: temperature",
    "num_beams": "num_beams is not supported yet: beam search outside LLM.beam_search",
    "guided_json": "guided_json is not a sampling parameter; nearest: structured_outputs",
    "max_model_len": "max_model_len is a setting of the engine, not a sampling parameter",
    "top_x": "top_x is not a sampling parameter; nearest: top_p, top_k",
    "repeat_penalty": "repeat_penalty is not a sampling parameter; nearest: repetition_penalty",
}


@pytest.mark.parametrize("name", UNKNOWN_SETTINGS)
@pytest.mark.parametrize("kind", [LLM, EngineConfig])
def test_an_unknown_setting_is_answered_with_its_name_and_the_nearest_in_meaning(kind: Any, name: str) -> None:
    with pytest.raises(ConfigError) as raised:
        kind(**{name: 1})
    assert str(raised.value).startswith(UNKNOWN_SETTINGS[name])


@pytest.mark.parametrize("name", UNKNOWN_PARAMETERS)
def test_an_unknown_sampling_parameter_is_answered_with_its_name_and_the_nearest_in_meaning(name: str) -> None:
    given: dict[str, Any] = {name: 1}
    with pytest.raises(RequestError) as raised:
        SamplingParams(**given)
    assert str(raised.value) == UNKNOWN_PARAMETERS[name]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("serve --n-ctx 4096", "--n-ctx is not an option of serve; nearest: --max-model-len"),
        ("serve --max-new-tokens 4", "nearest: --max-tokens, which is a sampling parameter"),
        ("serve --temperature 1", "--temperature is a sampling parameter, not an option of serve"),
        ("generate x --max-new-tokens 4", "--max-new-tokens is not an option of generate; nearest: --max-tokens"),
        ("generate x --num-beams 4", "--num-beams is not supported yet: beam search"),
        ("embed x --trust-remote-code", "--trust-remote-code is not supported: code that comes with a model"),
        ("bench latency --ctx-size 4", "--ctx-size is not an option of latency; nearest: --max-model-len"),
        ("serve --stall-seconds 4", "--stall-seconds is not an option of serve; nearest: --stall-timeout"),
        ("chat -z", "No such option"),
    ],
)
def test_an_unknown_option_is_answered_with_its_name_and_the_nearest_in_meaning(words: str, message: str) -> None:
    result = CliRunner().invoke(app, words.split())
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_words_lead_to_names_that_there_are_and_are_none_themselves() -> None:
    known = stated(EngineConfig).keys() | stated(SamplingParams).keys()
    assert set(MEANINGS.values()) <= known
    words = [*MEANINGS, *UNSUPPORTED, *REFUSED]
    assert len(words) == len(set(words))
    assert not set(words) & (known | ALIASES.keys() | PARTS)


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_http_fields_are_the_sampling_parameters_with_their_bounds_and_help(kind: type) -> None:
    # Log probabilities have another form over HTTP, text is what an answer is, and the model says how it is read.
    assert set(SAMPLED) == stated(SamplingParams).keys() - {"logprobs", "detokenize", "reading"}
    schema = msgspec.json.schema(kind)["$defs"][kind.__name__]["properties"]
    for name in SAMPLED:
        setting, described = stated(SamplingParams)[name], schema[name]
        assert described["description"] == setting.help
        assert described["default"] is None
        if setting.high is not None:
            [number] = [each for each in described["anyOf"] if each["type"] != "null"]
            assert number["type"] == {int: "integer", float: "number"}[setting.kind]
            assert number["exclusiveMinimum" if setting.excludes_low else "minimum"] == setting.low
            assert number["maximum"] == min(setting.high, 2**63 - 1)


@pytest.mark.parametrize("name", SAMPLED)
def test_a_body_takes_what_python_takes(name: str) -> None:
    body = json.dumps({"prompt": "x", name: PARAMETERS[name]})
    found = getattr(msgspec.json.decode(body, type=CompletionRequest), name)
    assert asdict(SamplingParams(**{name: found})) == asdict(SamplingParams(**{name: PARAMETERS[name]}))


def test_the_page_of_settings_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == settings_page(), (
        f"{PAGE.name} is out of date; run: PYTHONPATH=src:tests python -m support.settings_page"
    )
