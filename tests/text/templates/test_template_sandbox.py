"""The limits of the template sandbox: whatever a template computes, memory and time stay bounded."""

from __future__ import annotations

import sys
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest
from jinja2.exceptions import SecurityError

from sightline.text.templates import limits as template_limits
from sightline.text.templates.sandbox import SandboxedTemplate
from support.case_marks import proofs

LONG = "{% set long = 'ab' * 8000000 %}"
MANY = "{% set many = range(99999) | list %}"


def doubled(start: str, step: str, end: str = "") -> str:
    """Sixty steps from `start`, twice over so that the two results are equal and not identical."""
    other = step.replace("ns.a", "ns.b")
    return (
        f"{{% set ns = namespace(a={start}, b={start}) %}}{{% for i in range(60) %}}"
        f"{{% set ns.a = {step} %}}{{% set ns.b = {other} %}}{{% endfor %}}{end}"
    )


def repeated(step: str) -> str:
    """Many values, each of which stays alive."""
    return (
        LONG + "{% set ns = namespace(kept=[], last=none) %}{% for i in range(99999) %}"
        "{% set ns.kept = ns.kept + [" + step + "] %}{% endfor %}"
    )


BOMBS = {
    "integers": doubled("3", "ns.a * ns.a"),
    "power": "{{ 2 ** 100000000 }}",
    "digits": "{{ ('f' * 16000000) | int(0, 16) }}",
    "format filter": "{{ '%0300000000d' | format(1) }}",
    "format operator": "{{ '%0300000000d' % 1 }}",
    "format precision": "{{ '%.300000000f' % 1 }}",
    "format width as argument": "{{ '%*d' % (300000000, 1) }}",
    "format under a name": "{{ '%(x(y))0300000000d' | format(1) }}",
    "format of many fields": LONG + "{{ '%s%s' % (long, long) }}",
    "format method": "{{ '{:>300000000}'.format(1) }}",
    "format method, width as argument": "{{ '{:>{}}'.format(1, 300000000) }}",
    "format method, many fields": LONG + "{{ ('{0}' * 500000).format(long) }}",
    "format method by item": "{{ 'a{:>300000000}'['format'](1) }}",
    "format method by filter": "{{ ('{:>300000000}' | attr('format'))(1) }}",
    "ljust": "{{ 'a'.ljust(300000000) }}",
    "rjust": "{{ 'a'.rjust(300000000) }}",
    "center": "{{ 'a'.center(300000000) }}",
    "zfill": "{{ 'a'.zfill(300000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(300000000) }}",
    "translate": LONG + "{{ long.translate({97: long}) }}",
    "to_bytes": "{{ (1).to_bytes(300000000, 'big') }}",
    "fromkeys": "{{ dict.fromkeys(range(9), 1) }}",
    "indent": "{{ 'a\na' | indent(300000000) }}",
    "indent by text": LONG + "{{ 'a\na\na' | indent(long) }}",
    "indent of JSON": "{{ [1] | tojson(indent=300000000) }}",
    "separators of JSON": LONG + "{{ [1] | tojson(separators=(long, long)) }}",
    "round": "{{ 15 | round(-999999999) }}",
    "round up": "{{ 1.5 | round(999999999, 'ceil') }}",
    "date": "{{ strftime_now('%Y' * 999999) }}",
    "concatenation": doubled("'a'", "ns.a ~ ns.a"),
    "concatenation of many": LONG + "{{ long ~ long ~ long ~ long }}",
    "addition": doubled("'a'", "ns.a + ns.a"),
    "product": "{{ 'a' * 10000000000 }}",
    "product of a list": "{{ [0] * 10000000000 }}",
    "addition of lists": doubled("[1]", "ns.a + ns.a"),
    "sum of lists": "{{ ([[1]] * 200000) | sum(start=[]) }}",
    "text of nested lists": doubled("[1]", "[ns.a, ns.a]", "{{ ns.a }}"),
    "comparison of nested lists": doubled("[1]", "[ns.a, ns.a]", "{{ ns.a == ns.b }}"),
    "hash of nested tuples": doubled("(1,)", "(ns.a, ns.a)", "{{ {ns.a: 1} }}"),
    "JSON of nested objects": doubled("{}", "{'a': ns.a, 'b': ns.a}", "{{ ns.a | tojson }}"),
    "objects by function": doubled("{}", "dict(a=ns.a, b=ns.a)", "{{ ns.a | tojson }}"),
    "join filter": doubled("'a'", "[ns.a, ns.a] | join"),
    "join method": doubled("'a'", "''.join([ns.a, ns.a])"),
    "separator": LONG + "{{ range(1000) | join(long) }}",
    "replace filter": LONG + "{{ long | replace('a', long) }}",
    "replace method": LONG + "{{ long.replace('a', long) }}",
    "split": LONG + "{{ long.split('a') | length }}",
    "splitlines": "{{ ('\n' * 16000000).splitlines() | length }}",
    "list of letters": LONG + "{{ long | list | length }}",
    "search from the end": LONG + "{{ long.rfind('c' + 'ab' * 4000000) }}",
    "strip": LONG + "{{ long.strip('c' * 8000000) }}",
    "sort of letters": LONG + "{{ long | sort | length }}",
    "output of a block": "{% set x %}{% for i in range(99999) %}" + "x" * 10000 + "{% endfor %}{% endset %}",
    "output of a macro": "{% macro f() %}{% for i in range(99999) %}"
    + "x" * 10000
    + "{% endfor %}{% endmacro %}{{ f() }}",
    "slices": repeated("long[1:]"),
    "copies": repeated("long | upper"),
    "copies in variables": LONG + "".join(f"{{% set v{index} = long | upper %}}" for index in range(50)),
    "slices in variables": LONG + "".join(f"{{% set v{index} = long[1:] %}}" for index in range(50)),
    "blocks in variables": LONG + "".join(f"{{% set v{index} %}}{{{{ long }}}}x{{% endset %}}" for index in range(50)),
    "namespaces": MANY + "{{ namespace(dict(many | map('string') | map('list') | list)) }}",
}


LONG_BOMBS = ("hash of nested tuples", "comparison of nested lists", "objects by function", "namespaces")
"""Bombs whose limit takes seconds to reach: proofs. Quicker ones reach the same limits in every run."""


@pytest.mark.parametrize("name", [*(each for each in BOMBS if each not in LONG_BOMBS), *proofs(*LONG_BOMBS)])
def test_values_are_bounded(name: str) -> None:
    template = SandboxedTemplate(BOMBS[name])
    tracemalloc.start()
    start = time.process_time()
    try:
        with pytest.raises((SecurityError, ValueError)):
            template.render({}, seconds=250.0, max_characters=1000)
        assert tracemalloc.get_traced_memory()[1] < 450 << 20
    finally:
        tracemalloc.stop()
    assert time.process_time() - start < 20


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ 'a' * 5 + 'b' ~ 1 ~ [2] }}", "aaaaab1[2]"),
        (
            "{{ 2 ** 10 }} {{ 7 % 4 }} {{ '%05.1f|%s' % (1.25, 'x') }} {{ '%s-%d' | format('a', 3) }}",
            "1024 3 001.2|x a-3",
        ),
        ("{{ '{:>4}|{a!r}|{}'.format(1, [2], a='x') }}", "   1|'x'|[2]"),
        (
            "{{ 'a-b-c'.split('-') }}{{ 'a b'.split() }}{{ 'a-b-c'.rsplit('-', 1) }}",
            "['a', 'b', 'c']['a', 'b']['a-b', 'c']",
        ),
        ("{{ 'a\nb'.splitlines() }}{{ ' x '.strip() }}{{ 'xax'.strip('x') }}{{ 'aXa'.rfind('a') }}", "['a', 'b']xa2"),
        (
            "{{ 'aaa'.replace('a', 'b', 2) }}{{ 'aaa' | replace('a', 'b', 1) }}{{ 'abc' | replace('', '-') }}",
            "bbabaa-a-b-c-",
        ),
        ("{{ 'a\nb' | indent(2, true) }}{{ ', '.join(['x', 'y']) }}{{ [1, 2] | join('/') }}", "  a\n  bx, y1/2"),
        (
            "{{ [1, 2, 3] | sum }}{{ [{'n': 2}] | sum(attribute='n') }}{{ 2.55 | round(1) }}{{ [1, 2] | reverse }}",
            "622.5[2, 1]",
        ),
        (
            "{{ {'a': 1}.items() | list }}{{ {'a': {'b': 2}}.get('a').b }}{{ [3, 1] | sort }}{{ 'ab' | list }}",
            "[('a', 1)]2[1, 3]['a', 'b']",
        ),
        ("{% for a, b in {'x': 1}.items() if b > 0 %}{{ a }}{{ loop.length }}{% else %}none{% endfor %}", "x1"),
        ("{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}", "123"),
        (
            "{% set x %}a{% for i in range(3) %}{{ i }}{% endfor %}{% endset %}"
            "{% filter upper %}{{ x }}{% endfilter %}",
            "A012",
        ),
        ("{% macro f(a, b='z') %}{{ a }}{{ b }}{{ caller() }}{% endmacro %}{% call f('x') %}y{% endcall %}", "xzy"),
        ("{% block a scoped %}{{ [1] }}{% endblock %}{{ self.a() }}", "[1][1]"),
        ("{{ (1, 2)[::-1] }}{{ 'abc'[1:] }}{{ ('a' | safe) ~ '<' }}{{ '<' | e }}", "(2, 1)bca<&lt;"),
        ("{% set j = joiner(', ') %}{{ j() }}a{{ j() }}b{{ none }}{{ true }}{{ missing }}", "a, bNoneTrue"),
    ],
)
def test_ordinary_expressions_have_their_usual_values(source: str, expected: str) -> None:
    assert SandboxedTemplate(source).render({}, seconds=10.0, max_characters=1000) == expected


def test_a_long_conversation_is_within_the_limits() -> None:
    source = (
        "{% set rest = messages[1:] + [messages[0]] %}{% for m in rest %}"
        "{{ m.role ~ ': ' + m.content.split('</think>')[-1].lstrip() | trim }}\n{% endfor %}"
    )
    messages = [{"role": "user", "content": f"<think>{index}</think> " + "word " * 200} for index in range(5000)]
    rendered = SandboxedTemplate(source).render({"messages": messages}, seconds=10.0, max_characters=1 << 24)
    assert rendered.count("user: word") == 5000


def test_each_rendering_is_counted_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_TOTAL", 200_000)
    template = SandboxedTemplate("{{ text | upper }}")
    with ThreadPoolExecutor(4) as threads:
        lengths = threads.map(lambda _: len(render_once(template)), range(40))
        assert set(lengths) == {100_000}


def render_once(template: SandboxedTemplate) -> str:
    return template.render({"text": "a" * 100_000}, seconds=10.0, max_characters=1 << 20)


def test_rendering_leaves_the_interpreter_as_it_was() -> None:
    before = sys.gettrace()
    with pytest.raises(SecurityError):
        SandboxedTemplate(BOMBS["product"]).render({}, seconds=1.0, max_characters=10)
    assert sys.gettrace() is before
