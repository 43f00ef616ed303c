"""LangChain's ChatOpenAI."""

import os

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

model = ChatOpenAI(
    model=os.environ["MODEL"],
    base_url=os.environ["BASE_URL"],
    api_key="none",
    temperature=0,
    max_tokens=16,
    max_retries=0,
    stream_usage=True,
)
answer = model.invoke("What is the capital of France?")
assert "Paris" in answer.content, answer
assert answer.usage_metadata["output_tokens"] > 0
print(answer.content)

pieces = list(model.stream("What is the capital of France?"))
assert "".join(piece.content for piece in pieces) == answer.content
assert sum(piece.usage_metadata["output_tokens"] for piece in pieces if piece.usage_metadata) > 0

answers = model.batch(["Say one.", "Say two.", "Say three."])
assert all(each.content for each in answers)

scored = model.bind(logprobs=True, top_logprobs=2).invoke("Hello")
assert len(scored.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2

stopped = model.invoke("Count: one, two, three, four", stop=["two"])
assert "two" not in stopped.content


class Capital(BaseModel):
    """A capital city."""

    city: str = Field(max_length=20)
    country: str = Field(max_length=20)


for method in ("json_schema", "function_calling"):
    structured = model.model_copy(update={"max_tokens": 80}).with_structured_output(Capital, method=method)
    found = structured.invoke("What is the capital of France?")
    assert type(found) is Capital, (method, found)
    print(method, found)


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"18 degrees in {city}"


question = HumanMessage("What is the weather in Paris?")
acting = model.model_copy(update={"max_tokens": 80}).bind_tools(
    [get_weather], tool_choice="required", strict=True, parallel_tool_calls=False
)
called = acting.invoke([question])
[call] = called.tool_calls
assert call["name"] == "get_weather", called
print(call["args"])
streamed = None
for piece in acting.stream([question]):
    streamed = piece if streamed is None else streamed + piece
assert [each["args"] for each in streamed.tool_calls] == [call["args"]], streamed
after = model.invoke([question, called, ToolMessage(get_weather.invoke(call).content, tool_call_id=call["id"])])
assert after.content

by_responses = ChatOpenAI(
    model=os.environ["MODEL"],
    base_url=os.environ["BASE_URL"],
    api_key="none",
    temperature=0,
    max_tokens=16,
    max_retries=0,
    use_responses_api=True,
)
response = by_responses.invoke("What is the capital of France?")
assert "Paris" in response.text, response
streamed_text = "".join(piece.text for piece in by_responses.stream("What is the capital of France?"))
assert streamed_text == response.text, streamed_text
