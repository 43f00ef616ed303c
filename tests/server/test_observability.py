"""Metrics as Prometheus wants them, and what is built on them: the documentation's table and the dashboard."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from support.serving import ServedProcess

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy/grafana/sightline.json"
UNITS = {
    "ms",
    "us",
    "ns",
    "sec",
    "s",
    "m",
    "h",
    "d",
    "kb",
    "mb",
    "gb",
    "b",
    "milliseconds",
    "minutes",
    "hours",
    "percent",
}
PANELS = {
    *("e2e_request_latency_seconds", "prompt_tokens_total", "generation_tokens_total", "inter_token_latency_seconds"),
    *("num_requests_running", "num_requests_waiting", "num_requests_paused", "time_to_first_token_seconds"),
    *("kv_cache_usage_perc", "request_prompt_tokens", "request_generation_tokens", "request_success_total"),
    *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
    *("request_max_num_generation_tokens", "prefix_cache_hits_total", "prefix_cache_queries_total"),
    *("num_preemptions_total", "iteration_tokens", "request_params_n", "request_params_max_tokens"),
    *("request_inference_time_seconds", "request_time_per_output_token_seconds"),
}
"""What other engines' dashboards show, under our names."""


@pytest.fixture(scope="module")
def exposition(server: ServedProcess) -> str:
    """The metrics of a server that has answered."""
    assert server.post("/v1/completions", {"prompt": "One two", "max_tokens": 3})[0] == 200
    return server.get("/metrics")[1].decode()


@pytest.fixture(scope="module")
def families(exposition: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(exposition)}


def series(families: dict[str, Metric]) -> dict[str, set[str]]:
    """The labels of every series, by its name."""
    return {sample.name: set(sample.labels) for family in families.values() for sample in family.samples}


def faults(family: Metric) -> Iterator[str]:
    """The rules of `promtool check metrics`."""
    words = family.name.split("_")
    if not re.fullmatch("[a-z][a-z0-9_]*", family.name):
        yield "expected lower-case letters, digits and underscores; colons are for recording rules"
    if not family.documentation:
        yield "no help text"
    if family.type == "counter" and not all(sample.name.endswith("_total") for sample in family.samples):
        yield "a counter ends in _total"
    if family.type != "counter" and family.name.endswith("_total"):
        yield "only a counter ends in _total"
    if family.type not in ("histogram", "summary") and words[-1] in ("bucket", "count", "sum"):
        yield "a suffix of histograms"
    if UNITS & set(words):
        yield "expected base units, written out"
    if {"counter", "gauge", "histogram", "summary"} & set(words):
        yield "a type in the name"


def test_metrics_follow_the_rules_of_prometheus(families: dict[str, Metric]) -> None:
    assert {name: told for name, family in families.items() if (told := list(faults(family)))} == {}


@pytest.mark.parametrize(
    ("family", "told"),
    [
        (Metric("sightline:steps", "x", "gauge"), "colons"),
        (Metric("steps", "", "gauge"), "help"),
        (Metric("steps_total", "x", "gauge"), "only a counter"),
        (Metric("latency_ms", "x", "histogram"), "base units"),
        (Metric("requests_count", "x", "gauge"), "suffix"),
        (Metric("requests_gauge", "x", "gauge"), "type in the name"),
    ],
)
def test_the_rules_find_what_breaks_them(family: Metric, told: str) -> None:
    assert any(told in fault for fault in faults(family))


def promtool(*words: str, text: str = "") -> None:
    binary = shutil.which("promtool")
    if binary is None:
        pytest.skip("no promtool on the path: it comes with Prometheus")
    done = subprocess.run([binary, *words], input=text, text=True, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_finds_no_fault_in_the_metrics(exposition: str) -> None:
    promtool("check", "metrics", text=exposition)


def test_promtool_reads_the_scrape_config() -> None:
    promtool("check", "config", str(ROOT / "deploy/prometheus.yml"))


def test_every_series_has_the_models_name(exposition: str, server: ServedProcess) -> None:
    name = json.loads(server.get("/v1/models")[1])["data"][0]["id"]
    lines = [line for line in exposition.splitlines() if not line.startswith("#")]
    assert len(lines) > 200
    assert [line for line in lines if f'model_name="{name}"' not in line] == []


def test_what_a_request_did_is_in_every_histogram_of_requests(families: dict[str, Metric]) -> None:
    counts = {
        sample.name.removeprefix("sightline_").removesuffix("_count"): sample.value
        for family in families.values()
        for sample in family.samples
        if family.type == "histogram" and sample.name.endswith("_count")
    }
    assert {name for name, count in counts.items() if not count} == set()
    assert counts["iteration_tokens"] == series_value(families, "sightline_steps_total")


def series_value(families: dict[str, Metric], name: str) -> float:
    [value] = [sample.value for family in families.values() for sample in family.samples if sample.name == name]
    return value


def test_phases_add_up(families: dict[str, Metric]) -> None:
    sums = {name: series_value(families, f"sightline_{name}_seconds_sum") for name in PHASES}
    assert sums["request_prefill_time"] > 0
    assert sums["request_decode_time"] > 0
    assert sums["request_prefill_time"] + sums["request_decode_time"] == pytest.approx(sums["request_inference_time"])
    assert sums["request_queue_time"] + sums["request_inference_time"] <= sums["e2e_request_latency"]


PHASES = (
    *("request_queue_time", "request_prefill_time", "request_decode_time", "request_inference_time"),
    "e2e_request_latency",
)


def test_the_documentation_has_every_metric_with_its_type_labels_and_meaning(families: dict[str, Metric]) -> None:
    text = (ROOT / "docs/observability.md").read_text()
    rows = re.findall(r"^\| `(sightline_\w+)` \| (\w+) \| ([^|]*)\| ([^|]+) \|$", text, re.MULTILINE)
    documented = {name: (kind, set(re.findall(r"`(\w+)`", labels)), told) for name, kind, labels, told in rows}
    real = {
        family.name + ("_total" if family.type == "counter" else ""): (
            family.type,
            {label for sample in family.samples for label in sample.labels} - {"model_name", "le"},
            family.documentation,
        )
        for family in families.values()
    }
    assert documented == real


def queries(node: Any) -> Iterator[str]:
    """Every query of the dashboard: those of panels, and those of variables."""
    match node:
        case dict():
            yield from (node[key] for key in ("expr", "definition") if key in node)
            for value in node.values():
                yield from queries(value)
        case list():
            for value in node:
                yield from queries(value)


def labels_of(query: str) -> set[str]:
    """The labels that a query selects or groups by."""
    found = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", query))
    for names in re.findall(r"\b(?:by|without)\s*\(([^)]*)\)", query) + re.findall(r"label_values\(\w+,(.*)\)", query):
        found |= {name.strip() for name in names.split(",")}
    return found


def test_every_query_of_the_dashboard_finds_its_metrics_and_labels(families: dict[str, Metric]) -> None:
    told, known = list(queries(json.loads(DASHBOARD.read_text()))), series(families)
    assert len(told) > 40
    for query in told:
        names = set(re.findall(r"sightline_\w+", query))
        assert names, query
        assert names <= known.keys(), query
        for name in names:
            assert labels_of(query) <= known[name], (query, name)


def test_the_dashboard_has_every_panel_that_people_know() -> None:
    used = {
        name for query in queries(json.loads(DASHBOARD.read_text())) for name in re.findall(r"sightline_(\w+)", query)
    }
    shown = {re.sub("_(bucket|sum|count)$", "", name) for name in used} | used
    assert shown >= PANELS


def test_panels_have_their_own_ids_and_places() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_promtool_parses_every_query(tmp_path: Path) -> None:
    rules = [
        {"record": f"r{place}", "expr": query.replace("$__rate_interval", "1m").replace("$model_name", ".*")}
        for place, query in enumerate(queries(json.loads(DASHBOARD.read_text())))
        if not query.startswith("label_values")
    ]
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", str(path))
