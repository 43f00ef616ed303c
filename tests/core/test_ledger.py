"""Every degradation is one entry, and under strict none passes; a note always does."""

from __future__ import annotations

import pytest

from sightline.core.errors import ConfigError
from sightline.core.ledger import Degradation, Ledger, Note

ENTRY = ("max_model_len", "lowered to 10", "raise cache_tokens")


def test_entries_keep_the_order_in_which_they_were_recorded() -> None:
    ledger = Ledger()
    ledger.degrade(*ENTRY)
    ledger.degrade("dtype", "float32 in place of bfloat16", "use a GPU")
    assert list(ledger) == [Degradation(*ENTRY), Degradation("dtype", "float32 in place of bfloat16", "use a GPU")]


def test_the_same_entry_stands_once_and_a_different_one_beside_it() -> None:
    ledger = Ledger()
    for remedy in ("raise cache_tokens", "raise cache_tokens", "raise memory_fraction"):
        ledger.degrade("max_model_len", "lowered to 10", remedy)
    assert [entry.remedy for entry in ledger.degradations] == ["raise cache_tokens", "raise memory_fraction"]


def test_an_entry_reads_as_subject_outcome_and_remedy() -> None:
    assert str(Degradation(*ENTRY)) == "max_model_len: lowered to 10 (raise cache_tokens)"


def test_strict_raises_with_the_whole_entry_and_keeps_nothing() -> None:
    ledger = Ledger(strict=True)
    with pytest.raises(ConfigError, match=r"refused under --strict: max_model_len: lowered to 10 \(raise cache"):
        ledger.degrade(*ENTRY)
    assert list(ledger) == []


def test_a_note_is_told_apart_from_a_degradation_and_strict_accepts_it() -> None:
    ledger = Ledger(strict=True)
    for _ in range(2):
        ledger.note("config field max_window_layers", "has no effect")
    assert list(ledger) == [Note("config field max_window_layers", "has no effect")]
    assert (ledger.degradations, str(ledger.notes[0])) == ((), "config field max_window_layers: has no effect")
    mixed = Ledger()
    mixed.note("a", "b")
    mixed.degrade(*ENTRY)
    assert (len(mixed.degradations), len(mixed.notes), len(list(mixed))) == (1, 1, 2)


def test_a_new_ledger_is_empty() -> None:
    assert list(Ledger()) == []
