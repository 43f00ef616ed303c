"""How orders reach the ranks: in the order in which they are sent, each once, to every rank but the first."""

from __future__ import annotations

from abc import ABC, abstractmethod


class OrderSender(ABC):
    """The end of the leading rank."""

    @abstractmethod
    def send(self, message: bytes) -> None:
        """Sends a message to every other rank. Raises `RankLostError` if one takes none."""

    @abstractmethod
    def why_lost(self) -> str:
        """What is known of a rank that is gone; empty if none is known to be."""

    @abstractmethod
    def wait_until_ready(self) -> None:
        """Waits until every other rank can take orders. Raises `RankLostError` if one never will."""

    @abstractmethod
    def begin_serving(self) -> None:
        """From now on, steps take no longer than they usually do."""

    @abstractmethod
    def close(self) -> None:
        """Waits for the other ranks, which were told to stop, and ends those that do not."""


class OrderReceiver(ABC):
    """The end of another rank."""

    @abstractmethod
    def receive(self) -> bytes:
        """Waits for the next message. Raises `RankLostError` if the leading rank is gone."""
