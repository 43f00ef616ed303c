"""OpenAI's client for Python, as its documentation uses it."""

import os

from openai import BadRequestError, NotFoundError, OpenAI, pydantic_function_tool
from openai.types.responses import ResponseFunctionToolCall
from pydantic import BaseModel, Field

MODEL = os.environ["MODEL"]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


class Capital(BaseModel):
    city: str = Field(max_length=20)
    country: str = Field(max_length=20)


class GetWeather(BaseModel):
    """The weather in a city."""

    city: str = Field(max_length=20)


client = OpenAI(max_retries=0)
assert MODEL in [model.id for model in client.models.list()]
assert client.models.retrieve(MODEL).id == MODEL

answer = client.chat.completions.create(model=MODEL, messages=QUESTION, max_completion_tokens=16, temperature=0)
assert "Paris" in answer.choices[0].message.content, answer
print(answer.choices[0].message.content)

several = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=8, n=2, temperature=1, seed=1)
assert len(several.choices) == 2

scored = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=4, logprobs=True, top_logprobs=3)
assert [len(token.top_logprobs) for token in scored.choices[0].logprobs.content] == [3] * 4

text, usage = "", None
stream = client.chat.completions.create(
    model=MODEL, messages=QUESTION, max_tokens=16, temperature=0, stream=True, stream_options={"include_usage": True}
)
for chunk in stream:
    text += "".join(choice.delta.content or "" for choice in chunk.choices)
    usage = chunk.usage or usage
assert text == answer.choices[0].message.content, text
assert usage.completion_tokens == answer.usage.completion_tokens

with client.chat.completions.stream(model=MODEL, messages=QUESTION, max_tokens=16, temperature=0) as events:
    final = events.get_final_completion()
assert final.choices[0].message.content == text

completion = client.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=4, temperature=0)
assert "Paris" in completion.choices[0].text

parsed = client.chat.completions.parse(
    model=MODEL, messages=QUESTION, max_tokens=60, temperature=0, response_format=Capital
)
assert type(parsed.choices[0].message.parsed) is Capital, parsed
print(parsed.choices[0].message.parsed)

WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
asked = {
    "model": MODEL,
    "messages": WEATHER,
    "max_tokens": 60,
    "temperature": 0,
    "tools": [pydantic_function_tool(GetWeather)],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}
called = client.chat.completions.parse(**asked).choices[0]
assert called.finish_reason == "tool_calls", called
[call] = called.message.tool_calls
assert type(call.function.parsed_arguments) is GetWeather, call
print(call.function.parsed_arguments)
with client.chat.completions.stream(**asked) as events:
    streamed = events.get_final_completion().choices[0].message
assert streamed.tool_calls[0].function.arguments == call.function.arguments, streamed
told = [{"role": "tool", "tool_call_id": call.id, "content": "18 degrees"}]
after = client.chat.completions.create(
    model=MODEL, messages=[*WEATHER, called.message, *told], max_tokens=16, temperature=0
)
assert after.choices[0].message.content, after

SHORT = {"model": MODEL, "max_output_tokens": 16, "temperature": 0}
response = client.responses.create(input="What is the capital of France?", **SHORT)
assert "Paris" in response.output_text, response
assert response.usage.output_tokens > 0
with client.responses.stream(input="What is the capital of France?", **SHORT) as events:
    kinds = [event.type for event in events]
assert kinds[0] == "response.created"
assert kinds[-1] in ("response.completed", "response.incomplete"), kinds
stored = client.responses.retrieve(response.id)
assert stored.output_text == response.output_text
going_on = client.responses.create(input="And of Italy?", previous_response_id=response.id, **SHORT)
assert going_on.usage.input_tokens > response.usage.input_tokens
client.responses.delete(response.id)
try:
    client.responses.create(input="And?", previous_response_id=response.id, **SHORT)
except NotFoundError as raised:
    print(f"{type(raised).__name__}: {raised.body['message']}")
else:
    raise AssertionError("expected NotFoundError")
LONGER = {**SHORT, "max_output_tokens": 80}
structured = client.responses.parse(input="What is the capital of France?", text_format=Capital, **LONGER)
assert type(structured.output_parsed) is Capital, structured
function = {"type": "function", "name": "GetWeather", "parameters": GetWeather.model_json_schema(), "strict": True}
function["parameters"]["additionalProperties"] = False
acting = {"tools": [function], "tool_choice": "required", "parallel_tool_calls": False, **LONGER}
calling = client.responses.create(input=WEATHER, **acting)
[item] = [each for each in calling.output if isinstance(each, ResponseFunctionToolCall)]
GetWeather.model_validate_json(item.arguments)
with client.responses.stream(input=WEATHER, **acting) as events:
    final = events.get_final_response()
assert [each.arguments for each in final.output if each.type == "function_call"] == [item.arguments]
result = {"type": "function_call_output", "call_id": item.call_id, "output": "18 degrees"}
answered = client.responses.create(input=[result], previous_response_id=calling.id, **SHORT)
assert answered.output_text, answered
replayed = client.responses.create(input=[*WEATHER, *calling.output, result], store=False, **SHORT)
assert replayed.output_text == answered.output_text

for error, fields in ((NotFoundError, {"model": "no-such-model"}), (BadRequestError, {"temperature": -1})):
    try:
        client.chat.completions.create(**{"model": MODEL, "messages": QUESTION, **fields})
    except error as raised:
        print(f"{type(raised).__name__}: {raised.body['message']}")
    else:
        raise AssertionError(f"expected {error.__name__}")
