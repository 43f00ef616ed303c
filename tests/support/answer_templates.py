"""Small chat templates, one for each family's way to write calls and reasoning, and the texts that such models write.

Written for these tests: they share the formats with the vendors' templates, and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType

from sightline.core.answer_format import AnswerFormat
from sightline.core.conversation import Tool
from sightline.text.answers.formats import CALL_FORMATS, CHANNEL_FORMATS, REASONING_FORMATS

ARGUMENTS = '{"city": "K\\u00f6ln {\\"}\\\\", "days": 3, "more": {"a": [1, {"b": null}]}}'
"""Arguments with what trips a parser: escapes, and brackets in strings."""
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 4},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "more": {},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = Tool("get_weather", "The weather.", json.dumps(SCHEMA))
CLOCK = Tool("get_time")
TOOLS = (WEATHER, CLOCK)

_HEAD = """{%- if tools %}Tools: {{ tools | tojson }}
{% endif %}"""


def _turns(
    call: str,
    *,
    opening: str = "<|im_start|>assistant\n",
    ending: str = "<|im_end|>\n",
    before: str = "",
    between: str = "",
    after: str = "",
    prompt: str = "",
    reasoning: str = "",
) -> str:
    """A template whose assistant writes each call as `call` says."""
    return (
        f"{_HEAD}{{%- for message in messages %}}{{%- if message.role == 'assistant' %}}{{{{ {opening!r} }}}}"
        f"{reasoning}"
        f"{{{{ message.content or '' }}}}{{%- if message.tool_calls %}}{{{{ {before!r} }}}}"
        f"{{%- for each in message.tool_calls %}}{{%- if not loop.first %}}{{{{ {between!r} }}}}{{%- endif %}}"
        f"{{%- set f = each.function %}}{call}{{%- endfor %}}{{{{ {after!r} }}}}{{%- endif %}}{{{{ {ending!r} }}}}"
        "{%- else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif %}"
        f"{{%- endfor %}}{{%- if add_generation_prompt %}}{{{{ {opening + prompt!r} }}}}{{%- endif %}}"
    )


_THOUGHT = (
    "{%- if message.reasoning_content %}{{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{%- endif %}"
)
_JSON = "{{ '{\"name\": \"' + f.name + '\", \"KEY\": ' }}{{ f.arguments | tojson }}{{ '}' }}"
_TEXT = "{{ f.arguments }}"
"""Arguments that must be text: a template that does not write JSON itself."""

TEMPLATES: Mapping[str, str] = MappingProxyType(
    {
        "hermes": _turns(
            "{{ '\n<tool_call>\n' }}" + _JSON.replace("KEY", "arguments") + "{{ '\n</tool_call>' }}", reasoning=_THOUGHT
        ),
        "qwen3_coder": _turns(
            "{{ '\n<tool_call>\n<function=' + f.name + '>\n' }}{%- for k, v in f.arguments | items %}"
            "{{ '<parameter=' + k + '>\n' }}{{ v if v is string else v | tojson }}{{ '\n</parameter>\n' }}{%- endfor %}"
            "{{ '</function>\n</tool_call>' }}"
        ),
        "llama3_json": _turns(_JSON.replace("KEY", "parameters"), between="; "),
        "mistral": _turns("{{ '[TOOL_CALLS]' + f.name + '[ARGS]' }}{{ f.arguments | tojson }}", ending="</s>"),
        "mistral_list": _turns(
            '{{ \'{"name": "\' + f.name + \'", "arguments": \' }}{{ f.arguments | tojson }}'
            "{{ ', \"id\": \"' + each.id + '\"}' }}",
            before="[TOOL_CALLS] [",
            between=", ",
            after="]",
            ending="</s>",
        ),
        "deepseek_v3": _turns(
            "{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + f.name + '\n```json\n' + f.arguments + "
            "'\n```<｜tool▁call▁end｜>' }}",
            before="<｜tool▁calls▁begin｜>",
            between="\n",
            after="<｜tool▁calls▁end｜>",
            opening="<｜Assistant｜>",
            prompt="<think>\n",
            ending="<｜end▁of▁sentence｜>",
        ),
        "deepseek_v31": _turns(
            "{{ '<｜tool▁call▁begin｜>' + f.name + '<｜tool▁sep｜>' }}{{ f.arguments | tojson }}"
            "{{ '<｜tool▁call▁end｜>' }}",
            before="<｜tool▁calls▁begin｜>",
            after="<｜tool▁calls▁end｜>",
            opening="<｜Assistant｜>",
            prompt="</think>",
            ending="<｜end▁of▁sentence｜>",
        ),
        "kimi_k2": _turns(
            "{{ '<|tool_call_begin|>' + each.id + '<|tool_call_argument_begin|>' }}{{ f.arguments | tojson }}"
            "{{ '<|tool_call_end|>' }}",
            before="<|tool_calls_section_begin|>",
            after="<|tool_calls_section_end|>",
        ),
        "glm45": _turns(
            "{{ '\n<tool_call>' + f.name + '\n' }}{%- for k, v in f.arguments | items %}{{ '<arg_key>' + k + "
            "'</arg_key>\n<arg_value>' }}{{ v if v is string else v | tojson }}{{ '</arg_value>\n' }}{%- endfor %}"
            "{{ '</tool_call>' }}"
        ),
        "gemma4": _turns(
            "{{ '<|tool_call>call:' + f.name + '{' }}{%- for k, v in f.arguments | items %}"
            "{{ ',' if not loop.first }}{{ k + ':' }}"
            "{%- if v is string %}{{ '<|\"|>' + v + '<|\"|>' }}{%- else %}{{ v | tojson }}{%- endif %}{%- endfor %}"
            "{{ '}<tool_call|>' }}"
        ),
        "functiongemma": _turns(
            "{{ '<start_function_call>call:' + f.name + '{' }}{%- for k, v in f.arguments | items %}"
            "{{ ',' if not loop.first }}{{ k + ':' }}"
            "{%- if v is string %}{{ '<escape>' + v + '<escape>' }}{%- else %}{{ v | tojson }}{%- endif %}{%- endfor %}"
            "{{ '}<end_function_call>' }}"
        ),
        "gpt_oss": _turns(
            "{{ '<|channel|>commentary to=functions.' + f.name + ' <|constrain|>json<|message|>' }}"
            "{{ f.arguments | tojson }}{{ '<|call|>' }}",
            opening="<|start|>assistant",
            ending="",
        ),
    }
)
"""A template of each format, by the format's name."""

_A, _E = ARGUMENTS, "{}"
_BEGIN, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
ANSWERS: Mapping[str, str] = MappingProxyType(
    {
        "hermes": f'Well.\n<tool_call>\n{{"name": "get_weather", "arguments": {_A}}}\n</tool_call>\n<tool_call>\n'
        f'{{"arguments": {_E}, "name": "get_time"}}\n</tool_call>',
        "qwen3_coder": 'Well.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln {"}\\\n</parameter>\n'
        '<parameter=days>\n3\n</parameter>\n<parameter=more>\n{"a": [1, {"b": null}]}\n</parameter>\n</function>\n'
        "</tool_call>\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
        "llama3_json": f'{{"name": "get_weather", "parameters": {_A}}}; {{"name": "get_time", "parameters": {_E}}}',
        "mistral": f"Well.[TOOL_CALLS]get_weather[ARGS]{_A}[TOOL_CALLS]get_time[CALL_ID]abcdefghi[ARGS]{_E}",
        "mistral_list": f'Well.[TOOL_CALLS][{{"name": "get_weather", "arguments": {_A}}}, '
        f'{{"name": "get_time", "arguments": {_E}, "id": "abcdefghi"}}]',
        "deepseek_v3": f"Well.<｜tool▁calls▁begin｜>{_BEGIN}function{_SEP}get_weather\n```json\n{_A}\n```{_END}\n"
        f"{_BEGIN}function{_SEP}get_time\n```json\n{_E}\n```{_END}<｜tool▁calls▁end｜>",
        "deepseek_v31": f"Well.<｜tool▁calls▁begin｜>{_BEGIN}get_weather{_SEP}{_A}{_END}"
        f"{_BEGIN}get_time{_SEP}{_E}{_END}<｜tool▁calls▁end｜>",
        "kimi_k2": f"Well.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{_A}<|tool_call_end|><|tool_call_begin|>functions.get_time:1"
        f"<|tool_call_argument_begin|>{_E}<|tool_call_end|><|tool_calls_section_end|>",
        "glm45": 'Well.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Köln {"}\\</arg_value>\n'
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>more</arg_key>\n"
        '<arg_value>{"a": [1, {"b": null}]}</arg_value>\n</tool_call>\n<tool_call>get_time</tool_call>',
        "gemma4": 'Well.<|tool_call>call:get_weather{city:<|"|>Köln {"}\\<|"|>,days:3,more:{a:[1,{b:null}]}}'
        "<tool_call|>"
        "<|tool_call>call:get_time{}<tool_call|>",
        "functiongemma": 'Well.<start_function_call>call:get_weather{city:<escape>Köln {"}\\<escape>,days:3,'
        "more:{a:[1,{b:null}]}}<end_function_call><start_function_call>call:get_time{}<end_function_call>",
        "gpt_oss": "<|channel|>commentary<|message|>Well.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.get_weather <|constrain|>json<|message|>{_A}<|call|><|start|>assistant to=functions.get_time"
        f"<|channel|>commentary json<|message|>{_E}<|call|>",
    }
)
"""An answer of each format: a word, a call of `get_weather` with `ARGUMENTS`, and one of `get_time` with none."""


def format_named(name: str, reasoning: str | None = None) -> AnswerFormat:
    """A format of the table, with one of reasoning."""
    if name in CHANNEL_FORMATS:
        return AnswerFormat(channels=CHANNEL_FORMATS[name])
    return AnswerFormat(None if reasoning is None else REASONING_FORMATS[reasoning], CALL_FORMATS[name])
