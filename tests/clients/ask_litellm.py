"""LiteLLM with its provider for OpenAI-compatible servers."""

import os

import litellm

MODEL = f"openai/{os.environ['MODEL']}"
SERVER = {"api_base": os.environ["BASE_URL"], "api_key": "none"}
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]

answer = litellm.completion(MODEL, QUESTION, max_tokens=16, temperature=0, **SERVER)
assert "Paris" in answer.choices[0].message.content, answer
print(answer.choices[0].message.content)

pieces = litellm.completion(
    MODEL, QUESTION, max_tokens=16, temperature=0, stream=True, stream_options={"include_usage": True}, **SERVER
)
chunks = list(pieces)
text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
assert text == answer.choices[0].message.content, text

whole = litellm.text_completion(
    model=f"text-completion-openai/{os.environ['MODEL']}",
    prompt="The capital of France is",
    max_tokens=4,
    temperature=0,
    **SERVER,
)
assert "Paris" in whole.choices[0].text, whole

long = [{"role": "user", "content": "word " * 20000}]
for error, fields in (
    (litellm.BadRequestError, {"temperature": -1}),
    (litellm.NotFoundError, {"model": "openai/no-such-model"}),
    (litellm.ContextWindowExceededError, {"messages": long}),
):
    try:
        litellm.completion(**{"model": MODEL, "messages": QUESTION, "num_retries": 0, **fields, **SERVER})
    except error as raised:
        print(f"{type(raised).__name__}: {str(raised)[:200]}")
    else:
        raise AssertionError(f"expected {error.__name__}")
