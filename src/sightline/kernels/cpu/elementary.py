"""Elementary functions as LLVM instructions without branches, for fp32 numbers and vectors of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from sightline.kernels.cpu.emitter import F32, I32, Type, Value, vector

_EXP = (0.4999999403953552, 0.1666652113199234, 0.04166826605796814, 0.008368674665689468, 0.0013820664025843143)


def exp(build: Any, x: Value) -> Value:
    """e to the power of x, within 2 units in the last place; 0 below -87.7, infinite above 88, NaN for NaN.

    2**n * e**r with n the nearest whole number to x / ln 2, and a polynomial for e**r.
    """
    # With this x, and lower ones, n is -127, and the bits of the power are those of 0.
    low, high = _constant(x.type, -88.02), _constant(x.type, 88.0)
    overflows = build.fcmp_ordered(">", x, high)
    x = build.select(build.fcmp_ordered("<", x, low), low, x)
    x = build.select(overflows, high, x)
    # Behind the sum with a large number is the nearest whole number, in the lowest bits.
    shift = _constant(x.type, 1.5 * 2.0**23)
    shifted = multiply_add(build, x, _constant(x.type, 1.44269504088896341), shift)
    whole = build.fsub(shifted, shift)
    rest = multiply_add(build, whole, _constant(x.type, -0.693359375), x)
    rest = multiply_add(build, whole, _constant(x.type, 2.12194440e-4), rest)
    words = vector(I32, x.type.count) if isinstance(x.type, ir.VectorType) else I32
    bits = build.shl(build.bitcast(shifted, words), _constant(words, 23))
    power = build.bitcast(build.add(bits, _constant(words, 127 << 23)), x.type)
    # e**r - 1 = r + r**2 * (c0 + c1 r + r**2 * (c2 + c3 r + c4 r**2)), within 3.2e-9 of e**r for |r| <= ln 2 / 2.
    c0, c1, c2, c3, c4 = (_constant(x.type, each) for each in _EXP)
    square = build.fmul(rest, rest)
    upper = multiply_add(build, square, c4, multiply_add(build, rest, c3, c2))
    inner = multiply_add(build, square, upper, multiply_add(build, rest, c1, c0))
    result = multiply_add(build, power, multiply_add(build, square, inner, rest), power)
    return build.select(overflows, _constant(x.type, float("inf")), result)


def power_of_two(build: Any, x: Value) -> Value:
    """2 to the power of x, which is at most 0, within 2 units in the last place; 0 below -126, NaN for NaN.

    2**n * 2**r with n the nearest whole number to x, and a polynomial for 2**r, summed in pairs to be short of waits.
    """
    low, shift = _constant(x.type, -126.0), _constant(x.type, 1.5 * 2.0**23)
    vanishes = build.fcmp_ordered("<", x, low)
    x = larger(build, x, low)
    # Behind the sum with a large number is the nearest whole number, in the lowest bits.
    shifted = build.fadd(x, shift)
    rest = build.fsub(x, build.fsub(shifted, shift))
    square = build.fmul(rest, rest)

    def pair(constant: float, linear: float) -> Value:
        return multiply_add(build, rest, _constant(x.type, linear), _constant(x.type, constant))

    result = multiply_add(build, square, _constant(x.type, 1.534581242594868e-4), pair(9.61848907e-3, 1.33999309e-3))
    result = multiply_add(build, square, result, pair(0.24022646, 0.055503286))
    result = multiply_add(build, square, result, pair(1.0, 0.69314718))
    words = vector(I32, x.type.count) if isinstance(x.type, ir.VectorType) else I32
    bits = build.shl(build.bitcast(shifted, words), _constant(words, 23))
    power = build.bitcast(build.add(bits, _constant(words, 127 << 23)), x.type)
    return build.select(vanishes, _constant(x.type, 0.0), build.fmul(result, power))


def tanh(build: Any, x: Value) -> Value:
    """The hyperbolic tangent. Near 0 a polynomial, because the difference from 1 would lose its digits."""
    one, two = _constant(x.type, 1.0), _constant(x.type, 2.0)
    square = build.fmul(x, x)
    inner = build.fsub(_constant(x.type, 1 / 3), build.fmul(square, _constant(x.type, 2 / 15)))
    near = build.fmul(x, build.fsub(one, build.fmul(square, inner)))
    far = build.fsub(one, build.fdiv(two, build.fadd(one, exp(build, build.fmul(two, x)))))
    return build.select(build.fcmp_ordered("<", square, _constant(x.type, 0.01)), near, far)


def multiply_add(build: Any, a: Value, b: Value, c: Value) -> Value:
    """a * b + c, rounded once if the processor has an instruction for it."""
    return _call(build, "llvm.fmuladd", [a, b, c])


def larger(build: Any, a: Value, b: Value) -> Value:
    """The larger of two; NaN if one of them is."""
    return _call(build, "llvm.maximum", [a, b])


def largest(build: Any, values: Value) -> Value:
    """The largest element of a vector; NaN if one of them is."""
    return _call(build, "llvm.vector.reduce.fmaximum", [values], F32)


def total(build: Any, values: Value) -> Value:
    """The sum of a vector, by halves: the order does not depend on the processor."""
    while (count := values.type.count // 2) > 0:
        undefined = ir.Constant(values.type, ir.Undefined)
        lower, upper = (
            build.shuffle_vector(values, undefined, ir.Constant(vector(I32, count), list(range(first, first + count))))
            for first in (0, count)
        )
        values = build.fadd(lower, upper)
    return build.extract_element(values, ir.Constant(I32, 0))


def _constant(kind: Type, value: float) -> Value:
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


def _suffix(kind: Type) -> str:
    """A type's name in the names of intrinsic functions."""
    if isinstance(kind, ir.VectorType):
        return f"v{kind.count}{_suffix(kind.element)}"
    return "f32" if isinstance(kind, ir.FloatType) else f"i{kind.width}"


def _call(build: Any, name: str, arguments: Sequence[Value], result: Type | None = None) -> Value:
    """Calls an intrinsic function for the type of its first argument, which the result has too unless it is given."""
    kind = arguments[0].type
    full_name = f"{name}.{_suffix(kind)}"
    function = build.module.globals.get(full_name)
    if function is None:
        signature = ir.FunctionType(kind if result is None else result, [each.type for each in arguments])
        function = ir.Function(build.module, signature, full_name)
    return build.call(function, arguments)
