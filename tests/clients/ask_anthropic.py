"""Anthropic's client for Python, as its documentation uses it."""

import os

from anthropic import Anthropic, BadRequestError, NotFoundError
from pydantic import BaseModel

MODEL = os.environ["MODEL"]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"extra_body": {"temperature": 0}}
WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "strict": True,
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}

client = Anthropic(base_url=os.environ["BASE_URL"].removesuffix("/v1"), api_key="none", max_retries=0)

answer = client.messages.create(model=MODEL, messages=QUESTION, max_tokens=16, **GREEDY)
assert "Paris" in answer.content[0].text, answer
assert answer.stop_reason in ("end_turn", "max_tokens")
assert answer.usage.output_tokens > 0
print(answer.content[0].text)

with client.messages.stream(model=MODEL, messages=QUESTION, max_tokens=16, **GREEDY) as stream:
    kinds = [event.type for event in stream]
    final = stream.get_final_message()
assert final.content[0].text == answer.content[0].text
assert kinds[0] == "message_start"
assert kinds[-1] == "message_stop"
assert final.usage.output_tokens == answer.usage.output_tokens

counted = client.messages.count_tokens(model=MODEL, messages=QUESTION)
assert counted.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens

stopped = client.messages.create(
    model=MODEL, messages=QUESTION, max_tokens=16, **GREEDY, stop_sequences=["France"], system="Be brief."
)
assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "France"), stopped

call = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "max_tokens": 120,
    **GREEDY,
    "tools": [WEATHER],
    "tool_choice": {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True},
}
called = client.messages.create(**call)
assert called.stop_reason == "tool_use", called
[used] = [block for block in called.content if block.type == "tool_use"]
assert (used.name, set(used.input)) == ("get_weather", {"city", "unit"})
print(used.name, used.input)
with client.messages.stream(**call) as stream:
    streamed = [block for block in stream.get_final_message().content if block.type == "tool_use"]
assert streamed[0].input == used.input

result = {"type": "tool_result", "tool_use_id": used.id, "content": [{"type": "text", "text": "18 degrees, sunny"}]}
after = client.messages.create(
    **call
    | {
        "messages": [
            *call["messages"],
            {"role": "assistant", "content": called.content},
            {"role": "user", "content": [result]},
        ],
        "tool_choice": {"type": "none"},
    }
)
assert after.content[0].text, after
print(after.content[0].text)


class Capital(BaseModel):
    city: str
    country: str


parsed = client.messages.parse(model=MODEL, messages=QUESTION, max_tokens=200, **GREEDY, output_format=Capital)
assert type(parsed.parsed_output) is Capital, parsed
print(parsed.parsed_output)

for error, fields in (
    (NotFoundError, {"model": "no-such-model"}),
    (BadRequestError, {"extra_body": {"temperature": -1}}),
):
    try:
        client.messages.create(**{"model": MODEL, "messages": QUESTION, "max_tokens": 8, **fields})
    except error as raised:
        print(f"{type(raised).__name__}: {raised.body['error']['message']}")
    else:
        raise AssertionError(f"expected {error.__name__}")
