import dataclasses

import pytest
import torch

from exl2nb.model.batch import Batch, Span


def test_single():
    batch = Batch.single([5, 6, 7], start=255, pages=[4, 2], logit_rows="all")
    assert batch.input_ids.tolist() == [5, 6, 7]
    assert batch.positions.tolist() == [255, 256, 257]
    assert batch.slot_mapping.tolist() == [4 * 256 + 255, 2 * 256, 2 * 256 + 1]
    assert batch.block_table.tolist() == [[4, 2]]
    assert batch.cu_seqlens.tolist() == [0, 3]
    assert batch.context_lens.tolist() == [258]
    assert batch.logit_rows.tolist() == [0, 1, 2]
    assert Batch.single([5, 6], start=0, pages=[0], logit_rows="last").logit_rows.tolist() == [1]
    assert {getattr(batch, f.name).dtype for f in dataclasses.fields(batch) if f.name != "long"} == {torch.int32}
    assert batch.long is None and Batch.single([5], start=0, pages=[0], long=False).long.tolist() == [0]


def test_build_pads_short_rows():
    batch = Batch.build([Span(ids=[1], start=300, pages=[7, 8]), Span(ids=[2, 3], start=0, pages=[1], logit_rows="none")])
    assert batch.block_table.tolist() == [[7, 8], [1, 0]]
    assert batch.cu_seqlens.tolist() == [0, 1, 3]
    assert batch.logit_rows.tolist() == [0]
    assert batch.slot_mapping.tolist() == [8 * 256 + 44, 256, 257]


def test_misuse_is_an_assertion():
    with pytest.raises(AssertionError, match="3 tokens do not fit 0 pages"):
        Batch.single([1], start=2, pages=[])
    with pytest.raises(AssertionError, match="a span has tokens"):
        Batch.single([], start=0, pages=[1])
    with pytest.raises(AssertionError, match="a batch is int32"):
        dataclasses.replace(Batch.single([1], start=0, pages=[0]), positions=torch.zeros(1, dtype=torch.int64))


def test_select_is_what_the_chosen_spans_build():
    spans = [
        Span(ids=[5, 6, 7], start=0, pages=[1], logit_rows="all"),
        Span(ids=[8], start=300, pages=[2, 3]),
        Span(ids=[9, 10], start=4, pages=[4], logit_rows="none", long=False),
        Span(ids=[11], start=9, pages=[5]),
    ]
    whole, want = Batch.build(spans), Batch.build([spans[0], spans[3]])
    got, tokens, rows = whole.select([0, 3])
    assert tokens.tolist() == [0, 1, 2, 6]
    assert rows.tolist() == [0, 1, 2, 4]
    for name in ("input_ids", "positions", "slot_mapping", "cu_seqlens", "context_lens", "logit_rows"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert torch.equal(got.block_table[:, :1], want.block_table)
    assert whole.select([1, 2])[0].logit_rows.tolist() == [0]
