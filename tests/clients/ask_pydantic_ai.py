"""Pydantic AI, by chat completions, by responses and by Anthropic's messages."""

import asyncio
import os

from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

MODEL, URL = os.environ["MODEL"], os.environ["BASE_URL"]
openai = OpenAIProvider(openai_client=AsyncOpenAI(max_retries=0))
MODELS = {
    "chat": OpenAIChatModel(MODEL, provider=openai),
    "responses": OpenAIResponsesModel(MODEL, provider=openai),
    "messages": AnthropicModel(MODEL, provider=AnthropicProvider(api_key="none", base_url=URL.removesuffix("/v1"))),
}
SETTINGS = {"temperature": 0, "max_tokens": 120, "parallel_tool_calls": False}


class Capital(BaseModel):
    """A capital city."""

    city: str = Field(max_length=20)
    country: str = Field(max_length=20)


async def main() -> None:
    question = "What is the capital of France?"
    for name, model in MODELS.items():
        plain = Agent(model, model_settings={**SETTINGS, "max_tokens": 16})
        answer = (await plain.run(question)).output
        assert "Paris" in answer, (name, answer)
        async with plain.run_stream(question) as run:
            assert await run.get_output() == answer
        # An output type is a tool that must be called.
        found = (await Agent(model, output_type=Capital, model_settings=SETTINGS).run(question)).output
        assert type(found) is Capital, (name, found)
        print(name, found)
        if name != "messages":
            held = Agent(model, output_type=NativeOutput(Capital), model_settings=SETTINGS)
            assert type((await held.run(question)).output) is Capital, name


asyncio.run(main())
