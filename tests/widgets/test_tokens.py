"""Whatever looks like a chunk becomes rows of plain values."""

import math

import pytest
from fakes import chunk

from exl2nb.core.errors import OptionError
from exl2nb.generator.request import Chunk, Token, TokenAlternative
from exl2nb.widgets.tokens import items_of, token_item


def test_the_engines_own_chunks():
    token = Token(7, " dog", math.log(0.25), 0.25, 2, (TokenAlternative(3, " cat", math.log(0.5), 0.5),))
    assert items_of(Chunk(" dog", (token,))) == [(" dog", 7, 0.25, 2, [(" cat", 0.5)])]


def test_a_character_over_several_tokens():
    one, two = Token(1, "\ufffd", -1.0, 0.4, 1), Token(2, "\ufffd", -2.0, 0.1, 3)
    items = items_of(Chunk("é", (one, two)))
    assert [item.text for item in items] == ["", "é"]
    assert [item.id for item in items] == [1, 2]


def test_strings_rows_and_mappings():
    assert items_of("hi") == [("hi", -1, None, None, [])]
    assert items_of("") == []
    assert token_item(["a", 1, 0.5, 1, [["b", 0.1]]]) == ("a", 1, 0.5, 1, [("b", 0.1)])
    assert token_item({"text": "a", "logprob": math.log(0.5)}) == ("a", -1, 0.5, None, [])
    assert items_of(chunk(" x", 5))[0].top == [(" other", 0.4), (" x", 0.25)]


def test_anything_else_is_refused_by_name():
    with pytest.raises(OptionError, match="'int'; expected str, or an object with .text and .tokens"):
        items_of(3)
