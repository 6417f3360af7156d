"""Templates that mean harm: each is stopped, by name, and the next one renders."""

import dataclasses
import resource

import pytest

from exl2nb.core.errors import TokenizerError
from exl2nb.core.helper import Helper
from exl2nb.tokenizer import template
from exl2nb.tokenizer.template import render

TALK = [{"role": "user", "content": "hi"}]
DOUBLING = "{{% set n = namespace(x={start}) %}}{{% for i in range(60) %}}{step}{{% endfor %}}{end}"


@pytest.fixture(autouse=True, scope="module")
def _impatient():
    """The same process with an eighth of the CPU time and half of the memory."""
    with pytest.MonkeyPatch.context() as patch:
        limits = dataclasses.replace(template.SANDBOX_LIMITS, cpu_s=0.25, memory_bytes=192 << 20)
        patch.setattr(template, "TEMPLATE_HELPER", Helper("exl2nb.tokenizer.sandbox", limits))
        yield


def refused(template, match=None):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TokenizerError, match=match):
        render(TALK, template)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10, "KiB: it was rendered in this process"
    assert render(TALK, "{{ messages[0].content }}") == "hi"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ strftime_now.__code__.co_code }}",
        "{{ ''.format.__self__.__class__.x }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ messages | map(attribute='__class__.__mro__') | list | first | first }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
        "{{ lipsum.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% extends '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ environment.globals.x }}",
    ],
)
def test_nothing_but_the_messages_can_be_reached(template):
    refused(template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__ }}",
        "{{ messages[0].__class__.__init__ }}",
        "{{ ''|attr('__class__') }}",
        "{{ os }}",
        "{{ lipsum }}",
        "{{ _budget }}",
    ],
)
def test_what_cannot_be_reached_is_undefined(template):
    assert render(TALK, template) == ""


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{{ range(10**9) | list }}",
        "{{ range(99999) | map('string') | map('upper') | map('lower') | map('trim') | map('length') | sum }}" * 3,
    ],
)
def test_endless_work(template):
    refused(template)


SHARED = "{% set a = [1] %}{% set b = [1] %}" + 40 * "{% set a = [a, a] %}{% set b = [b, b] %}"


@pytest.mark.parametrize(
    "end", ["{% if a == b %}", "{% if a < b %}", "{% if a in [b] %}", "{% if a is eq b %}", "{% if [a] | unique | list %}"]
)
def test_one_operation_that_never_ends(end):
    """Nothing checks a budget inside of it, and Ctrl-C would not reach it in this process."""
    refused(f"{SHARED}{end}x{{% endif %}}", match="CPU time|TypeError: unhashable")


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{% set a = 1 %}" * 40_000, "CPU time"),
        ("{{ 1" + " ~ 1" * 1_000_000 + " }}", "CPU time|MiB|Recursion"),
        ("{% for a in [1] %}" * 25 + "{% endfor %}" * 25, "nested too deeply"),
        ("{% if 1 %}" * 150 + "{% endif %}" * 150, "nested too deeply"),
        ("{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}", "RecursionError"),
        ("{% break %}", "'break' outside loop"),
    ],
)
def test_parsing_and_compiling_are_bounded(template, match):
    refused(template, match)


@pytest.mark.parametrize(
    "template",
    [
        DOUBLING.format(start="'ab'", step="{% set n.x = n.x ~ n.x %}", end=""),
        DOUBLING.format(start="'ab'", step="{% set n.x = n.x + n.x %}", end=""),
        DOUBLING.format(start="'ab'", step="{% set n.x = n.x * 2 %}", end=""),
        DOUBLING.format(start="'ab'", step="{% set n.x = n.x | replace('a', 'aa') %}", end=""),
        DOUBLING.format(start="'ab'", step="{% set n.x = n.x.replace('a', 'aa') %}", end=""),
        DOUBLING.format(start="'ab'", step="{% set n.x = [n.x, n.x] | join %}", end=""),
        DOUBLING.format(start="'ab'", step="{% set n.x = '%s%s' % (n.x, n.x) %}", end=""),
        DOUBLING.format(start="'ab'", step="{% set n.x = '{0}{0}'.format(n.x) %}", end=""),
        DOUBLING.format(start="'ab'", step="{% set z %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = z %}", end=""),
        DOUBLING.format(start="[1]", step="{% set n.x = [n.x, n.x] %}", end="{{ n.x }}"),
        DOUBLING.format(start="[1]", step="{% set n.x = [n.x, n.x] %}", end="{{ n.x | tojson }}"),
        DOUBLING.format(start="[1]", step="{% set n.x = [n.x, n.x] %}", end="{{ 'x' ~ n.x }}"),
        DOUBLING.format(start="[1]", step="{% set n.x = [n.x, n.x] %}", end="{{ '%s' % (n.x,) }}"),
        DOUBLING.format(start="9", step="{% set n.x = n.x * n.x %}", end=""),
        "{{ 'a' * 10**10 }}",
        "{{ [0] * 10**10 }}",
        "{{ 10**(10**10) }}",
        "{{ 2 ** 1000000000 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{w}}'.format(1, w=10**9) }}",
        "{{ '{:1000000000}'.format_map({}) }}",
        "{{ 'a'.ljust(10**9) }}",
        "{{ 'a'.center(10**9) }}",
        "{{ 'a'.zfill(10**9) }}",
        "{{ 'a' | center(10**9) }}",
        "{{ 'a\nb' | indent(10**9) }}",
        "{{ [1] | batch(10**9, 0) | list }}",
        "{{ [1] | slice(10**9) | list }}",
        "{{ ('\t' * 1000000).expandtabs(10000) }}",
        "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
        "{{ (['a' * 1000000] * 1000000) | join }}",
        "{{ ('x' * 3000000).join(range(99999) | map('string') | list) }}",
        "{{ (1).to_bytes(10**9, 'big') }}",
        "{{ strftime_now('%255Y' * 700000) }}",
        "{{ ('{0:9999}' * 400000).format(1) }}",
        "{{ '%(a)9999s' * 400000 % {'a': 1} }}",
        "{{ ('%9999s' * 40000) | format(*range(40000)) }}",
        "{{ ([[1]] * 100000) | tojson(indent=10000) }}",
        "{{ ('a\n' * 100000) | indent(10000) }}",
        "{{ ([[0] * 20000] * 2000) | sum(start=[]) }}",
        "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% set n.x = n.x + [n.x] %}{% endfor %}",
    ],
)
def test_huge_values(template):
    refused(template)


def test_a_long_conversation_is_fine():
    talk = [{"role": "user" if i % 2 == 0 else "assistant", "content": f"line {i} " * 50} for i in range(2000)]
    user = "{% if m.role == 'user' %}{{ '<u>' + m.content | trim + '</u>' }}"
    template = "{% for m in messages %}" + user + "{% else %}{{ m['content'].strip() }}{% endif %}{% endfor %}"
    assert len(render(talk, template)) > 500_000
