"""A server with the default model, as people start it."""

from __future__ import annotations

import json

from support.serving import ServedProcess


def test_answers_a_conversation(server: ServedProcess) -> None:
    status, body, headers = server.post(
        "/v1/chat/completions",
        # Sampled, an answer may end sooner.
        {"messages": [{"role": "user", "content": "What is 2 + 2?"}], "max_tokens": 8, "temperature": 0},
    )
    answer = json.loads(body)
    assert status == 200
    assert answer["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] == 8
    assert "x-sightline-unused" not in headers
