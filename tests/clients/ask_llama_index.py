"""LlamaIndex with its class for OpenAI-compatible servers."""

import os

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

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
