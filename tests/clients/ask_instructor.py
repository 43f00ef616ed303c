"""Instructor, in the modes that its documentation lists for OpenAI-compatible servers."""

import os

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field


class Capital(BaseModel):
    """A capital city."""

    city: str = Field(max_length=20)
    country: str = Field(max_length=20)


ASKED = {
    "model": os.environ["MODEL"],
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "response_model": Capital,
    "temperature": 0,
    "max_retries": 0,
}
for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(OpenAI(max_retries=0), mode=mode)
    found = client.chat.completions.create(max_tokens=80, **ASKED)
    assert isinstance(found, Capital), (mode, found)
    print(mode.value, found)

client = instructor.from_openai(OpenAI(max_retries=0), mode=instructor.Mode.JSON_SCHEMA)
partial = [*client.chat.completions.create_partial(max_tokens=80, **ASKED)]
assert len(partial) > 1
assert partial[-1].city == found.city, partial
