"""Items of /v1/responses as turns of a conversation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import msgspec
from msgspec import Struct

from sightline.core.conversation import ToolCall, Turn
from sightline.server.api.responses.body import (
    FunctionCallItem,
    FunctionOutputItem,
    InputItem,
    InputText,
    ItemReference,
    MessageItem,
    OutputText,
    ReasoningItem,
    Refusal,
)
from sightline.server.api.responses.events import response_id_of
from sightline.server.http.errors import invalid, not_stored
from sightline.server.store import StoredResponse


def with_types(raw: object) -> object:
    """A body whose items all have a `type`: those of messages and references may be left out."""
    items = raw.get("input") if isinstance(raw, dict) else None
    for item in items if isinstance(items, list) else []:
        if isinstance(item, dict) and "type" not in item:
            item["type"] = "item_reference" if "id" in item and "role" not in item else "message"
    return raw


def listed_items(given: str | list[InputItem]) -> list[InputItem]:
    return [MessageItem("user", given)] if isinstance(given, str) else given


def references(items: Sequence[InputItem]) -> Iterator[str]:
    """The ids of the responses that items refer to."""
    for item in items:
        if isinstance(item, ItemReference):
            yield response_id_of(item.id)


def resolved(items: Sequence[InputItem], recalled: Mapping[str, StoredResponse]) -> list[InputItem]:
    """The items, with those that they refer to in the place of references. Raises `ApiError` if one is not stored, or
    is referred to twice: a short body would become an endless conversation."""
    known = {name: item for response in recalled.values() for name, item in output_items(response).items()}
    found: list[InputItem] = []
    named: set[str] = set()
    for place, item in enumerate(items):
        if not isinstance(item, ItemReference):
            found.append(item)
        elif item.id not in known:
            raise not_stored(item.id, f"input[{place}].id")
        elif item.id in named:
            raise invalid(f"expected references to different items, got {item.id!r} twice", f"input[{place}].id")
        else:
            named.add(item.id)
            found.append(known[item.id])
    return found


class _Named(Struct, frozen=True):
    id: str


class _Outputs(Struct, frozen=True):
    output: list[InputItem]


class _Ids(Struct, frozen=True):
    output: list[_Named]


def output_items(response: StoredResponse) -> dict[str, InputItem]:
    """The items of a stored response, by id and in order."""
    items = msgspec.json.decode(response.body, type=_Outputs).output
    ids = msgspec.json.decode(response.body, type=_Ids).output
    return {each.id: item for each, item in zip(ids, items, strict=True)}


def earlier_items(response: StoredResponse) -> list[InputItem]:
    """All items of the conversation up to the end of a stored response."""
    return [*msgspec.json.decode(response.conversation, type=list[InputItem]), *output_items(response).values()]


def turns_of(items: Sequence[InputItem]) -> tuple[Turn, ...]:
    """The conversation of some items. Reasoning, a message and calls of one answer become one turn."""
    turns: list[Turn] = []
    names: dict[str, str] = {}
    for item in items:
        last = turns[-1] if turns and turns[-1].role == "assistant" else None
        match item:
            case MessageItem(role="assistant", content=content):
                if last is None or last.content is not None or last.calls:
                    turns.append(Turn("assistant", _text(content)))
                else:
                    turns[-1] = replace(last, content=_text(content))
            case MessageItem(role=role, content=content):
                turns.append(Turn(role, _text(content)))
            case ReasoningItem():
                turns.append(Turn("assistant", reasoning=_reasoning(item)))
            case FunctionCallItem(call_id, name, arguments):
                names[call_id] = name
                call = ToolCall(call_id, name, arguments)
                if last is None:
                    turns.append(Turn("assistant", calls=(call,)))
                else:
                    turns[-1] = replace(last, calls=(*last.calls, call))
            case FunctionOutputItem(call_id, output):
                turns.append(Turn("tool", _text(output), names.get(call_id), call_id=call_id))
            case ItemReference(id=name):
                raise not_stored(name, "input")
    return tuple(turns)


def _text(content: str | Sequence[InputText | OutputText | Refusal]) -> str | tuple[str, ...]:
    if isinstance(content, str):
        return content
    texts = tuple(part.refusal if isinstance(part, Refusal) else part.text for part in content)
    return texts[0] if len(texts) == 1 else texts


def _reasoning(item: ReasoningItem) -> str | None:
    parts = item.content or item.summary or []
    return "\n".join(part.text for part in parts) or None
