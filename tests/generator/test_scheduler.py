"""Rules of the scheduler and the tensors of its steps, without a model or a thread."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exl2nb.generator.batch_buffers import BatchBuilder
from exl2nb.generator.pager import Pager
from exl2nb.generator.request import Request
from exl2nb.generator.scheduler import MIN_CHUNK, Scheduler
from exl2nb.generator.sequence import RunningRequest
from exl2nb.model import batch as model_batch
from exl2nb.model.runner import GPU_CHUNKS, HOST_CHUNKS
from exl2nb.sampling.draw import Sampled

from . import fakes

TOKENIZER = fakes.tokenizer()
SIZE = 8  # tokens a page: small, so that borders are met often


def pager_of(num_pages):
    return Pager(num_pages, page_size=SIZE, copy=lambda source, target: None)


def sequence(length, count, context=10_000):
    return RunningRequest(Request.of(range(3, 3 + length), where="test", max_tokens=count, ignore_eos=True), TOKENIZER, context=context)


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_every_schedule_keeps_the_rules(data):
    """FIFO, no page twice, no token twice or skipped, budgets kept, the batch as the model's own builder makes it; and it ends."""
    pager = pager_of(data.draw(st.integers(4, 20)))
    pager.reuse, pages = data.draw(st.booleans()), pager.table
    scheduler = Scheduler(pager, max_sequences=data.draw(st.integers(1, 5)))
    builder = BatchBuilder(max_tokens=HOST_CHUNKS.max_tokens + 5, max_sequences=5, max_pages=20, page_size=SIZE)
    sizes = st.tuples(st.integers(1, 20), st.integers(1, 12))
    sequences = [sequence(*size) for size in data.draw(st.lists(sizes, min_size=1, max_size=12))]
    for one in sequences:
        scheduler.check(one)
        scheduler.add(one)
    admitted = []
    for _ in range(1000):
        if not scheduler.busy:
            break
        spans = scheduler.schedule()
        assert spans
        admitted += [one for one in scheduler.running if one not in admitted]
        held = [page for one in scheduler.running for page in one.pages]
        assert all(pages.count(page) == held.count(page) for page in range(pages.num_pages))
        assert len(scheduler.running) <= scheduler.max_sequences
        assert sum(span.length for span in spans if span.length > 1) <= scheduler.chunk
        check_batch(builder, spans, pager.changes)
        for span in spans:
            assert span.start == span.sequence.computed
            span.sequence.computed += span.length
            assert span.rows == (span.sequence.pending == 0)
            pager.publish(span.sequence)
            if span.rows and span.sequence.append(Sampled(5, 0.0, 1)):
                scheduler.remove(span.sequence)
        if data.draw(st.booleans()):
            scheduler.remove(data.draw(st.sampled_from(sequences)))
    assert not scheduler.busy
    assert pages.num_free == pages.num_pages
    order = [sequences.index(one) for one in admitted]
    assert order == sorted(order)


def check_batch(builder, spans, changes):
    ours = builder.build(spans, changes).batch
    theirs = model_batch.Batch.build(
        [
            model_batch.SequenceSlice(
                ids=s.sequence.ids[s.start : s.start + s.length],
                start=s.start,
                pages=s.sequence.pages,
                logit_rows="last" if s.rows else "none",
            )
            for s in spans
        ],
        page_size=SIZE,
    )
    assert ours.long is theirs.long is ours.adapters is theirs.adapters is ours.pictures is theirs.pictures is None
    for name in set(ours.__dataclass_fields__) - {"long", "adapters", "pictures"}:
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


def test_the_same_shape_is_the_same_batch():
    """Decoding allocates nothing."""
    scheduler = Scheduler(pager_of(8), max_sequences=2)
    builder = BatchBuilder(max_tokens=HOST_CHUNKS.max_tokens + 5, max_sequences=2, max_pages=8, page_size=SIZE)
    one = sequence(4, 20)
    scheduler.add(one)
    batches = []
    for _ in range(4):
        spans = scheduler.schedule()
        batches.append(builder.build(spans, scheduler.pager.changes).batch)
        one.computed += spans[0].length
        one.append(Sampled(5, 0.0, 1))
    assert batches[1] is batches[2] is batches[3]


def test_chunk_follows_the_speed():
    scheduler = Scheduler(pager_of(8), max_sequences=2)
    for _ in range(10):
        scheduler.measured(scheduler.chunk, scheduler.chunk / 20_000)
    assert scheduler.chunk == HOST_CHUNKS.max_tokens
    for _ in range(10):
        scheduler.measured(scheduler.chunk, scheduler.chunk / 100)
    assert scheduler.chunk == MIN_CHUNK
    scheduler.measured(1, 1.0)
    assert scheduler.chunk == MIN_CHUNK


def test_a_gpu_takes_whole_pieces_however_slow():
    scheduler = Scheduler(pager_of(2000), max_sequences=8, chunks=GPU_CHUNKS)
    assert scheduler.chunk == 2048
    scheduler.measured(2048, 10.0)
    assert scheduler.chunk == 2048
    scheduler.chunk = MIN_CHUNK  # a piece did not fit the memory
    for want in (64, 128, 256, 512, 1024, 2048, 2048):
        scheduler.measured(scheduler.chunk, 0.001)
        assert scheduler.chunk == want
    for speed, want in ((10_000, 1024), (30_000, 1024), (50_000, 2048), (10**6, 2048)):  # beside decodes, with one of few lengths
        scheduler.measured(speed, 1.0)
        assert scheduler.budget(decoding=True) == want
    scheduler.chunk = MIN_CHUNK  # also beside decodes
    assert scheduler.budget(decoding=True) == MIN_CHUNK


def test_prompts_of_one_step():
    """A processor shares a step among the prompts; a GPU reads few of them at a time."""
    for chunks, want in ((HOST_CHUNKS, [32, 32]), (GPU_CHUNKS, [1024, 1024])):
        scheduler = Scheduler(pager_of(2000), max_sequences=8, chunks=chunks)
        for i in range(4):
            scheduler.add(RunningRequest(Request.of(range(3 + i, 2003 + i), where="test", max_tokens=1), TOKENIZER, context=10_000))
        assert [span.length for span in scheduler.schedule()] == want
