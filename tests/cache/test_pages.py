import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exl2nb.cache.pages import PageAllocator, PrefixIndex, chain_key, root_key
from exl2nb.core.errors import OutOfPages


def test_out_of_pages_names_the_numbers_and_takes_nothing():
    pages = PageAllocator(3)
    pages.allocate(1)
    with pytest.raises(OutOfPages, match="request needs 3 pages, 2 free of 3; lower max_tokens or raise cache_tokens"):
        pages.allocate(3)
    assert pages.num_free == 2
    assert sorted(pages.allocate(2)) == [1, 2]
    assert pages.allocate(0) == []


def test_double_free_and_share_of_a_free_page_are_assertions():
    pages = PageAllocator(2)
    ids = pages.allocate(1)
    pages.free(ids)
    with pytest.raises(AssertionError, match="double free of page 0"):
        pages.free(ids)
    with pytest.raises(AssertionError, match="share of a free page"):
        pages.share(ids)
    with pytest.raises(AssertionError):
        pages.count(2)
    with pytest.raises(AssertionError):
        pages.free([-1])
    assert pages.num_free == 2


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 12), st.lists(st.tuples(st.sampled_from(["allocate", "share", "free"]), st.integers(0, 6)), max_size=60))
def test_counts_agree_with_a_model_of_holders(num_pages, steps):
    pages, holders = PageAllocator(num_pages), []
    for action, n in steps:
        free = num_pages - len({page for held in holders for page in held})
        if action == "allocate":
            if n > free:
                with pytest.raises(OutOfPages):
                    pages.allocate(n)
            else:
                new = pages.allocate(n)
                assert len(set(new)) == n
                assert not set(new) & {page for held in holders for page in held}
                holders.append(new)
        elif holders:
            held = holders[n % len(holders)]
            if action == "share":
                pages.share(held)
                holders.append(list(held))
            else:
                holders.pop(n % len(holders))
                pages.free(held)
        flat = [page for held in holders for page in held]
        assert pages.num_free == num_pages - len(set(flat))
        assert [pages.count(page) for page in range(num_pages)] == [flat.count(page) for page in range(num_pages)]
    for held in holders:
        pages.free(held)
    assert sorted(pages.allocate(num_pages)) == list(range(num_pages))


def test_kept_pages_count_as_free_and_the_oldest_goes_first():
    pages, gone = PageAllocator(4), []
    pages.on_evict = gone.append
    old, new = pages.allocate(2), pages.allocate(1)
    for page in (*old, *new):
        pages.keep(page)
    pages.free(old)
    pages.free(new)
    assert (pages.num_free, pages.num_cached, [pages.state(page) for page in range(4)]) == (4, 3, ["cached"] * 3 + ["free"])
    assert pages.allocate(2) == [3, old[1]]  # the free one, then the end of the text that was used longest ago
    assert (gone, pages.evictions) == ([old[1]], 1)
    pages.share([old[0]])
    assert pages.state(old[0]) == "used"
    pages.drop(new[0])
    assert pages.state(new[0]) == "free"
    with pytest.raises(AssertionError, match="no references"):
        pages.keep(new[0])
    assert pages.last_use(old[0]) > pages.last_use(new[0]) > 0


# ---- Pages found by their tokens, against a list of texts.

SIZE = 4
ROOT = root_key("fp16")


def keys_of(ids):
    keys = []
    for at in range(0, len(ids) - SIZE + 1, SIZE):
        keys.append(chain_key(keys[-1] if keys else ROOT, ids[at : at + SIZE]))
    return keys


def publish(index, table, ids):
    keys, pages = keys_of(ids), table.allocate(-(-len(ids) // SIZE))
    for i, page in enumerate(pages):
        index.publish(page, keys[i - 1] if i else ROOT, ids[i * SIZE : (i + 1) * SIZE], keys[i] if i < len(keys) else None)
    table.free(pages)


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=1, max_size=6), st.lists(st.integers(0, 1), max_size=14))
@settings(max_examples=150, deadline=None)
def test_match_is_the_longest_common_beginning(texts, wanted):
    table = PageAllocator(64)
    index = PrefixIndex(table, SIZE)
    for text in texts:
        publish(index, table, text)
    found = index.match(wanted, keys_of(wanted), ROOT, limit=len(wanted))
    common = max(next((i for i, (a, b) in enumerate(zip(t, wanted)) if a != b), min(len(t), len(wanted))) for t in texts)
    assert len(found.pages) * SIZE + found.common == common
    for i, page in enumerate(found.pages):
        assert index.entry(page).tokens.tolist() == wanted[i * SIZE : (i + 1) * SIZE]


def test_other_salt_other_key():
    assert root_key("fp16") != root_key("q4")
    assert chain_key(root_key("a"), [1, 2]) != chain_key(root_key("b"), [1, 2])


def test_evicted_and_overwritten_pages_are_forgotten():
    table = PageAllocator(3)
    index = PrefixIndex(table, SIZE)
    text = random.Random(0).choices(range(9), k=10)
    publish(index, table, text)
    assert len(index) == 3
    held = table.allocate(1)
    assert len(index) == 2  # the end of the text was evicted
    assert index.match(text, keys_of(text), ROOT, limit=10).common == 0
    pages = index.match(text, keys_of(text), ROOT, limit=10).pages
    table.share(pages)
    index.cut(pages[1], 2)
    assert index.match(text, keys_of(text), ROOT, limit=10) == (pages[:1], pages[1], 2)
    index.cut(pages[1], 0)
    assert index.filled(pages[1]) == 0
    table.free([*pages, *held])
    assert table.num_free == 3
