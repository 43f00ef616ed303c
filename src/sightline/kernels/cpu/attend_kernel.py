"""Attention over pages in place, and the merge of its parts.

    attend   a unit is (token, split of the keys). For each block of keys: rows ─▶ scores ─▶ weights ─▶ sums of values,
             all heads of a block at a time, because their keys and values are side by side in memory
    merge    the splits of each (token, query head)

Units are dealt out to the threads. What is launched depends on numbers of tokens and heads only, so a recorded program
serves any lengths. A token that belongs to no row is skipped, and its output left as it is. Arithmetic is fp32.

A state holds, for each head, what is known after some keys: the sum of weighted values, the largest score, and the sum
of weights relative to it. The states of all heads of a unit are side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from sightline.kernels.cpu.attend import FIELDS
from sightline.kernels.cpu.attend_tiles import BLOCK, KEYS, AttendForm, HeadRows, TileWriter, pieces
from sightline.kernels.cpu.compiler import ENTRY, CompiledKernel, compile_kernel
from sightline.kernels.cpu.elementary import larger, largest, multiply_add, power_of_two, tanh, total
from sightline.kernels.cpu.emitter import F32, I8, I32, I64, Emitter, Value, vector
from sightline.kernels.cpu.floats import load_floats, store_floats
from sightline.kernels.cpu.once import Once
from sightline.kernels.cpu.processor import Processor
from sightline.kernels.cpu.vector_unit import UNITS, VectorUnit

MIN_SPLIT = 64
"""Fewest keys of a split: fewer are not worth a merge."""
STATE_EXTRA = 2
"""Numbers of a head's state beside the sums: the largest score and the sum of weights."""
NOTHING = float("-inf")
LOG2_E = 1.4426950408889634
"""Scores are computed in units of ln 2, so that weights are powers of 2."""
STRETCH_BYTES = 12 << 10
"""Keys or values that are read head by head. More save loads and stores of sums, fewer are read from one end of memory
to the other."""
AHEAD_BYTES = 12 << 10
"""How far ahead keys and values are brought into the second cache: far enough for the latency of memory, and not so
far that they are gone before they are read."""
ROWS_HEADER = 64
ROWS_BYTES = ROWS_HEADER + 2 * 8 * BLOCK
"""The rows of a block: how many there are, in a cache line of its own, the addresses of keys and those of values."""
_LISTS_BYTES = 2 * ROWS_BYTES + 3 * 8 * BLOCK
"""The rows of two blocks, and the order in which those of one are read."""
_WIDTH = 16
"""Numbers that are copied or scaled at once."""


class AttendArguments(NamedTuple):
    """The numbers that `attend` and `merge` read, in their order."""

    q: int
    q_token_bytes: int
    q_head_bytes: int
    keys: int
    key_slot_bytes: int
    key_head_bytes: int
    values: int
    value_slot_bytes: int
    value_head_bytes: int
    pages: int
    """Address of the page table, int64. 0: entry i of a row is in slot `first token + i`."""
    page_row_bytes: int
    page_size: int
    located: int
    """[num_tokens, FIELDS] int64, from `locate`."""
    num_tokens: int
    num_kv_heads: int
    num_splits: int
    score_factor: int
    """Bits of an fp32, like the next two."""
    softcap: int
    """0 without one."""
    value_factor: int
    sinks: int
    """Address, or 0."""
    out: int
    out_token_bytes: int
    out_head_bytes: int
    lse: int
    """Address of [num_tokens, num_q_heads] fp32, or 0."""
    parts: int
    """States [num_tokens, num_splits, num_q_heads, value_dim + STATE_EXTRA] fp32, used if there are several splits."""
    scratch: int
    """`scratch_bytes` of each thread."""
    scratch_bytes: int
    query_lens: int = 0
    """Address of [num_rows] int64, for the kernel of prompts."""
    num_rows: int = 0


def scratch_bytes(num_heads: int, key_dim: int, value_dim: int) -> int:
    """The memory that a thread of `attend` needs: lists of rows, queries, states and scores."""
    floats = num_heads * (key_dim + value_dim + STATE_EXTRA + BLOCK)
    return -(-(_LISTS_BYTES + 4 * floats) // 128) * 128


@Once
def attend_kernel(form: AttendForm, processor: Processor) -> CompiledKernel:
    """The kernel for dtypes and sizes; see `AttendArguments`."""
    return compile_kernel("attend", (form,), lambda module: write_attend(module, form, processor), processor)


@Once
def merge_kernel(form: AttendForm, processor: Processor) -> CompiledKernel:
    """The kernel that merges parts of `attend`, with the same arguments."""
    return compile_kernel("merge", (form,), lambda module: write_merge(module, form), processor)


def write_attend(module: Any, form: AttendForm, processor: Processor) -> None:
    """Fills an LLVM module with the kernel."""
    unit = UNITS[processor.instructions]
    find, begin = write_find_rows(module), write_begin(module, form)
    add, finish = _write_add_block(module, form, unit), write_finish(module, form)
    emitter = Emitter(module, ENTRY, 3)
    build = emitter.build
    arguments, thread, num_threads = emitter.arguments
    given = read_arguments(emitter, arguments)
    num_heads = emitter.times(given.num_kv_heads, form.group)
    state_bytes = emitter.times(num_heads, 4 * (form.value_dim + STATE_EXTRA))
    lists = emitter.add(given.scratch, emitter.times(thread, given.scratch_bytes))
    order = emitter.add(lists, emitter.number(2 * ROWS_BYTES))
    own_state = emitter.add(lists, emitter.number(_LISTS_BYTES))
    queries = emitter.add(own_state, state_bytes)
    scores = emitter.add(queries, emitter.times(num_heads, 4 * form.key_dim))
    num_units = emitter.times(given.num_tokens, given.num_splits)
    is_split = build.icmp_signed(">", given.num_splits, emitter.number(1))
    with emitter.loop(0, emitter.divided_up(build.sub(num_units, thread), num_threads)) as turn:
        number = emitter.add(thread, emitter.times(turn, num_threads))
        token, split = build.sdiv(number, given.num_splits), build.srem(number, given.num_splits)
        field = emitter.add(given.located, emitter.times(token, 8 * FIELDS))
        start, end = (emitter.load(field, I64, 8 * place, align=8) for place in (1, 2))
        with emitter.when(build.icmp_signed(">=", end, emitter.number(0))):
            first, stop = _share(emitter, start, end, split, given.num_splits)
            part = emitter.add(given.parts, emitter.times(number, state_bytes))
            state = build.select(is_split, part, own_state)
            has_keys = build.zext(build.icmp_signed("<", first, stop), I64)
            with emitter.loop(0, num_heads) as head:
                query = emitter.add(queries, emitter.times(head, 4 * form.key_dim))
                own = emitter.add(state, emitter.times(head, State.num_bytes(form)))
                emitter.call_function(begin, [arguments, token, head, has_keys, query, own])
            emitter.call_function(find, [arguments, field, first, stop, lists])
            with emitter.loop(0, emitter.divided_up(build.sub(stop, first), BLOCK)) as block:
                odd = emitter.times(build.and_(block, emitter.number(1)), ROWS_BYTES)
                here = emitter.add(lists, odd)
                there = emitter.add(lists, build.sub(emitter.number(ROWS_BYTES), odd))
                following = emitter.add(first, emitter.times(emitter.add(block, emitter.number(1)), BLOCK))
                emitter.call_function(find, [arguments, field, following, stop, there])
                with emitter.when(build.icmp_signed(">", emitter.load(here, I64, align=8), emitter.number(0))):
                    emitter.call_function(add, [arguments, here, there, order, queries, state, scores])
            with emitter.when(build.not_(is_split)), emitter.loop(0, num_heads) as head:
                own = emitter.add(state, emitter.times(head, State.num_bytes(form)))
                emitter.call_function(finish, [arguments, own, emitter.number(1), state_bytes, token, head])
    emitter.finish()


def write_merge(module: Any, form: AttendForm) -> None:
    """Fills an LLVM module with the kernel."""
    finish = write_finish(module, form)
    emitter = Emitter(module, ENTRY, 3)
    build = emitter.build
    arguments, thread, num_threads = emitter.arguments
    given = read_arguments(emitter, arguments)
    num_heads = emitter.times(given.num_kv_heads, form.group)
    state_bytes = emitter.times(num_heads, 4 * (form.value_dim + STATE_EXTRA))
    first, stop = emitter.share(emitter.times(given.num_tokens, num_heads), thread, num_threads)
    with emitter.loop(first, stop) as number:
        token, head = build.sdiv(number, num_heads), build.srem(number, num_heads)
        end = emitter.load(emitter.add(given.located, emitter.times(token, 8 * FIELDS)), I64, 16, align=8)
        with emitter.when(build.icmp_signed(">=", end, emitter.number(0))):
            parts = emitter.add(given.parts, emitter.times(emitter.times(token, given.num_splits), state_bytes))
            own = emitter.add(parts, emitter.times(head, State.num_bytes(form)))
            emitter.call_function(finish, [arguments, own, given.num_splits, state_bytes, token, head])
    emitter.finish()


def read_arguments(emitter: Emitter, arguments: Value) -> AttendArguments:
    return AttendArguments(*(emitter.load(arguments, I64, 8 * i, align=8) for i in range(len(AttendArguments._fields))))


def _float(emitter: Emitter, bits: Value) -> Value:
    return emitter.build.bitcast(emitter.build.trunc(bits, I32), F32)


def _share(emitter: Emitter, start: Value, end: Value, split: Value, num_splits: Value) -> tuple[Value, Value]:
    """The keys of a split: whole tiles, if they are not the last."""
    build = emitter.build
    share = emitter.divided_up(build.sub(end, start), num_splits)
    share = emitter.larger(emitter.whole(share, KEYS), emitter.number(MIN_SPLIT))
    first = emitter.add(start, emitter.times(split, share))
    return first, emitter.smaller(emitter.add(first, share), end)


def write_begin(module: Any, form: AttendForm) -> Value:
    """A function that scales a head's query of a token, and clears its state.

    Arguments: address of the arguments, token, head, 1 if there are keys, the scaled query, the state.
    """
    emitter = Emitter(module, "begin", 6, internal=True, inline=False)
    arguments, token, head, has_keys, target, address = emitter.arguments
    given = read_arguments(emitter, arguments)
    factor = emitter.build.fmul(_float(emitter, given.score_factor), emitter.constant(F32, LOG2_E * form.factor))
    source = emitter.add(given.q, emitter.times(token, given.q_token_bytes), emitter.times(head, given.q_head_bytes))
    state = State(emitter, form, address)
    state.keep(emitter.constant(F32, NOTHING), emitter.constant(F32, 0.0))
    with emitter.when(emitter.build.icmp_signed("!=", has_keys, emitter.number(0))):
        for part in pieces(form.key_dim, _WIDTH):
            q = load_floats(emitter, source, form.q, part.size, part.first * form.q.itemsize)
            scaled = emitter.build.fmul(q, emitter.splat(factor, part.size))
            emitter.store(scaled, target, 4 * part.first, align=4)
        for part in pieces(form.value_dim, _WIDTH):
            emitter.store(emitter.constant(vector(F32, part.size), 0.0), state.address, 4 * part.first, align=4)
    emitter.finish()
    return emitter.function


class State:
    """A head's state in memory."""

    def __init__(self, emitter: Emitter, form: AttendForm, address: Value) -> None:
        self._emitter = emitter
        self._extra = 4 * form.value_dim
        self.address = address

    @staticmethod
    def num_bytes(form: AttendForm) -> int:
        return 4 * (form.value_dim + STATE_EXTRA)

    @property
    def most(self) -> Value:
        """The largest score."""
        return self._emitter.load(self.address, F32, self._extra, align=4)

    @property
    def weight(self) -> Value:
        """The sum of the weights, relative to the largest score."""
        return self._emitter.load(self.address, F32, self._extra + 4, align=4)

    def keep(self, most: Value, weight: Value) -> None:
        self._emitter.store(most, self.address, self._extra, align=4)
        self._emitter.store(weight, self.address, self._extra + 4, align=4)


def write_find_rows(module: Any) -> Value:
    """A function that lists where the keys and values are that a token sees out of a block.

    Arguments: address of the arguments, fields of the token, first key of the block, end of the keys, the list. Behind
    the last row, the list is completed with it.
    """
    emitter = Emitter(module, "find_rows", 5, internal=True, inline=False)
    build = emitter.build
    arguments, field, first, stop, rows = emitter.arguments
    given = read_arguments(emitter, arguments)
    place, tree, context_len, positions, position, window = (
        emitter.load(field, I64, 8 * index, align=8) for index in (0, 3, 4, 5, 6, 7)
    )
    stop = emitter.smaller(stop, emitter.add(first, emitter.number(BLOCK)))
    lists = (
        (ROWS_HEADER, given.keys, given.key_slot_bytes),
        (ROWS_HEADER + 8 * BLOCK, given.values, given.value_slot_bytes),
    )
    count, offset, sees = (emitter.variable(I64) for _ in range(3))
    emitter.set(count, emitter.number(0))
    has_keys = build.icmp_signed("<", first, stop)
    first_page = build.sdiv(first, given.page_size)
    pages = build.select(has_keys, emitter.divided_up(stop, given.page_size), first_page)
    with emitter.loop(first_page, pages) as page:
        begin = emitter.times(page, given.page_size)
        end = emitter.smaller(emitter.add(begin, given.page_size), stop)
        begin = build.select(build.icmp_signed("<", begin, first), first, begin)
        emitter.set(offset, place)
        with emitter.when(build.icmp_signed("!=", given.pages, emitter.number(0))):
            entry = emitter.add(given.pages, emitter.times(place, given.page_row_bytes), emitter.times(page, 8))
            moved = build.sub(emitter.load(entry, I64, align=8), page)
            emitter.set(offset, emitter.times(moved, given.page_size))
        with emitter.loop(begin, end) as key:
            number = build.sub(key, context_len)
            emitter.set(sees, emitter.number(1))
            is_new = build.icmp_signed(">=", number, emitter.number(0))
            with emitter.when(build.and_(build.icmp_signed("!=", tree, emitter.number(0)), is_new)):
                there = emitter.load(emitter.add(positions, emitter.times(number, 8)), I64, align=8)
                is_near = _is_near(emitter, build.sub(position, there), window)
                in_tree = build.icmp_signed("!=", emitter.load(emitter.add(tree, number), I8), emitter.constant(I8, 0))
                emitter.set(sees, build.zext(build.and_(is_near, in_tree), I64))
            found = emitter.add(rows, emitter.times(emitter.get(count), 8))
            slot = emitter.add(key, emitter.get(offset))
            for at, base, slot_bytes in lists:
                emitter.store(emitter.add(base, emitter.times(slot, slot_bytes)), found, at, align=8)
            emitter.set(count, emitter.add(emitter.get(count), emitter.get(sees)))
    emitter.store(emitter.get(count), rows, align=8)
    found = emitter.get(count)
    last = emitter.add(rows, emitter.times(found, 8))
    is_empty = build.icmp_signed("==", found, emitter.number(0))
    with emitter.loop(build.select(is_empty, emitter.number(BLOCK), found), BLOCK) as index:
        behind = emitter.add(rows, emitter.times(index, 8))
        for at, _, _ in lists:
            emitter.store(emitter.load(last, I64, at - 8, align=8), behind, at, align=8)
    emitter.finish()
    return emitter.function


def _is_near(emitter: Emitter, distance: Value, window: Value) -> Value:
    """Whether a position at a distance, in either direction, is in the window. 0 is no window."""
    build, zero = emitter.build, emitter.number(0)
    distance = build.select(build.icmp_signed("<", distance, zero), build.neg(distance), distance)
    return build.or_(build.icmp_signed("<", distance, window), build.icmp_signed("==", window, zero))


def _write_add_block(module: Any, form: AttendForm, unit: VectorUnit) -> Value:
    """A function that adds a block of keys to the states of all heads.

    Arguments: address of the arguments, rows of the block and of the next one, memory for their order, queries, states,
    scores.
    """
    weigh = write_weigh(module, form)
    emitter = Emitter(module, "add_block", 7, internal=True, inline=False)
    arguments, here, there, order, queries, states, scores = emitter.arguments
    given = read_arguments(emitter, arguments)
    writer, state_bytes = TileWriter(emitter, form, unit), State.num_bytes(form)
    count = emitter.load(here, I64, align=8)
    padded = emitter.times(emitter.divided_up(count, KEYS), KEYS)
    key_rows, value_rows = _write_order(emitter, here, there, order, padded)
    stretch, ahead = (_rows_in(emitter, num_bytes, given.key_slot_bytes) for num_bytes in (STRETCH_BYTES, AHEAD_BYTES))

    @contextmanager
    def stretches(rows: Value, head_bytes: Value) -> Iterator[tuple[HeadRows, Value]]:
        """Repeats what is emitted inside for the rows of each stretch and head: yields them, and the first query."""
        with emitter.loop(0, emitter.divided_up(count, stretch)) as number:
            first = emitter.times(number, stretch)
            stop = emitter.smaller(emitter.add(first, stretch), padded)
            with emitter.loop(0, given.num_kv_heads) as head:
                own = HeadRows(rows, emitter.times(head, head_bytes), ahead, first, stop)
                yield own, emitter.times(head, form.group)

    with stretches(key_rows, given.key_head_bytes) as (keys, first):
        own_queries = emitter.add(queries, emitter.times(first, 4 * form.key_dim))
        writer.score(keys, own_queries, emitter.add(scores, emitter.times(first, 4 * BLOCK)))
    with emitter.loop(0, emitter.times(given.num_kv_heads, form.group)) as head:
        own_scores = emitter.add(scores, emitter.times(head, 4 * BLOCK))
        own_state, none = emitter.add(states, emitter.times(head, state_bytes)), emitter.number(0)
        emitter.call_function(weigh, [given.softcap, none, count, none, count, own_scores, own_state])
    with stretches(value_rows, given.value_head_bytes) as (values, first):
        own_scores = emitter.add(scores, emitter.times(first, 4 * BLOCK))
        writer.add_values(values, own_scores, emitter.add(states, emitter.times(first, state_bytes)), state_bytes)
    emitter.finish()
    return emitter.function


def _write_order(emitter: Emitter, here: Value, there: Value, order: Value, num_rows: Value) -> tuple[Value, Value]:
    """Lists rows in the order in which they are read: keys, values, and the keys of the next block.

    Returns where the keys and the values begin. The last block is followed by itself: only rows that exist are asked
    for, because asking for others takes long.
    """
    build = emitter.build
    is_last = build.icmp_signed("==", emitter.load(there, I64, align=8), emitter.number(0))
    following = build.select(is_last, here, there)
    values = emitter.add(order, emitter.times(num_rows, 8))
    behind = emitter.add(values, emitter.times(num_rows, 8))
    for source, place, target in ((here, 0, order), (here, 8 * BLOCK, values), (following, 0, behind)):
        for index in range(0, 8 * BLOCK, 64):
            some = emitter.load(source, vector(I64, 8), ROWS_HEADER + place + index, align=8)
            emitter.store(some, target, index, align=8)
    return order, values


def _rows_in(emitter: Emitter, num_bytes: int, row_bytes: Value) -> Value:
    """Returns the number of rows in `num_bytes`: whole tiles, at least one and at most a block."""
    build, least = emitter.build, emitter.number(KEYS)
    rows = emitter.times(build.sdiv(emitter.number(num_bytes // KEYS), row_bytes), KEYS)
    rows = build.select(build.icmp_signed("<", rows, least), least, rows)
    return emitter.smaller(rows, emitter.number(BLOCK))


def write_weigh(module: Any, form: AttendForm) -> Value:
    """A function that turns a head's scores into weights relative to the largest so far, and adapts its state.

    Arguments: bits of the softcap, first and end of the keys that the head sees, first and end of those that have
    scores, scores, state. Scores of keys that the head does not see, and those that complete a vector, become weights
    of 0.
    """
    emitter = Emitter(module, "weigh", 7, internal=True, inline=False)
    build, kind = emitter.build, vector(F32, _WIDTH)
    bits, first, stop, begin, end, scores, address = emitter.arguments
    state = State(emitter, form, address)
    begin, end = emitter.times(build.sdiv(begin, emitter.number(_WIDTH)), _WIDTH), emitter.whole(end, _WIDTH)
    cap = build.fmul(_float(emitter, bits), emitter.constant(F32, LOG2_E))
    with emitter.when(build.fcmp_ordered(">", cap, emitter.constant(F32, 0.0))):
        caps = emitter.splat(cap, KEYS)
        with emitter.loop(begin, end, KEYS) as key:
            place = emitter.add(scores, emitter.times(key, 4))
            score = load_floats(emitter, place, torch.float32, KEYS)
            emitter.store(build.fmul(caps, tanh(build, build.fdiv(score, caps))), place, align=4)
    before, most_of, weight_of = state.most, emitter.variable(kind), emitter.variable(kind)
    emitter.set(most_of, emitter.splat(before, _WIDTH))
    origin = emitter.splat(build.trunc(first, I32), _WIDTH)
    limit = emitter.splat(build.trunc(build.sub(stop, first), I32), _WIDTH)
    with emitter.loop(begin, end, _WIDTH) as key:
        place = emitter.add(scores, emitter.times(key, 4))
        number = build.add(emitter.counting(I32, _WIDTH), emitter.splat(build.trunc(key, I32), _WIDTH))
        score = load_floats(emitter, place, torch.float32, _WIDTH)
        is_seen = build.icmp_unsigned("<", build.sub(number, origin), limit)
        score = build.select(is_seen, score, emitter.constant(kind, NOTHING))
        emitter.store(score, place, align=4)
        emitter.set(most_of, larger(build, emitter.get(most_of), score))
    most = largest(build, emitter.get(most_of))
    base = _finite(emitter, most)
    emitter.set(weight_of, emitter.constant(kind, 0.0))
    with emitter.loop(begin, end, _WIDTH) as key:
        place = emitter.add(scores, emitter.times(key, 4))
        score = load_floats(emitter, place, torch.float32, _WIDTH)
        weight = power_of_two(build, build.fsub(score, emitter.splat(base, _WIDTH)))
        emitter.store(weight, place, align=4)
        emitter.set(weight_of, build.fadd(emitter.get(weight_of), weight))
    kept = power_of_two(build, build.fsub(before, base))
    state.keep(most, build.fadd(build.fmul(state.weight, kept), total(build, emitter.get(weight_of))))
    with emitter.when(build.fcmp_unordered("!=", kept, emitter.constant(F32, 1.0))):
        for part in pieces(form.value_dim, _WIDTH):
            sums = load_floats(emitter, state.address, torch.float32, part.size, 4 * part.first)
            emitter.store(build.fmul(sums, emitter.splat(kept, part.size)), state.address, 4 * part.first, align=4)
    emitter.finish()
    return emitter.function


def _finite(emitter: Emitter, most: Value) -> Value:
    """Returns what is subtracted from scores: the highest, or 0 if all are -inf, so that weights are 0 and not NaN."""
    is_nothing = emitter.build.fcmp_ordered("==", most, emitter.constant(F32, NOTHING))
    return emitter.build.select(is_nothing, emitter.constant(F32, 0.0), most)


def write_finish(module: Any, form: AttendForm) -> Value:
    """A function that merges states of a head, and writes its output and its log-sum-exp.

    Arguments: address of the arguments, the head's state of the first split, number of splits, bytes from a split to
    the next, token, head.
    """
    emitter = Emitter(module, "finish", 6, internal=True, inline=False)
    build = emitter.build
    arguments, first, num_splits, split_bytes, token, head = emitter.arguments
    given = read_arguments(emitter, arguments)
    zero, has_sinks = emitter.constant(F32, 0.0), build.icmp_signed("!=", given.sinks, emitter.number(0))

    def state(split: Value) -> State:
        return State(emitter, form, emitter.add(first, emitter.times(split, split_bytes)))

    sink, most, weight = (emitter.variable(F32) for _ in range(3))
    emitter.set(sink, emitter.constant(F32, NOTHING))
    with emitter.when(has_sinks):
        place = emitter.add(given.sinks, emitter.times(head, form.q.itemsize))
        loaded = load_floats(emitter, place, form.q, 1)
        first_sink = build.extract_element(loaded, emitter.constant(I32, 0))
        emitter.set(sink, build.fmul(first_sink, emitter.constant(F32, LOG2_E)))
    emitter.set(most, emitter.get(sink))
    with emitter.loop(0, num_splits) as split:
        emitter.set(most, larger(build, emitter.get(most), state(split).most))
    base = _finite(emitter, emitter.get(most))
    emitter.set(weight, power_of_two(build, build.fsub(emitter.get(sink), base)))
    with emitter.loop(0, num_splits) as split:
        each = state(split)
        kept = power_of_two(build, build.fsub(each.most, base))
        emitter.set(weight, build.fadd(emitter.get(weight), build.fmul(kept, each.weight)))
        # The state of a split without keys has no sums, and a weight of 0.
        each.keep(kept, each.weight)
    has_weight = build.fcmp_unordered("!=", emitter.get(weight), zero)
    factor = build.fmul(_float(emitter, given.value_factor), emitter.constant(F32, form.factor))
    scale = build.select(has_weight, build.fdiv(factor, emitter.get(weight)), zero)
    target = emitter.add(
        given.out, emitter.times(token, given.out_token_bytes), emitter.times(head, given.out_head_bytes)
    )
    for part in pieces(form.value_dim, 4 * _WIDTH):
        kind = vector(F32, part.size)
        sums = emitter.variable(kind)
        emitter.set(sums, emitter.constant(kind, 0.0))
        with emitter.loop(0, num_splits) as split:
            each = state(split)
            with emitter.when(build.fcmp_unordered("!=", each.weight, zero)):
                own = load_floats(emitter, each.address, torch.float32, part.size, 4 * part.first)
                scaled = build.fmul(own, emitter.splat(each.most, part.size))
                emitter.set(sums, build.fadd(emitter.get(sums), scaled))
        result = build.fmul(emitter.get(sums), emitter.splat(scale, part.size))
        store_floats(emitter, result, target, form.out, part.first * form.out.itemsize)
    with emitter.when(build.icmp_signed("!=", given.lse, emitter.number(0))):
        num_heads = emitter.times(given.num_kv_heads, form.group)
        place = emitter.add(given.lse, emitter.times(emitter.add(emitter.times(token, num_heads), head), 4))
        logarithm = emitter.call("llvm.log.f32", F32, [emitter.get(weight)])
        lse = multiply_add(build, base, emitter.constant(F32, 1 / LOG2_E), logarithm)
        emitter.store(build.select(has_weight, lse, emitter.constant(F32, NOTHING)), place, align=4)
    emitter.finish()
    return emitter.function
