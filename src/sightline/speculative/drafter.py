"""What a drafter is. One guesses for one sequence, from its first step to its last."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias


class Drafter(ABC):
    """Guesses the next tokens of one sequence."""

    @abstractmethod
    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """Guesses up to `most` tokens that follow `tokens`, all that the sequence has; none if it has no guess.

        Tokens of earlier calls come again, with further ones behind them.
        """


MakeDrafter: TypeAlias = Callable[[], Drafter]
"""Makes the drafter of a sequence."""
