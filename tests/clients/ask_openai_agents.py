"""OpenAI's agents, by responses and by chat completions."""

import asyncio
import os

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

MODEL = os.environ["MODEL"]
set_tracing_disabled(True)
calls = []


class Capital(BaseModel):
    city: str = Field(max_length=20)
    country: str = Field(max_length=20)


@function_tool(strict_mode=False)
def get_weather(city: str) -> str:
    """The weather in a city."""
    calls.append(city)
    return f"18 degrees in {city}"


async def main() -> None:
    client = AsyncOpenAI(max_retries=0)
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        model, short = kind(MODEL, client), ModelSettings(temperature=0, max_tokens=16)
        longer = ModelSettings(temperature=0, max_tokens=80, tool_choice="required", parallel_tool_calls=False)
        plain = Agent("Helper", model=model, model_settings=short, instructions="Be brief.")
        answer = await Runner.run(plain, "What is the capital of France?")
        assert answer.final_output, answer
        held = Agent(
            "Helper", model=model, model_settings=ModelSettings(temperature=0, max_tokens=80), output_type=Capital
        )
        found = await Runner.run(held, "What is the capital of France?")
        assert type(found.final_output) is Capital, found
        print(kind.__name__, found.final_output)

        acting = Agent("Helper", model=model, model_settings=longer, tools=[get_weather])
        calls.clear()
        result = await Runner.run(acting, "What is the weather in Paris?")
        assert calls, result
        assert result.final_output, result
        calls.clear()
        streaming = Runner.run_streamed(acting, "What is the weather in Paris?")
        kinds = {event.type async for event in streaming.stream_events()}
        assert calls
        assert "run_item_stream_event" in kinds, kinds
        assert streaming.final_output


asyncio.run(main())
