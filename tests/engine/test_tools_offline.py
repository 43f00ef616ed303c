"""`LLM.chat` with tools: calls beside the text, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sightline import LLM, SamplingParams
from sightline.core.conversation import collected
from sightline.core.errors import RequestError
from sightline.core.structured import StructuredOutputs
from support.tool_model import save_tool_model

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_days",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"days": {"type": "integer", "minimum": 0, "maximum": 9}},
                "required": ["days"],
                "additionalProperties": False,
            },
        },
    }
]
YES_OR_NO = StructuredOutputs(choice=("yes", "no"))
ASKED: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = str(save_tool_model(tmp_path_factory.mktemp("tools")))
    # A random model would never close its reasoning.
    return LLM(folder, cache_tokens=4096, max_model_len=512, reasoning_parser="none")


def _leaning(llm: LLM, **more: Any) -> SamplingParams:
    """Parameters that lead to one call, where a grammar lets it be."""
    tokenizer = llm.get_tokenizer()
    [begins] = tokenizer.encode_text("<tool_call>")
    bias = dict.fromkeys(tokenizer.eos_ids, 100.0) | {begins: 90.0}
    return SamplingParams(max_tokens=400, logit_bias=bias, structured_outputs=YES_OR_NO, **more)


def test_calls_satisfy_their_schema_and_stand_beside_the_text(llm: LLM) -> None:
    [output] = llm.chat(ASKED, _leaning(llm), tools=TOOLS, use_tqdm=False)
    [answer] = output.outputs
    assert (answer.finish_reason, answer.text, answer.reasoning) == ("tool_calls", "", None)
    [call] = answer.tool_calls
    assert call.name == "get_days"
    assert json.loads(call.arguments).keys() == {"days"}
    # Without tools, the rule alone holds.
    [plain] = llm.chat(ASKED, _leaning(llm), use_tqdm=False)
    assert plain.outputs[0].text in ("yes", "no")


def test_a_stream_tells_the_same(llm: LLM) -> None:
    params = _leaning(llm, temperature=1.0, seed=4)
    [output] = llm.chat(ASKED, params, tools=TOOLS, use_tqdm=False)
    deltas = list(llm.stream_chat(ASKED, params, tools=TOOLS))
    said, [whole] = collected([event for delta in deltas for event in delta.events]), output.outputs
    assert "".join(delta.text for delta in deltas) == whole.text == (said.content or "")
    assert said.reasoning == whole.reasoning
    assert [call.arguments for call in said.calls] == [call.arguments for call in whole.tool_calls] != []


def test_tools_without_a_name_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="its name"):
        llm.chat(ASKED, tools=[{"type": "function", "function": {}}], use_tqdm=False)
