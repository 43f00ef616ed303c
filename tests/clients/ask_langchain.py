"""LangChain's ChatOpenAI."""

import os

from langchain_openai import ChatOpenAI

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
