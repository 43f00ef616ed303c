"""What an answer must be, from the fields of a body that say it: one of several names of one thing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sightline.core.structured import OutputKind
from sightline.server.api.schema import GenerationFields, JsonSchemaFormat, ResponseFormat
from sightline.server.http.errors import invalid


def structured_outputs(request: GenerationFields) -> Mapping[str, Any]:
    """The sampling parameter `structured_outputs`, by its name; empty if answers may be any text.

    Raises `ApiError` if more than one field says what an answer must be.
    """
    guided: dict[str, object] = {
        f"guided_{kind}": value
        for kind, value in {
            OutputKind.JSON: request.guided_json,
            OutputKind.JSON_OBJECT: request.guided_json_object or None,
            OutputKind.REGEX: request.guided_regex,
            OutputKind.CHOICE: request.guided_choice,
            OutputKind.GRAMMAR: request.guided_grammar,
        }.items()
    }
    said: dict[str, Mapping[str, object] | None] = {
        "structured_outputs": request.structured_outputs,
        "response_format": None if request.response_format is None else _of_format(request.response_format),
        **{name: None if value is None else {name.removeprefix("guided_"): value} for name, value in guided.items()},
    }
    given = {name: value for name, value in said.items() if value is not None}
    if len(given) > 1:
        raise invalid(f"expected one of {', '.join(given)}, got {len(given)}; leave the others out", next(iter(given)))
    return dict.fromkeys(["structured_outputs"] if given else [], next(iter(given.values()), None))


def _of_format(wanted: ResponseFormat) -> Mapping[str, object] | None:
    match wanted.type, wanted.json_schema:
        case "text", None:
            return None
        case "json_object", None:
            return {OutputKind.JSON_OBJECT: True}
        case "json_schema", JsonSchemaFormat(schema=schema):
            return {OutputKind.JSON: schema}
    said = "without" if wanted.json_schema is None else "with"
    raise invalid(
        f'expected response_format.json_schema with the type "json_schema" alone, got "{wanted.type}" {said} it',
        "response_format.json_schema",
    )
