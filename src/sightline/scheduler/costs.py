"""What the rows of a step cost, counted in tokens, so that a step can be sized by time. Knows no model and no clock."""

from __future__ import annotations

import math
from typing import NamedTuple

LEAST_TOKENS = 16
"""Prompt tokens that a step takes in regardless of time, so that prompts make progress: a page on a CPU."""


class StepCosts(NamedTuple):
    """Costs relative to one token in the layers of a model, without its context and its logits."""

    logit: float
    """The logits of one token."""
    context: float
    """One token that attends to one other token, in all layers."""

    def work(self, num_tokens: int, context_len: int, num_logits: int) -> float:
        """The cost of a row's new tokens, which also attend to each other."""
        return num_tokens * (1.0 + self.context * (context_len + num_tokens / 2)) + self.logit * num_logits

    def num_tokens(self, work: float, context_len: int, *, scored: bool) -> int:
        """The most tokens of a row that cost at most `work`: each needs logits if `scored`, otherwise only one does."""
        each = 1.0 + self.context * context_len + (self.logit if scored else 0.0)
        left = max(0.0, work if scored else work - self.logit)
        return int(2.0 * left / (each + math.sqrt(each * each + 2.0 * self.context * left)))


class StepLimit(NamedTuple):
    """The work that may still be added to a step."""

    work: float
    costs: StepCosts
    least: int = LEAST_TOKENS
    """Prompt tokens that may be added whatever they cost."""

    def beside(self, num_rows: int, total_context: int) -> StepLimit:
        """Returns the limit that rows of one token each leave; they have `total_context` tokens of context together."""
        decoding = num_rows * (1.0 + self.costs.logit) + self.costs.context * total_context
        return self._replace(work=self.work - decoding)

    def take(self, count: int, context_len: int, *, scored: bool) -> tuple[int, StepLimit]:
        """Returns how many of a row's `count` prompt tokens fit, at least one, and the limit that they leave."""
        fitting = min(count, max(1, self.least, self.costs.num_tokens(self.work, context_len, scored=scored)))
        spent = self.costs.work(fitting, context_len, fitting if scored else 1)
        return fitting, self._replace(work=self.work - spent, least=max(0, self.least - fitting))

    @property
    def is_used_up(self) -> bool:
        return self.work < 1.0 and self.least == 0
