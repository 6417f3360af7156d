"""Templates that mean harm: each is stopped, soon and by name."""

import time

import pytest

from exl2nb.core.errors import TokenizerError
from exl2nb.tokenizer.chat import render

TALK = [{"role": "user", "content": "hi"}]
DOUBLING = "{{% set n = namespace(x={start}) %}}{{% for i in range(60) %}}{step}{{% endfor %}}{end}"


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
    with pytest.raises(TokenizerError):
        render(TALK, template)


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
    start = time.monotonic()
    with pytest.raises(TokenizerError):
        render(TALK, template)
    assert time.monotonic() - start < 60


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
        "{{ 10**10**10 }}",
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
        "{{ strftime_now('%1000000000d') }}",
    ],
)
def test_huge_values(template):
    start = time.monotonic()
    with pytest.raises(TokenizerError):
        render(TALK, template)
    assert time.monotonic() - start < 30


def test_a_long_conversation_is_fine():
    talk = [{"role": "user" if i % 2 == 0 else "assistant", "content": f"line {i} " * 50} for i in range(2000)]
    user = "{% if m.role == 'user' %}{{ '<u>' + m.content | trim + '</u>' }}"
    template = "{% for m in messages %}" + user + "{% else %}{{ m['content'].strip() }}{% endif %}{% endfor %}"
    assert len(render(talk, template)) > 500_000
