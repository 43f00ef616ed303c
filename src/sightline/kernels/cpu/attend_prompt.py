"""Attention of rows with many new tokens, whole texts or prompts behind a context, over pages or the step's own tokens.

A unit of work is a key head and some tokens of a row, with all query heads that share the key head. It goes through the
keys in blocks: a block is packed once, in fp32, and then multiplied with every tile of four queries. Softmax is online,
so that memory does not depend on lengths. Blocks begin at multiples of their size, so that a token's result does not
depend on how tokens are divided into units. Trees of tokens are left to `attend`. Arithmetic is fp32.
"""

from __future__ import annotations

from typing import Any

from sightline.kernels.cpu.attend import FIELDS
from sightline.kernels.cpu.attend_kernel import (
    ROWS_HEADER,
    STATE_EXTRA,
    AttendArguments,
    State,
    read_arguments,
    write_begin,
    write_find_rows,
    write_finish,
    write_weigh,
)
from sightline.kernels.cpu.attend_tiles import BLOCK, KEYS, AttendForm, rows_of_tile
from sightline.kernels.cpu.compiler import ENTRY, CompiledKernel, compile_kernel
from sightline.kernels.cpu.emitter import I64, Emitter, Value
from sightline.kernels.cpu.once import Once
from sightline.kernels.cpu.processor import Processor
from sightline.kernels.cpu.prompt_tiles import QUERIES, PromptTiles
from sightline.kernels.cpu.vector_unit import UNITS, VectorUnit

UNIT_QUERIES = 256
"""Queries of a unit, about: so many share a packed block."""
_ROWS_BYTES = ROWS_HEADER + 3 * 8 * BLOCK
"""The addresses of a block's keys and values. Of a block that is not seen from its first key on, they begin later."""


def tokens_of_unit(group: int) -> int:
    """The most tokens of a unit, whose queries are `group` heads each."""
    return max(1, UNIT_QUERIES // group)


def queries_of_unit(group: int) -> int:
    """The most queries of a unit: whole tiles."""
    return -(-tokens_of_unit(group) * group // QUERIES) * QUERIES


def prompt_scratch_bytes(group: int, key_dim: int, value_dim: int) -> int:
    """The memory that a thread needs: packed keys and values, scores, addresses, and queries and states of a unit."""
    floats = BLOCK * (key_dim + value_dim + QUERIES)
    floats += queries_of_unit(group) * (key_dim + value_dim + STATE_EXTRA)
    return -(-(4 * floats + _ROWS_BYTES) // 128) * 128


class _Room:
    """A thread's memory."""

    def __init__(self, emitter: Emitter, form: AttendForm, address: Value) -> None:
        self._emitter = emitter
        self._form = form
        self.keys = address
        self.values = emitter.add(self.keys, emitter.number(4 * BLOCK * form.key_dim))
        self.scores = emitter.add(self.values, emitter.number(4 * BLOCK * form.value_dim))
        self.rows = emitter.add(self.scores, emitter.number(4 * BLOCK * QUERIES))
        self._queries = emitter.add(self.rows, emitter.number(_ROWS_BYTES))
        self._states = emitter.add(self._queries, emitter.number(4 * queries_of_unit(form.group) * form.key_dim))

    def query(self, number: Value) -> Value:
        """A scaled query of the unit."""
        return self._emitter.add(self._queries, self._emitter.times(number, 4 * self._form.key_dim))

    def state(self, number: Value) -> Value:
        return self._emitter.add(self._states, self._emitter.times(number, State.num_bytes(self._form)))


@Once
def attend_prompt_kernel(form: AttendForm, processor: Processor) -> CompiledKernel:
    """The kernel for dtypes and sizes; see `AttendArguments`."""
    return compile_kernel(
        "attend_prompt", (form,), lambda module: write_attend_prompt(module, form, processor), processor
    )


def write_attend_prompt(module: Any, form: AttendForm, processor: Processor) -> None:
    """Fills an LLVM module with the kernel.

    Work is counted in pairs of a query and a key, in the order of rows, key heads and tokens. A thread has the tokens
    whose work begins in its share.
    """
    attend = _write_unit(module, form, UNITS[processor.instructions])
    emitter = Emitter(module, ENTRY, 3)
    build = emitter.build
    arguments, thread, num_threads = emitter.arguments
    given = read_arguments(emitter, arguments)
    token, done, work = (emitter.variable(I64) for _ in range(3))
    begin, end = emitter.variable(I64), emitter.variable(I64)
    zero, one = emitter.number(0), emitter.number(1)

    def count_work(first: Value, length: Value) -> None:
        """Adds up the work of some tokens."""
        with emitter.loop(first, emitter.add(first, length)) as each:
            emitter.set(work, emitter.add(emitter.get(work), _work(emitter, given, each)))

    emitter.set(token, zero)
    emitter.set(work, zero)
    with emitter.loop(0, given.num_rows) as row:
        length = emitter.load(emitter.add(given.query_lens, emitter.times(row, 8)), I64, align=8)
        count_work(emitter.get(token), length)
        emitter.set(token, emitter.add(emitter.get(token), length))
    lowest, highest = emitter.share(emitter.times(emitter.get(work), given.num_kv_heads), thread, num_threads)
    emitter.set(token, zero)
    emitter.set(done, zero)
    with emitter.loop(0, given.num_rows) as row:
        length = emitter.load(emitter.add(given.query_lens, emitter.times(row, 8)), I64, align=8)
        first = emitter.get(token)
        emitter.set(work, zero)
        count_work(first, length)
        row_work = emitter.get(work)
        with emitter.loop(0, given.num_kv_heads) as head:
            before = emitter.get(done)
            behind = emitter.add(before, row_work)
            is_own = build.icmp_signed("<", before, highest)
            is_own = build.and_(is_own, build.icmp_signed(">", behind, lowest))
            with emitter.when(is_own):
                emitter.set(begin, first)
                emitter.set(end, first)
                emitter.set(work, before)
                with emitter.loop(first, emitter.add(first, length)) as each:
                    here = emitter.get(work)
                    for place, limit in ((begin, lowest), (end, highest)):
                        is_before = build.zext(build.icmp_signed("<", here, limit), I64)
                        emitter.set(place, emitter.add(emitter.get(place), is_before))
                    emitter.set(work, emitter.add(here, _work(emitter, given, each)))
                count = build.sub(emitter.get(end), emitter.get(begin))
                num_units = emitter.divided_up(count, tokens_of_unit(form.group))
                size = emitter.divided_up(count, emitter.larger(num_units, one))
                with emitter.loop(0, num_units) as unit:
                    start = emitter.add(emitter.get(begin), emitter.times(unit, size))
                    own = emitter.smaller(size, build.sub(emitter.get(end), start))
                    emitter.call_function(attend, [arguments, thread, start, own, head])
            emitter.set(done, behind)
        emitter.set(token, emitter.add(first, length))
    emitter.finish()


def _seen(emitter: Emitter, given: AttendArguments, token: Value) -> tuple[Value, Value]:
    """The first key that a token sees, and one behind the last. Neither is less than that of the token before."""
    field = emitter.add(given.located, emitter.times(token, 8 * FIELDS))
    return emitter.load(field, I64, 8, align=8), emitter.load(field, I64, 16, align=8)


def _work(emitter: Emitter, given: AttendArguments, token: Value) -> Value:
    """The work of a token for a key head. What does not depend on the number of keys counts as a block of them."""
    start, stop = _seen(emitter, given, token)
    return emitter.add(emitter.build.sub(stop, start), emitter.number(BLOCK))


def _write_unit(module: Any, form: AttendForm, unit: VectorUnit) -> Value:
    """A function that computes a unit. Arguments: address of the arguments, thread, first token, their number, head."""
    find, begin, finish = write_find_rows(module), write_begin(module, form), write_finish(module, form)
    pack, weigh = _write_pack(module, form, unit), write_weigh(module, form)
    emitter = Emitter(module, "unit", 5, internal=True, inline=False)
    arguments, thread, first, count, kv_head = emitter.arguments
    given = read_arguments(emitter, arguments)
    room = _Room(emitter, form, emitter.add(given.scratch, emitter.times(thread, given.scratch_bytes)))
    num_queries, one = emitter.times(count, form.group), emitter.number(1)
    num_tiles = emitter.divided_up(num_queries, QUERIES)

    def owner(query: Value) -> tuple[Value, Value]:
        """The token and the head of a query. Queries that complete a tile are the last one again."""
        query, group = emitter.smaller(query, emitter.build.sub(num_queries, one)), emitter.number(form.group)
        head = emitter.add(emitter.times(kv_head, form.group), emitter.build.srem(query, group))
        return emitter.add(first, emitter.build.sdiv(query, group)), head

    with emitter.loop(0, emitter.times(num_tiles, QUERIES)) as query:
        emitter.call_function(begin, [arguments, *owner(query), one, room.query(query), room.state(query)])
    field = emitter.add(given.located, emitter.times(first, 8 * FIELDS))
    start, stop = _seen(emitter, given, first)[0], _seen(emitter, given, owner(num_queries)[0])[1]
    with emitter.loop(emitter.build.sdiv(start, emitter.number(BLOCK)), emitter.divided_up(stop, BLOCK)) as number:
        origin = emitter.times(number, BLOCK)
        low = emitter.larger(start, origin)
        high = emitter.smaller(stop, emitter.add(origin, emitter.number(BLOCK)))
        low_place, high_place = emitter.build.sub(low, origin), emitter.build.sub(high, origin)
        rows = emitter.add(room.rows, emitter.times(low_place, 8))
        emitter.call_function(find, [arguments, field, low, high, rows])
        emitter.call_function(pack, [arguments, room.keys, room.rows, low_place, high_place, kv_head])

        def seen(query: Value) -> list[Value]:
            """The keys of the block that a query sees."""
            keys = _seen(emitter, given, owner(query)[0])
            return [emitter.build.sub(emitter.smaller(emitter.larger(key, low), high), origin) for key in keys]

        with emitter.loop(0, num_tiles) as tile:
            query = emitter.times(tile, QUERIES)
            begin_key, end_key = seen(query)[0], seen(emitter.add(query, emitter.number(QUERIES - 1)))[1]
            with emitter.when(emitter.build.icmp_signed("<", begin_key, end_key)):
                tiles = PromptTiles(emitter, form, unit)
                tiles.score(room.query(query), room.keys, room.scores, begin_key, end_key)
                with emitter.loop(0, QUERIES) as i:
                    own, scores = emitter.add(query, i), emitter.add(room.scores, emitter.times(i, 4 * BLOCK))
                    emitter.call_function(
                        weigh, [given.softcap, *seen(own), begin_key, end_key, scores, room.state(own)]
                    )
                sums = room.state(query), State.num_bytes(form)
                tiles.add_values(room.scores, room.values, *sums, begin_key, end_key)
    with emitter.loop(0, num_queries) as query:
        emitter.call_function(finish, [arguments, room.state(query), one, emitter.number(0), *owner(query)])
    emitter.finish()
    return emitter.function


def _write_pack(module: Any, form: AttendForm, unit: VectorUnit) -> Value:
    """A function that packs a block of keys, and the values behind them.

    Arguments: address of the arguments, where the keys go, rows of the block, first and end of the keys in it, head.
    """
    emitter = Emitter(module, "pack", 6, internal=True, inline=False)
    build = emitter.build
    arguments, keys, rows, first, stop, head = emitter.arguments
    given = read_arguments(emitter, arguments)
    tiles, values = PromptTiles(emitter, form, unit), emitter.add(keys, emitter.number(4 * BLOCK * form.key_dim))
    key_rows, value_rows = (emitter.add(rows, emitter.number(ROWS_HEADER + place)) for place in (0, 8 * BLOCK))
    key_offset, value_offset = (emitter.times(head, each) for each in (given.key_head_bytes, given.value_head_bytes))
    # The first tile is completed with the first key, as the last one is with the last key.
    with emitter.loop(emitter.times(build.sdiv(first, emitter.number(KEYS)), KEYS), first) as index:
        for each in (key_rows, value_rows):
            row = emitter.load(emitter.add(each, emitter.times(first, 8)), I64, align=8)
            emitter.store(row, emitter.add(each, emitter.times(index, 8)), align=8)
    with emitter.loop(build.sdiv(first, emitter.number(KEYS)), emitter.divided_up(stop, KEYS)) as tile:
        place = emitter.times(tile, KEYS)
        tiles.pack_keys(rows_of_tile(emitter, key_rows, key_offset, place), keys, place)
        tiles.pack_values(rows_of_tile(emitter, value_rows, value_offset, place), values, place)
    emitter.finish()
    return emitter.function
