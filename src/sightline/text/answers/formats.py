"""The formats in which families of models write reasoning and calls, as data.

A row says what a model writes; `choosing` finds the row that a model's chat template agrees with. A new family is a
new row. Names are those that users of vLLM and SGLang know from `--tool-call-parser` and `--reasoning-parser`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sightline.core.answer_format import CallFormat, CallSyntax, ChannelFormat, ReasoningFormat

_ROWS = (
    CallFormat("hermes", CallSyntax.OBJECT, open="<tool_call>\n", close="\n</tool_call>"),
    CallFormat(
        "qwen3_coder",
        CallSyntax.TAGGED,
        open="<tool_call>\n<function=",
        after_name=">\n",
        key_open="<parameter=",
        key_close=">",
        value_close="</parameter>",
        close="</function>\n</tool_call>",
    ),
    CallFormat("llama3_json", CallSyntax.OBJECT, separator="; ", arguments_key="parameters"),
    CallFormat("mistral", CallSyntax.NAMED, open="[TOOL_CALLS]", after_name="[ARGS]", id_mark="[CALL_ID]", id_length=9),
    CallFormat(
        "mistral_list",
        CallSyntax.OBJECT,
        section_open="[TOOL_CALLS] [",
        section_close="]",
        separator=", ",
        id_length=9,
    ),
    CallFormat(
        "deepseek_v3",
        CallSyntax.NAMED,
        section_open="<｜tool▁calls▁begin｜>",
        section_close="<｜tool▁calls▁end｜>",
        open="<｜tool▁call▁begin｜>",
        before_name="function<｜tool▁sep｜>",
        after_name="\n```json\n",
        close="\n```<｜tool▁call▁end｜>",
        separator="\n",
    ),
    CallFormat(
        "deepseek_v31",
        CallSyntax.NAMED,
        section_open="<｜tool▁calls▁begin｜>",
        section_close="<｜tool▁calls▁end｜>",
        open="<｜tool▁call▁begin｜>",
        after_name="<｜tool▁sep｜>",
        close="<｜tool▁call▁end｜>",
    ),
    CallFormat(
        "kimi_k2",
        CallSyntax.NAMED,
        section_open="<|tool_calls_section_begin|>",
        section_close="<|tool_calls_section_end|>",
        open="<|tool_call_begin|>",
        before_name="functions.",
        is_id=True,
        after_name="<|tool_call_argument_begin|>",
        close="<|tool_call_end|>",
    ),
    CallFormat(
        "glm45",
        CallSyntax.TAGGED,
        open="<tool_call>",
        key_open="<arg_key>",
        key_close="</arg_key>\n",
        value_open="<arg_value>",
        value_close="</arg_value>",
        close="</tool_call>",
    ),
    CallFormat(
        "gemma4",
        CallSyntax.BRACED,
        open="<|tool_call>call:",
        after_name="{",
        close="<tool_call|>",
        quote='<|"|>',
    ),
    CallFormat(
        "functiongemma",
        CallSyntax.BRACED,
        open="<start_function_call>call:",
        after_name="{",
        close="<end_function_call>",
        quote="<escape>",
    ),
)
CALL_FORMATS: Mapping[str, CallFormat] = MappingProxyType({row.name: row for row in _ROWS})
"""How calls are written, by name."""

REASONING_FORMATS: Mapping[str, ReasoningFormat] = MappingProxyType(
    {
        row.name: row
        for row in (
            ReasoningFormat("think", "<think>\n", "\n</think>\n\n"),
            ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
            ReasoningFormat("gemma4", "<|channel>thought\n", "<channel|>"),
            ReasoningFormat("kimi", "◁think▷", "◁/think▷"),
            ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>"),
        )
    }
)
"""How reasoning is set apart, by name."""

CHANNEL_FORMATS: Mapping[str, ChannelFormat] = MappingProxyType(
    {
        "gpt_oss": ChannelFormat(
            "gpt_oss",
            start="<|start|>",
            role="assistant",
            channel="<|channel|>",
            message="<|message|>",
            ends=("<|end|>", "<|call|>", "<|return|>"),
            reasoning="analysis",
            others=("commentary", "final"),
            recipient="to=",
            namespace="functions.",
            content_type="<|constrain|>",
        )
    }
)
"""Answers made of messages, by name: they are formats of calls and of reasoning in one."""

NAMES_ELSEWHERE: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("qwen", "qwen25", "qwen3"), "hermes")
    | dict.fromkeys(("qwen3_xml",), "qwen3_coder")
    | dict.fromkeys(("llama3", "llama4_json"), "llama3_json")
    | dict.fromkeys(("deepseekv3",), "deepseek_v3")
    | dict.fromkeys(("deepseekv31",), "deepseek_v31")
    | dict.fromkeys(("glm", "glm47"), "glm45")
    | dict.fromkeys(("openai", "gpt-oss", "harmony"), "gpt_oss")
)
"""Other names of formats of calls."""
REASONING_NAMES_ELSEWHERE: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(
        ("qwen3", "qwen3-thinking", "deepseek_r1", "deepseek-r1", "deepseek_v3", "deepseek-v3", "glm45", "kimi_k2"),
        "think",
    )
    | dict.fromkeys(("openai_gptoss", "gpt-oss", "openai", "harmony"), "gpt_oss")
)
"""Other names of formats of reasoning."""
