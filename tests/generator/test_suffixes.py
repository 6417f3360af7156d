"""The suffix automaton against a search by comparison."""

from hypothesis import given, settings
from hypothesis import strategies as st

from exl2nb.generator.suffixes import TEXT_SEPARATOR, EarlierTexts, SuffixAutomaton

TOKENS = st.lists(st.integers(0, 3), max_size=40)


def longest(text, ends):
    """The longest end of a text that is in one of the others, which may stand before its last token."""
    return max((n for n in range(1, len(text) + 1) if any(one[i : i + n] == text[-n:] for one in ends for i in range(len(one)))), default=0)


@given(TOKENS)
@settings(max_examples=150, deadline=None)
def test_the_longest_end_that_stood_before(ids):
    seen = SuffixAutomaton()
    for n, token in enumerate(ids, 1):
        seen.extend(token)
        length, at = seen.repeated()
        assert length == longest(ids[:n], [ids[: n - 1]])
        assert not length or (at < n and ids[at - length : at] == ids[n - length : n])


@given(st.lists(TOKENS, max_size=5), TOKENS)
@settings(max_examples=150, deadline=None)
def test_the_longest_end_that_is_in_other_texts(texts, ids):
    seen, place = EarlierTexts(), (0, 0)
    for text in texts:
        seen.add(text)
    for n, token in enumerate(ids, 1):
        place = seen.index.step(*place, token)
        assert place[1] == longest(ids[:n], texts)
        if place[1]:
            at = seen.index.end_of(place[0])
            assert seen.index.text[at - place[1] : at] == ids[n - place[1] : n]
            assert TEXT_SEPARATOR not in seen.index.after(at, 5)


def test_old_texts_are_dropped_together():
    seen = EarlierTexts(most=10)
    first = seen.index
    seen.add(range(6))
    assert seen.index is first
    seen.add(range(6))
    assert seen.index is not first
    assert seen.index.text == list(range(6))
    assert seen.index.after(4, 9) == [4, 5, 4, 5, 4, 5, 4, 5, 4]
    assert seen.index.after(6, 9) == []
