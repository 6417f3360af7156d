"""Rows of token ids from text, and the logits of every position of them."""

import pytest
import torch

from exl2nb.core.errors import ContextOverflow, OptionError
from exl2nb.eval import rows as module
from exl2nb.eval.rows import logit_rows, logits, read_text, token_rows

from .fakes import TableModel, random_table


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
    with pytest.raises(OptionError, match=r"2 rows of 20 need 40 tokens, found 11; use rows of at most 5 tokens or give more text"):
        token_rows(Letters(), "abcdefghij", rows=2, length=20)
    with pytest.raises(OptionError, match=r"20 rows of 20 need 400 tokens, found 11; give more text"):
        token_rows(Letters(), "abcdefghij", rows=20, length=20)
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


IDS = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10] * 4, [10, 9, 8, 7, 6, 5, 4, 3, 2, 1] * 4])


def expected(model):
    return torch.stack([model.table[row] + torch.arange(len(row))[:, None] * torch.arange(11) * model.slope for row in IDS])


def test_all_positions_of_all_rows():
    model = TableModel(random_table(0), slope=0.5)
    result = logits(model, IDS)
    assert result.shape == (2, 40, 11)
    assert torch.equal(result, expected(model))


def test_pieces_change_nothing(monkeypatch):
    model = TableModel(random_table(0), slope=0.5)
    monkeypatch.setattr(module, "PIECE_BYTES", 1)  # 16 tokens, the least
    assert torch.equal(torch.stack(list(logit_rows(model, IDS))), expected(model))
    assert model.calls[:3] == [(0, 16, 16), (16, 16, 32), (32, 8, 40)]


def test_every_row_starts_from_nothing_and_reports():
    events = []
    model = TableModel(random_table(0))
    logits(model, IDS, events.append)
    assert model.calls == [(0, 40, 40), (0, 40, 40)]
    assert [(e.stage, e.done, e.state) for e in events] == [
        ("logits", 0, "running"),
        ("logits", 1, "running"),
        ("logits", 2, "running"),
        ("logits", 2, "done"),
    ]


@pytest.mark.parametrize(
    ("ids", "error", "words"),
    [
        (torch.tensor([[1, 11]]), OptionError, "found id 11; expected 0..10"),
        (torch.tensor([[1, -1]]), OptionError, "found id -1"),
        (torch.tensor([1, 2]), OptionError, r"expected int32 or int64 \(rows, tokens\)"),
        (torch.tensor([[1.0, 2.0]]), OptionError, "float32"),
        (torch.zeros(0, 4, dtype=torch.int32), OptionError, "at least 1"),
        (torch.zeros(1, 65, dtype=torch.int32), ContextOverflow, "65 tokens; the model's context is 64"),
    ],
)
def test_ids_are_checked(ids, error, words):
    model = TableModel(random_table(0))
    with pytest.raises(error, match=words):
        logits(model, ids)
    assert model.calls == []
