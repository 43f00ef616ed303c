"""Writes LLVM instructions: loops, memory at integer addresses, vectors.

A thin layer over llvmlite's builder with the few forms that kernels need. Does not know kernels or processors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

Value = Any
"""A value of LLVM's, `ir.Value`: llvmlite has no types for a checker."""
Type = Any
"""A type of LLVM's, `ir.Type`."""

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
VOID = ir.VoidType()


def vector(element: Type, count: int) -> Type:
    """The type of a vector."""
    return ir.VectorType(element, count)


class Emitter:
    """Appends instructions to a function that returns nothing. Addresses are i64."""

    def __init__(
        self, module: Any, name: str, num_arguments: int, *, internal: bool = False, inline: bool = True
    ) -> None:
        """Begins the function `name` of i64 arguments; an `internal` one is visible in its module only.

        Unless it is `inline`, LLVM does not copy it into its callers, and compiles sooner.
        """
        self.function = ir.Function(module, ir.FunctionType(VOID, [I64] * num_arguments), name)
        if internal:
            self.function.linkage = "internal"
        if not inline:
            self.function.attributes.add("noinline")
        self._module = module
        entry = self.function.append_basic_block("entry")
        body = self.function.append_basic_block("body")
        # Variables are made in the entry block, whichever block uses them, so that LLVM keeps them in registers.
        self._variables = ir.IRBuilder(entry)
        self._variables.position_before(self._variables.branch(body))
        self.build = ir.IRBuilder(body)

    @property
    def arguments(self) -> Sequence[Value]:
        return tuple(self.function.args)

    def finish(self) -> None:
        """Ends the function."""
        self.build.ret_void()

    def number(self, value: int) -> Value:
        """An i64 constant."""
        return ir.Constant(I64, value)

    def constant(self, kind: Type, value: float) -> Value:
        """A constant; all elements of a vector are equal."""
        if isinstance(kind, ir.VectorType):
            return ir.Constant(kind, [value] * kind.count)
        return ir.Constant(kind, value)

    def counting(self, kind: Type, count: int) -> Value:
        """The vector of whole numbers 0, 1, 2, …"""
        return ir.Constant(vector(kind, count), list(range(count)))

    def variable(self, kind: Type) -> Value:
        """A local variable, to be used with `get` and `set`. Kept in registers."""
        return self._variables.alloca(kind)

    def room(self, num_bytes: int) -> Value:
        """The address of local memory, aligned to 64 bytes."""
        memory = self._variables.alloca(ir.ArrayType(I8, num_bytes))
        memory.align = 64
        return self._variables.ptrtoint(memory, I64)

    def get(self, variable: Value) -> Value:
        return self.build.load(variable, typ=variable.allocated_type)

    def set(self, variable: Value, value: Value) -> None:
        self.build.store(value, variable)

    def load(self, address: Value, kind: Type, offset: int = 0, align: int = 1) -> Value:
        """Reads `kind` from memory, `offset` bytes after the address."""
        return self.build.load(self._pointer(address, offset), typ=kind, align=align)

    def argument(self, address: Value, index: int) -> Value:
        """The i64 at an index of the arguments at an address. Nothing writes them while a kernel runs."""
        loaded = self.load(address, I64, 8 * index, align=8)
        loaded.set_metadata("invariant.load", self._module.add_metadata([]))
        return loaded

    def store(self, value: Value, address: Value, offset: int = 0, align: int = 1) -> None:
        """Writes memory, `offset` bytes after the address."""
        self.build.store(value, self._pointer(address, offset), align=align)

    def prefetch(self, address: Value, offset: int, *, in_first: bool = True) -> None:
        """Asks for a cache line that is read soon, once; not `in_first`, a little later. Any address is allowed."""
        hints = [ir.Constant(I32, hint) for hint in (0, 0 if in_first else 2, 1)]
        self.call("llvm.prefetch.p0", VOID, [self._pointer(address, offset), *hints])

    def splat(self, value: Value, count: int) -> Value:
        """A vector of equal elements."""
        kind = vector(value.type, count)
        undefined = ir.Constant(kind, ir.Undefined)
        return self.shuffle(self.build.insert_element(undefined, value, ir.Constant(I32, 0)), [0] * count)

    def shuffle(self, value: Value, order: Sequence[int], other: Value | None = None) -> Value:
        """The elements of `value`, and `other` behind it, in another order."""
        other = ir.Constant(value.type, ir.Undefined) if other is None else other
        return self.build.shuffle_vector(value, other, ir.Constant(vector(I32, len(order)), list(order)))

    def call(self, name: str, result: Type, arguments: Sequence[Value]) -> Value:
        """Calls an intrinsic function of LLVM's."""
        function = self._module.globals.get(name)
        if function is None:
            function = ir.Function(self._module, ir.FunctionType(result, [each.type for each in arguments]), name)
        return self.build.call(function, arguments)

    def call_function(self, function: Value, arguments: Sequence[Value]) -> None:
        """Calls a function that another emitter wrote."""
        self.build.call(function, arguments)

    def add(self, *terms: Value) -> Value:
        total = terms[0]
        for term in terms[1:]:
            total = self.build.add(total, term)
        return total

    def times(self, left: Value, right: Value | int) -> Value:
        return self.build.mul(left, self.number(right) if isinstance(right, int) else right)

    def smaller(self, left: Value, right: Value) -> Value:
        """The smaller of two signed numbers."""
        return self.build.select(self.build.icmp_signed("<", left, right), left, right)

    def larger(self, left: Value, right: Value) -> Value:
        """The larger of two signed numbers."""
        return self.build.select(self.build.icmp_signed(">", left, right), left, right)

    def whole(self, value: Value, step: int) -> Value:
        """The number, rounded up to a multiple of `step`."""
        return self.times(self.divided_up(value, step), step)

    def divided_up(self, value: Value, divisor: Value | int) -> Value:
        """The quotient, rounded up."""
        by = self.number(divisor) if isinstance(divisor, int) else divisor
        return self.build.sdiv(self.build.sub(self.add(value, by), self.number(1)), by)

    def share(self, total: Value, thread: Value, num_threads: Value) -> tuple[Value, Value]:
        """The range of items, first and one behind the last, that belongs to a thread."""
        first = self.build.sdiv(self.times(total, thread), num_threads)
        stop = self.build.sdiv(self.times(total, self.add(thread, self.number(1))), num_threads)
        return first, stop

    @contextmanager
    def loop(self, start: Value | int, stop: Value | int, step: int = 1) -> Iterator[Value]:
        """Repeats what is emitted inside while the index, which is yielded, leaves a whole `step` before `stop`."""
        start = self.number(start) if isinstance(start, int) else start
        stop = self.number(stop) if isinstance(stop, int) else stop
        head, body, behind = (self.build.append_basic_block(name) for name in ("loop", "inside", "behind"))
        before = self.build.block
        self.build.branch(head)
        self.build.position_at_end(head)
        index = self.build.phi(I64)
        index.add_incoming(start, before)
        following = self.build.add(index, self.number(step))
        self.build.cbranch(self.build.icmp_signed("<=", following, stop), body, behind)
        self.build.position_at_end(body)
        yield index
        index.add_incoming(following, self.build.block)
        self.build.branch(head)
        self.build.position_at_end(behind)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """Runs what is emitted inside only if the condition holds."""
        with self.build.if_then(condition):
            yield

    def _pointer(self, address: Value, offset: int) -> Value:
        base = self.build.inttoptr(address, ir.PointerType())
        if offset == 0:
            return base
        return self.build.gep(base, [self.number(offset)], source_etype=I8)
