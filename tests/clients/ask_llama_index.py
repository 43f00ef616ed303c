"""LlamaIndex with its class for OpenAI-compatible servers."""

import os

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

SERVER = {
    "model": os.environ["MODEL"],
    "api_base": os.environ["BASE_URL"],
    "api_key": "none",
    "temperature": 0,
    "max_tokens": 16,
    "max_retries": 0,
    "context_window": 2048,
}
chat = OpenAILike(is_chat_model=True, **SERVER)
question = [ChatMessage(role="user", content="What is the capital of France?")]
answer = chat.chat(question)
assert "Paris" in answer.message.content, answer
print(answer.message.content)
assert [*chat.stream_chat(question)][-1].message.content == answer.message.content

completing = OpenAILike(is_chat_model=False, **SERVER)
completion = completing.complete("The capital of France is")
assert "Paris" in completion.text, completion
assert [*completing.stream_complete("The capital of France is")][-1].text == completion.text


class Capital(BaseModel):
    """A capital city."""

    city: str = Field(max_length=20)
    country: str = Field(max_length=20)


def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"18 degrees in {city}"


acting = OpenAILike(is_chat_model=True, is_function_calling_model=True, **{**SERVER, "max_tokens": 80})
weather = FunctionTool.from_defaults(get_weather)
called = acting.chat_with_tools(
    [weather], "What is the weather in Paris?", tool_required=True, allow_parallel_tool_calls=False
)
[call] = acting.get_tool_calls_from_response(called)
assert call.tool_name == "get_weather", called
print(call.tool_kwargs)
structured = OpenAILike(
    is_chat_model=True, should_use_structured_outputs=True, **{**SERVER, "max_tokens": 80}
).as_structured_llm(Capital)
found = structured.chat(question).raw
assert type(found) is Capital, found
print(found)
