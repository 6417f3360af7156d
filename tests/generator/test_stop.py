import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exl2nb.generator.output import StopMatcher

LETTERS = st.text("ab🎉", max_size=4)


@given(pieces=st.lists(LETTERS, max_size=12), stops=st.lists(st.text("ab🎉", min_size=1, max_size=4), max_size=3))
@settings(max_examples=500, deadline=None)
def test_any_cut_of_any_text(pieces, stops):
    """Whatever the pieces: nothing of a stop text is shown, nothing else is lost, and only what may become one is held."""
    matcher, text, visible = StopMatcher(stops), "", 0
    for piece in pieces:
        before, text = text, text + piece
        now, found = matcher.feed(piece)
        assert now >= visible
        visible = now
        hits = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
        assert found == bool(hits)
        if found:
            assert visible == min(hits)[1]
            return
        assert not any(stop in before for stop in stops)
        held = text[visible:]
        assert not held or any(stop.startswith(held) for stop in stops)
        for n in range(len(held) + 1, len(text) + 1):
            assert not any(len(stop) > n and stop.startswith(text[-n:]) for stop in stops)


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_across_pieces(size):
    text = "a long <|text|> with its <|end|> inside"
    matcher, results = StopMatcher(["<|end|>", "<|never|>"]), []
    for i in range(0, len(text), size):
        results.append(matcher.feed(text[i : i + size]))
        if results[-1][1]:
            break
    assert results[-1] == (text.index("<|end|>"), True)
    assert max(v for v, _ in results) == text.index("<|end|>")


def test_no_stops():
    assert StopMatcher(()).feed("abc") == (3, False)
