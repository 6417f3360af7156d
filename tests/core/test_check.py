"""Exercises: right, wrong with a hint, answers of another kind."""

import pytest
import torch

import exl2nb as ex
from exl2nb.core.errors import OptionError


@pytest.mark.parametrize(
    ("answer", "right", "words"),
    [
        (7, 7, "Right. So it is."),
        (7.01, 7, "Right. So it is."),
        (torch.tensor(7.0), 7, "Right. So it is."),
        (6, 7, "Not yet: 6 is too small; think."),
        (9.5, 7, "Not yet: 9.5 is too large; think."),
        (None, 7, "Not yet: think."),
        (..., 7, "Not yet: think."),
        (float("nan"), 7, "Not yet: that is no number; think."),
        ("seven", 7, "Not yet: 'seven' is not it; think."),
        ([2, 1], [1, 2], "Not yet: [2, 1] is not it; think."),
        ((3, 1), lambda found: found[0] > found[1], "Right. So it is."),
        (3, lambda found: found[0] > 2, "Not yet: 3 is not it; think."),
    ],
)
def test_words(answer, right, words):
    found = ex.check(answer, right, hint="think.", why="So it is.")
    assert repr(found) == words and bool(found) == found.right == words.startswith("Right")


def test_what_a_reader_types_is_data():
    assert "<b>x" not in ex.check("<b>x", 1, hint="a number")._repr_html_()
    with pytest.raises(OptionError, match="hint is ''"):
        ex.check(1, 1, hint="")
    with pytest.raises(OptionError, match="tolerance is 3"):
        ex.check(1, 1, hint="x", tolerance=3)
