"""Which problem stands for which kind of attention. The only place that knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sightline.attention.spec import SpecKind
from sightline.testing.conformance.latent_problem import LatentProblem
from sightline.testing.conformance.problem import Problem
from sightline.testing.conformance.softmax_problem import SoftmaxProblem

PROBLEMS: Mapping[SpecKind, Problem[Any, Any]] = {
    problem.kind: problem for problem in (SoftmaxProblem(), LatentProblem())
}
