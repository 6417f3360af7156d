"""Pages found by their tokens, against a list of texts."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from exl2nb.cache.pages import PageTable
from exl2nb.cache.prefix import PrefixIndex, chain_key, root_key

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
    table = PageTable(64)
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
    table = PageTable(3)
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
