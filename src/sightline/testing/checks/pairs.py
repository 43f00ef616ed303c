"""Pairs: every two declared values together, and every dtype with every head geometry.

A kernel is often wrong for one dtype at one head dimension, or for one feature at one page size. Cases are the
product of dtype, head dimension and group size; what else varies is chosen so that each new case brings together
as many values as possible that have not met.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from sightline.attention.spec import Feature
from sightline.core.batch import CAUSAL, FULL
from sightline.testing.bench import SCALES, Layout, Row, Unused
from sightline.testing.checks.features import LSE, tree_row
from sightline.testing.steps import Step
from sightline.testing.trial import Check, Trial, cache_dtypes, compute_dtypes

Case: TypeAlias = Mapping[str, Any]
"""A value for each axis."""
_TRIES = 12
"""Random choices of the other axes, of which the best is taken."""


def _geometry(trial: Trial) -> dict[str, Sequence[Any]]:
    return {
        "dtype": compute_dtypes(trial.row),
        "head_dim": trial.samples.of_head_dims(trial.row),
        "group_size": trial.samples.of_group_sizes(trial.row),
    }


def _others(trial: Trial) -> dict[str, Sequence[Any]]:
    """What else varies: of what is not declared there is one value."""
    declared = trial.features

    def if_declared(feature: Feature, *values: Any) -> Sequence[Any]:
        return values if feature in declared else ()

    return {
        "cache_dtype": cache_dtypes(trial.row),
        "page_size": trial.samples.of_page_sizes(trial.row),
        "layout": tuple(Layout),
        "length": ("short", "long"),
        "kv_heads": trial.problem.kv_heads,
        "window": (None, *if_declared(Feature.WINDOW, 2, 300)),
        "softcap": (None, *if_declared(Feature.SOFTCAP, 1.5)),
        "sinks": (False, *if_declared(Feature.SINKS, True)),
        "rows": (
            "causal",
            "transient",
            *if_declared(Feature.NON_CAUSAL, "full"),
            *if_declared(Feature.TREE_MASK, "tree"),
        ),
        "needs": (frozenset[Feature](), *if_declared(Feature.LSE, LSE)),
    }


def covering_cases(geometry: Mapping[str, Sequence[Any]], others: Mapping[str, Sequence[Any]]) -> list[Case]:
    """The product of the geometry, extended by the other axes so that every pair of values meets; then what is left."""
    draw = random.Random(0)
    missing = {
        pair
        for (one, ones), (two, twos) in itertools.combinations({**geometry, **others}.items(), 2)
        for pair in itertools.product(((one, value) for value in ones), ((two, value) for value in twos))
    }
    cases: list[Case] = []

    def add(fixed: Case) -> None:
        tries = [
            {**{axis: draw.choice(values) for axis, values in {**geometry, **others}.items()}, **fixed}
            for _ in range(_TRIES)
        ]
        best = max(tries, key=lambda case: len(missing & _met(case)))
        missing.difference_update(_met(best))
        cases.append(best)

    for values in itertools.product(*geometry.values()):
        add(dict(zip(geometry, values, strict=True)))
    while missing:
        add(dict(min(missing, key=repr)))
    return cases


def _met(case: Case) -> set[tuple[Any, ...]]:
    """The pairs that a case brings together: without a cache, none but those with just that."""
    met = set(itertools.combinations(case.items(), 2))
    transient = ("rows", "transient")
    return {pair for pair in met if transient in pair} if transient in case.items() else met


def pairs(trial: Trial) -> None:
    for case in trial.share.of(trial.some(covering_cases(_geometry(trial), _others(trial)), 16)):
        _try_case(trial.in_dtype(case["dtype"], case["cache_dtype"]), case)


def _try_case(trial: Trial, case: Case) -> None:
    page_size = case["page_size"]
    spec = trial.problem.spec(case["head_dim"], case["group_size"], case["kv_heads"])
    spec = replace(spec, **{name: case[name] for name in ("window", "softcap", "sinks") if case[name]})
    setting = replace(
        trial.setting,
        page_size=page_size,
        layout=case["layout"],
        unused=Unused.NAN,
        cache_scales=SCALES,
        max_seq_len=3 * page_size + 1016,
        max_rows=4,
    )
    rows = _rows(case["rows"], page_size)
    if case["length"] == "long":
        rows[0] = _longer(rows[0])
    trial.try_step(Step(trial.bench(spec, setting=setting), rows, transient=case["rows"] == "transient"), case["needs"])


def _longer(row: Row) -> Row:
    """The row after hundreds of keys; of a step without a context, with as many new tokens."""
    if row.context_len == 0:
        return replace(row, query_len=row.query_len + 70)
    more = 900
    positions = None if row.positions is None else tuple(position + more for position in row.positions)
    return replace(row, context_len=row.context_len + more, positions=positions)


def _rows(kind: str, page_size: int) -> list[Row]:
    if kind == "transient":
        return [Row(0, 3), Row(0, 1)]
    if kind == "tree":
        return [tree_row(page_size + 1, (-1, 0, 0, 1)), Row(2, 1)]
    mask = FULL if kind == "full" else CAUSAL
    return [Row(page_size + 1, 1), Row(0, 4, mask), Row(3, 2, mask)]


CHECKS = (
    Check(
        "pairs",
        "every two declared values together, and every dtype with every head dimension and group size",
        pairs,
        (
            "features-together",
            "grouped-heads",
            "heads",
            "ways-together",
            "head-dims",
            "page-sizes",
            "cache-dtypes",
            "cache-scales",
            "cache-saturation",
            "each-key-once",
            "large-scores",
        ),
        num_shares=4,
    ),
)
