import pytest
import torch

from exl2nb.core.errors import OptionError
from exl2nb.eval.text import read_text, token_rows


class Letters:
    """One id a character, and BOS (99) at the very front."""

    def encode(self, text, add_special=True):
        return [99, *(ord(c) - 97 for c in text)]


class Greedy:
    """Up to 100 characters a token: more merging than any estimate of characters a token allows for."""

    def encode(self, text, add_special=True):
        return list(range(len(text) // 100))


def test_rows_are_consecutive_with_one_bos():
    rows = token_rows(Letters(), "abcdefghij", rows=2, length=4)
    assert rows.dtype == torch.int32
    assert rows.tolist() == [[99, 0, 1, 2], [3, 4, 5, 6]]


def test_rows_do_not_depend_on_how_much_text_follows():
    long = "abcdefghijklmnopqrstuvwxyz" * 500
    assert token_rows(Letters(), long, rows=3, length=5).equal(token_rows(Letters(), long[:100], rows=3, length=5))


def test_reads_on_when_tokens_are_long():
    assert token_rows(Greedy(), "x" * 100_000, rows=10, length=50)[-1, -1] == 499


def test_too_short_a_text_says_what_would_fit():
    with pytest.raises(OptionError, match=r"3 rows of 5 need 15 tokens, found 11; use at most 2 rows of 5"):
        token_rows(Letters(), "abcdefghij", rows=3, length=5)
    with pytest.raises(OptionError, match="rows of at most 4 tokens"):
        token_rows(Letters(), "abc", rows=1, length=5)


@pytest.mark.parametrize("bad", [{"rows": 0}, {"rows": 1.5}, {"rows": True}, {"length": 1}, {"length": "8"}])
def test_sizes_are_checked(bad):
    with pytest.raises(OptionError, match=next(iter(bad))):
        token_rows(Letters(), "abc", **{"rows": 1, "length": 2, **bad})


def test_read_text(tmp_path):
    (tmp_path / "a.txt").write_text("caf\u00e9", encoding="utf-8")
    assert read_text(tmp_path / "a.txt") == "caf\u00e9"
    (tmp_path / "b.txt").write_bytes(b"ab\xff")
    (tmp_path / "c.txt").write_text(" \n")
    for name, words in (("b.txt", "byte 2 is not UTF-8"), ("c.txt", "no text"), ("d.txt", "No such file")):
        with pytest.raises(OptionError, match=words):
            read_text(tmp_path / name)
