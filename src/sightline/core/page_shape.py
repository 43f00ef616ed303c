"""How the entries of a pool fill pages. A page covers the same tokens in every pool.

    tokens per entry   page of 4 tokens        entries of tokens 0 to 7 in pages A and B
    1                  4 places                A: 0 1 2 3     B: 4 5 6 7
    2                  2 places                A: 0 1         B: 2 3
    8                  1 place                 A: unused      B: 0

An entry is in the page of its last token. So whole pages of tokens have whole entries, and a page whose tokens complete
no entry has an unused place.
"""

from __future__ import annotations

from typing import NamedTuple

from sightline.core.errors import ConfigError


class CompressedEntries(NamedTuple):
    """What a model keeps of several tokens together."""

    tokens_per_entry: int
    elements: int
    """Elements of an entry, summed over layers."""

    def elements_per_page(self, page_size: int) -> int:
        """Elements of a page's places. Raises `ConfigError` if entries do not fit pages."""
        return self.elements * entries_per_page(page_size, self.tokens_per_entry)


def entries_per_page(page_size: int, tokens_per_entry: int) -> int:
    """The places for entries in a page of `page_size` tokens. Raises `ConfigError` if an entry does not begin or end
    where pages do."""
    if not fits(page_size, tokens_per_entry):
        raise ConfigError(
            f"expected a page size that divides, or is a multiple of, the {tokens_per_entry} tokens of an entry, got "
            f"pages of {page_size}; choose such a page size, for instance {_nearest(page_size, tokens_per_entry)}"
        )
    return max(1, page_size // tokens_per_entry)


def fits(page_size: int, tokens_per_entry: int) -> bool:
    """True if entries of so many tokens begin and end where pages of `page_size` tokens do."""
    return page_size % tokens_per_entry == 0 or tokens_per_entry % page_size == 0


def _nearest(page_size: int, tokens_per_entry: int) -> int:
    """The greatest power of 2 up to `page_size` that fits; 1 if there is none."""
    sizes = [1 << power for power in range(page_size.bit_length())]
    return max(size for size in sizes if fits(size, tokens_per_entry))
