"""OpenAI's client for Python, as its documentation uses it."""

import os

from openai import BadRequestError, NotFoundError, OpenAI

MODEL = os.environ["MODEL"]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]

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

for error, fields in ((NotFoundError, {"model": "no-such-model"}), (BadRequestError, {"temperature": -1})):
    try:
        client.chat.completions.create(**{"model": MODEL, "messages": QUESTION, **fields})
    except error as raised:
        print(f"{type(raised).__name__}: {raised.body['message']}")
    else:
        raise AssertionError(f"expected {error.__name__}")
