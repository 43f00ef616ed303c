"""Kernels beside attention over pages: where tokens read, and the cache write.

locate      once a step: for each token, its row's pages and the keys that it sees, from lengths in memory
write       the new entries of one layer
"""

from __future__ import annotations

from sightline.kernels.cpu.instructions import float_of, load, load64, store, store64

FIELDS = 8
"""Numbers that `locate` writes for a token: page-table row (or the row's first token), first key, end of the keys (-1
if it belongs to no row), address of its line of a tree or 0. For trees also: the row's context_len, the address of the
positions of its new tokens, the token's own position, and the window or 0."""


def make_locate():
    """Finds which keys each token sees. Runs in one thread.

    Arguments: query_lens, context_lens or 0, table_rows or 0, num_rows, num_tokens, window or 0, out [num_tokens,
    FIELDS] int64; kinds of the rows' masks (int64: 0 causal, 1 full, 2 tree, 3 context) or 0; for trees, the place
    of each row's first byte (int64), the bytes (1 if a query sees a new token), and the positions of all tokens.
    """

    def locate(arguments, thread, num_threads):
        query_lens, context_lens, table_rows = load64(arguments, 0), load64(arguments, 1), load64(arguments, 2)
        num_rows, num_tokens, window = load64(arguments, 3), load64(arguments, 4), load64(arguments, 5)
        out, kinds, tree_places = load64(arguments, 6), load64(arguments, 7), load64(arguments, 8)
        trees, positions = load64(arguments, 9), load64(arguments, 10)
        if thread != 0:
            return
        token = 0
        for row in range(num_rows):
            first_token, query_len = token, load64(query_lens, row)
            context_len = load64(context_lens, row) if context_lens != 0 else 0
            place = load64(table_rows, row) if table_rows != 0 else first_token
            kind = load64(kinds, row) if kinds != 0 else 0
            for query in range(query_len):
                field, position = out + 8 * token * FIELDS, context_len + query
                stop, tree = position + 1 if kind == 0 else context_len + query_len, 0
                if kind == 2:
                    position = load64(positions, token)
                    tree = trees + load64(tree_places, row) + query * query_len
                elif kind == 3:
                    stop = context_len
                elif window > 0:
                    stop = min(stop, position + window)
                store64(field, 0, place)
                store64(field, 1, max(0, position - window + 1) if window > 0 else 0)
                store64(field, 2, stop)
                store64(field, 3, tree)
                store64(field, 4, context_len)
                store64(field, 5, positions + 8 * first_token)
                store64(field, 6, position)
                store64(field, 7, window)
                token += 1
        for rest in range(token, num_tokens):
            store64(out, rest * FIELDS + 2, -1)

    return locate


def make_write(X, C):
    """Writes entries to their slots, divided by the scale if the cache is scaled.

    Arguments: x, its token stride, its head stride, num_tokens, num_heads, size, plane, its slot stride, its head
    stride, slots int64, scale.
    """

    def write(arguments, thread, num_threads):
        x, x_stride, x_head = load64(arguments, 0), load64(arguments, 1), load64(arguments, 2)
        num_tokens, num_heads, size = load64(arguments, 3), load64(arguments, 4), load64(arguments, 5)
        plane, slot_stride, plane_head = load64(arguments, 6), load64(arguments, 7), load64(arguments, 8)
        slots, scale = load64(arguments, 9), float_of(load64(arguments, 10))
        for unit in range(thread, num_tokens * num_heads, num_threads):
            token, head = unit // num_heads, unit % num_heads
            source = token * x_stride + head * x_head
            target = load64(slots, token) * slot_stride + head * plane_head
            for i in range(size):
                value = load(x, source + i, X)
                if C == 3:
                    value = value / scale
                store(plane, target + i, value, C)

    return write
