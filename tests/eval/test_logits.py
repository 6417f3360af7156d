import pytest
import torch

from exl2nb.core.errors import ContextOverflow, OptionError
from exl2nb.eval import logits as module
from exl2nb.eval.logits import logit_rows, logits

from .fakes import TableModel, random_table

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
