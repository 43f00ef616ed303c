"""Fields of bodies that the types in `schema` do not have: what they are, and what becomes of each.

No field is ignored silently. A field that OpenAI documents and that means nothing here is accepted and named in a
header and in the log. A field of OpenAI's, vLLM's or SGLang's API that would change the answer is refused by name,
unless its value asks for nothing. Any other field is refused with the nearest known name, or accepted and named like
the first kind if the server allows it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from sightline.core.request import SamplingParams
from sightline.core.settings import stated
from sightline.core.words import MEANINGS, answer_unknown
from sightline.server.http.errors import ApiError, invalid
from sightline.server.http.limits import StrayField

UNSUPPORTED_FIELD, UNKNOWN_FIELD = "unsupported_field", "unknown_field"
"""Codes of the errors."""
MAX_NAMED_FIELDS = 64
_NOTHING: tuple[object, ...] = (None, False, "", [], {})
"""Values that ask for nothing, whatever the field is."""
_UNSENT: tuple[object, ...] = (None,)

WITHOUT_EFFECT: Mapping[str, str] = MappingProxyType(
    {
        name: reason
        for reason, names in {
            "only responses are stored": "store metadata",
            "all requests are served alike": "service_tier",
            "callers are told apart by their keys": "user safety_identifier",
            "prefixes are cached for each key, however they are named": "prompt_cache_key prompt_cache_retention "
            "messages[].cache_control messages[].content[].cache_control prompt_cache_options cache_control "
            "system[].cache_control tools[].cache_control messages[].content[].content[].cache_control",
            "an expected answer only saves time": "prediction",
            "the server chooses the ids of requests": "request_id rid",
            "events are not padded": "stream_options.include_obfuscation",
            "special tokens are written without spaces between them": "spaces_between_special_tokens",
            "reasoning is always told apart from the answer, and as it comes": "stream_reasoning",
            "the place of a call in an answer": "messages[].tool_calls[].index",
            "a note about an earlier answer": "messages[].annotations messages[].id "
            "messages[].provider_specific_fields messages[].content[].annotations messages[].content[].citations "
            "messages[].content[].caller input[].id input[].status input[].phase input[].content[].annotations "
            "input[].content[].logprobs messages[].parsed messages[].tool_calls[].function.parsed_arguments "
            "input[].parsed_arguments input[].content[].parsed",
            "reasoning is told as text, neither encrypted nor signed": "input[].encrypted_content "
            "messages[].content[].signature",
            "arguments are always sent as they come": "tools[].eager_input_streaming",
        }.items()
        for name in names.split()
    }
)
"""Accepted without effect: why there is none, by path."""


@dataclass(frozen=True)
class UnsupportedField:
    """A field that is not supported."""

    reason: str
    off: tuple[object, ...]
    """Values that ask for nothing: with one of them the field is accepted."""

    def is_off(self, value: object) -> bool:
        return any(type(value) is type(each) and value == each for each in self.off)


def _refused(*groups: tuple[str, str, tuple[object, ...]]) -> Mapping[str, UnsupportedField]:
    return MappingProxyType(
        {name: UnsupportedField(reason, off) for reason, names, off in groups for name in names.split()}
    )


REFUSED = _refused(
    ("a choice of how structured output works", "guided_decoding_backend guided_whitespace_pattern", _NOTHING),
    ("structural tags in structured output", "structural_tag", _NOTHING),
    ("structured output under this name; send structured_outputs", "json_schema regex ebnf grammar", _NOTHING),
    ("tools under this name; send tools", "functions messages[].function_call", _NOTHING),
    ("tools under this name; send tool_choice", "function_call", (*_NOTHING, "none", "auto")),
    ("searching the web", "web_search_options", _NOTHING),
    ("reasoning as a part of the answer's text", "separate_reasoning", (None, True)),
    ("beam search", "use_beam_search early_stopping", _NOTHING),
    ("beam search", "length_penalty", (None, 1, 1.0)),
    ("choosing the best of several answers; send n", "best_of", (None, 1)),
    ("text that follows the answer", "suffix", _NOTHING),
    ("a client's own logits processors", "logits_processors logit_processors custom_logit_processor", _NOTHING),
    ("a client's own logits processors", "custom_params vllm_xargs", _NOTHING),
    ("a prompt as embeddings", "prompt_embeds input_embeds", _NOTHING),
    ("a conversation as tokens; send /v1/completions a prompt", "input_ids", _NOTHING),
    ("documents in a conversation", "documents", _NOTHING),
    ("work in the background", "background", _NOTHING),
    ("a conversation that the server keeps; send previous_response_id", "conversation", _NOTHING),
    ("cutting a conversation; shorten it", "truncation", (None, "disabled")),
    ("editing a conversation; shorten it", "context_management", _NOTHING),
    ("tools of the server's own", "max_tool_calls mcp_servers container", _NOTHING),
    ("calls by programs and in namespaces", "input[].async input[].caller input[].namespace", _NOTHING),
    ("judging a conversation", "moderation access_programs", _NOTHING),
    ("structured output under this name; send output_config.format", "output_format", _NOTHING),
    ("another place or speed of work", "inference_geo", _NOTHING),
    ("another place or speed of work", "speed", (*_NOTHING, "standard")),
    ("leaving reasoning out of an answer", "thinking.display", (None, "summarized")),
    ("a summary of reasoning", "reasoning.generate_summary", (None, "auto")),
    ("a client's own chat template; the model's is used", "chat_template", _NOTHING),
    ("images, sound and video", "mm_processor_kwargs media_io_kwargs image_data audio_data video_data", _NOTHING),
    ("images, sound and video", "audio messages[].audio max_dynamic_patch min_dynamic_patch", _NOTHING),
    ("images, sound and video", "modalities", (*_NOTHING, ["text"])),
    ("LoRA", "lora_path lora_request", _NOTHING),
    (
        "the model's internal states in an answer",
        "return_hidden_states return_routed_experts return_meta_info",
        _NOTHING,
    ),
    ("token ids in an answer; send its text to /tokenize", "return_token_ids return_tokens_as_token_ids", _NOTHING),
    ("token ids in an answer; send its text to /tokenize", "return_prompt_token_ids logprob_token_ids", _NOTHING),
    ("an answer without its text", "detokenize", (None, True)),
    ("another shape of log probabilities", "flat_logprobs", _NOTHING),
    ("details of cached tokens", "return_cached_tokens_details", _NOTHING),
    ("repeating the last message before the answer", "echo", _NOTHING),
    ("another way to encode texts than the model's own", "add_special_tokens truncation_side", _UNSENT),
    ("separate caches within a key; give each client a key", "cache_salt extra_key", _NOTHING),
    ("bypassing the prefix cache", "skip_reading_prefix_cache", _NOTHING),
    ("moving the cache between servers", "kv_transfer_params session_params", _NOTHING),
    ("moving the cache between servers", "bootstrap_host bootstrap_port bootstrap_room", _NOTHING),
    ("several engines behind one server", "data_parallel_rank routed_dp_rank disagg_prefill_dp_rank", _NOTHING),
    ("reasoning under this name; send reasoning_effort or thinking_token_budget", "thinking", _NOTHING),
    ("reasoning under this name; send reasoning_effort or thinking_token_budget", "reasoning", (None, {})),
    ("leaving reasoning out of an answer", "include_reasoning", (None, True)),
    ("a refusal beside the content; send it as content", "messages[].refusal", _NOTHING),
    ("a choice of verbosity; ask for it in the conversation", "verbosity text.verbosity", (*_NOTHING, "medium")),
    ("a pattern that ends an answer; send stop", "stop_regex", _NOTHING),
    ("stop strings in an answer under this name; send include_stop_str_in_output", "no_stop_trim", _NOTHING),
    ("detection of repetitions; send repetition_penalty", "repetition_detection", _NOTHING),
    (
        "another normalisation or activation than the model's own",
        "normalize activation use_activation activate softmax",
        _UNSENT,
    ),
    ("another pooling than the model's own", "pooling pooling_type task", _UNSENT),
    ("another type of numbers", "embed_dtype", (None, "float32")),
    ("another type of numbers", "endianness", (None, "native", "little")),
    ("cutting single documents; send truncate_prompt_tokens", "max_tokens_per_doc max_chunks_per_doc", _UNSENT),
    ("ranking by parts of documents", "rank_fields", _NOTHING),
)
"""Refused unless the value asks for nothing, by path."""
_ELSEWHERE: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(MEANINGS.values(), "a setting of the engine")
    | dict.fromkeys(stated(SamplingParams), "a field of completions")
)


def unused_fields(strays: Iterable[StrayField], *, allows_unknown: bool) -> tuple[str, ...]:
    """The paths of fields that have no effect, in order. Raises `ApiError` for the first field that is refused."""
    found: set[str] = set()
    for stray in strays:
        if stray.path in REFUSED:
            _check_off(stray)
        elif stray.path not in WITHOUT_EFFECT and not allows_unknown:
            raise _unknown(stray)
        elif len(found) < MAX_NAMED_FIELDS:
            found.add(_shown(stray.path))
    return tuple(sorted(found))


def also_unused(unused: Iterable[str], paths: Iterable[str]) -> tuple[str, ...]:
    """The result of `unused_fields`, with known fields that have no effect beside the others of the same body."""
    return tuple(sorted({*unused, *map(_shown, paths)})[:MAX_NAMED_FIELDS])


def _check_off(stray: StrayField) -> None:
    field = REFUSED[stray.path]
    # The best of as many as are returned is all of them.
    is_all = stray.path == "best_of" and stray.value == stray.owner.get("n")
    if not field.is_off(stray.value) and not is_all:
        raise invalid(f"{stray.path} is not supported yet: {field.reason}", stray.path, UNSUPPORTED_FIELD)


def _unknown(stray: StrayField) -> ApiError:
    where, dot, name = _shown(stray.path).rpartition(".")
    known = {name: what for name, what in _ELSEWHERE.items() if name not in stray.siblings}
    told = answer_unknown(name, stray.siblings, "a known field", known, lambda each: f"{where}{dot}{each}")
    return invalid(f"{told}; correct it or leave it out", _shown(stray.path), UNKNOWN_FIELD)


def _shown(path: str) -> str:
    """A field's path, restricted to characters that are safe in a header."""
    return re.sub(r"[^A-Za-z0-9_.\[\]-]", "?", path)[:64]


PLACES: Mapping[str, str] = MappingProxyType(
    {"Message": "messages[].", "TextPart": "messages[].content[].", "StreamOptions": "stream_options."}
    | {"ResponseFormat": "response_format.", "JsonSchemaFormat": "response_format.json_schema."}
    | {"MessageCall": "messages[].tool_calls[].", "CalledFunction": "messages[].tool_calls[].function."}
    | {"ToolEntry": "tools[].", "FunctionTool": "tools[].function."}
    | {"ChosenTools": "tool_choice.", "AllowedTools": "tool_choice.allowed_tools."}
    | dict.fromkeys(("MessageItem", "FunctionCallItem", "FunctionOutputItem", "ReasoningItem"), "input[].")
    | dict.fromkeys(("InputText", "OutputText", "Refusal", "ReasoningText"), "input[].content[].")
    | {"SummaryText": "input[].summary[].", "FunctionEntry": "tools[].", "TextSettings": "text."}
    | {"SchemaFormat": "text.format.", "ReasoningSettings": "reasoning.", "AllowedFunctions": "tool_choice."}
    | {"ResponsesStreamOptions": "stream_options.", "MessageTurn": "messages[].", "MessagesTool": "tools[]."}
    | dict.fromkeys(("TextBlock", "ToolUseBlock", "ToolResultBlock", "ThinkingBlock"), "messages[].content[].")
    | dict.fromkeys(("ThinkingOn", "ThinkingAdaptive", "ThinkingOff"), "thinking.")
    | {"OutputSettings": "output_config.", "MessageFormat": "output_config.format."}
    | dict.fromkeys(("AutoChoice", "AnyChoice", "NamedChoice", "NoChoice"), "tool_choice.")
)
"""Where the objects within bodies are, by the name of their type."""

WITHOUT_TYPE = frozenset({"MessageItem"})
"""Objects whose `type` may be left out."""


def described(schemas: Mapping[str, Any], bodies: Iterable[str], *, allows_unknown: bool) -> dict[str, Any]:
    """The schemas of an OpenAPI document, with the fields that are accepted without effect, and whether there may be
    others. `bodies` are the names of the types of bodies."""
    places = dict.fromkeys(bodies, "") | {name: place for name, place in PLACES.items() if name in schemas}
    found = dict(schemas)
    for name, place in places.items():
        own = {
            path.removeprefix(place): {"description": f"Accepted without effect: {reason}."}
            for path, reason in WITHOUT_EFFECT.items()
            if path.startswith(place) and "." not in path.removeprefix(place)
        }
        closed: dict[str, Any] = {} if allows_unknown else {"additionalProperties": False}
        if name in WITHOUT_TYPE:
            closed["required"] = [each for each in schemas[name]["required"] if each != "type"]
        found[name] = {**schemas[name], "properties": {**own, **schemas[name]["properties"]}, **closed}
    return found
