"""Cache modes, sizes and pools."""

import itertools
import weakref

import pytest
import torch

from exl2nb.cache.pool import LARGE_BYTES, KVCache
from exl2nb.cache.spec import CACHE_MODES, PAGE_STORAGES, CacheSpec, parse_mode, storages_of
from exl2nb.core.errors import OptionError


@pytest.mark.parametrize(
    ("given", "name", "stored"),
    [
        ("Q4", "q4", ("q4", "q4")),
        ("k8v4", "q6", ("q8", "q4")),
        ("K4V4", "q4", ("q4", "q4")),
        ("k16v16", "fp16", ("fp16", "fp16")),
        ("k4v8", "k4v8", ("q4", "q8")),
        ("k16v8", "k16v8", ("fp16", "q8")),
        ("fp8", "fp8", ("fp8", "fp8")),
    ],
)
def test_two_names_of_one_thing_are_one(given, name, stored):
    assert parse_mode(given) == name
    assert storages_of(given) == stored
    assert CacheSpec(1, 1, 64, 1, given) == CacheSpec(1, 1, 64, 1, name)


def test_every_mode_names_storages_that_exist():
    assert all(kind in PAGE_STORAGES for pair in CACHE_MODES.values() for kind in pair)


@pytest.mark.parametrize("wrong", ["q5", "k6v4", "k8", "v8k4", "", "k8v4 ", None, 4, "fp64"])
def test_other_modes_are_refused(wrong):
    with pytest.raises(OptionError, match=r"load: unknown cache mode .*; known: fp32, fp16, fp8, q8, q6, q4, or bits of K and V apart"):
        parse_mode(wrong, where="load")
    with pytest.raises(OptionError, match="unknown cache mode"):
        CacheSpec(1, 1, 64, 1, wrong)


@pytest.mark.parametrize(("mode", "dtype", "size"), [("fp16", torch.float16, 2), ("fp32", torch.float32, 4)])
def test_pools(mode, dtype, size):
    spec = CacheSpec(3, 2, 64, 5, mode)
    cache = KVCache(spec)
    assert len(cache.k) == len(cache.v) == 3
    assert {(pool.shape, pool.dtype) for pool in cache.k + cache.v} == {((5, 2, 256, 64), dtype)}
    assert spec.total_bytes == sum(pool.nbytes for pool in cache.k + cache.v) == 5 * spec.page_bytes == 5 * 256 * 2 * 64 * 2 * 3 * size
    assert spec.num_tokens == 1280
    assert "1280 tokens" in repr(cache)
    assert not any(pool.any() for pool in cache.k + cache.v)
    pool = weakref.ref(cache.k[0])
    cache.close()
    assert pool() is None
    assert "closed" in cache._repr_html_()


@pytest.mark.parametrize(
    ("mode", "name", "bits", "dtypes"),
    [
        ("q8", "q8", 8.5, (torch.uint8, torch.uint8)),
        ("q6", "q6 (K q8, V q4)", 6.5, (torch.uint8, torch.uint8)),
        ("q4", "q4", 4.5, (torch.uint8, torch.uint8)),
        ("fp8", "fp8", 8.5, (torch.float8_e4m3fn, torch.float8_e4m3fn)),
        ("k4v8", "k4v8 (K q4, V q8)", 6.5, (torch.uint8, torch.uint8)),
        ("k16v4", "k16v4 (K fp16, V q4)", 10.25, (torch.float16, torch.uint8)),
    ],
)
@pytest.mark.parametrize("head_dim", [64, 96])
def test_coded_pools(mode, name, bits, dtypes, head_dim):
    spec = CacheSpec(3, 2, head_dim, 5, mode)
    cache = KVCache(spec)
    assert (cache.k[0].dtype, cache.v[0].dtype) == dtypes
    assert all(pool.shape[:2] == (5, 2) for pool in cache.k + cache.v)
    assert spec.total_bytes == sum(pool.nbytes for pool in cache.k + cache.v) == 5 * spec.page_bytes == 1280 * spec.token_bytes
    assert spec.bits == bits
    assert not any(pool.view(torch.uint8).any() for pool in cache.k + cache.v)
    assert repr(cache) == f"KVCache(1280 tokens, {name}, {spec.total_bytes / 2**20:.1f} MiB on cpu)"
    page = cache._repr_html_()
    assert name in page
    assert f"{bits:g} bits a number" in page


def test_small_groups_cost_more_scales():
    assert CacheSpec(1, 1, 80, 1, "q4").bits == 5  # groups of 16
    assert CacheSpec(1, 1, 40, 1, "q4").bits == 6  # groups of 8


@pytest.mark.parametrize("mode", ["fp16", "q6", "fp8"])
def test_copy_page(mode):
    cache = KVCache(CacheSpec(2, 2, 32, 4, mode))
    pools = cache.k + cache.v
    for i, pool in enumerate(pools):
        pool.view(torch.uint8).copy_(torch.randint(0, 256, pool.view(torch.uint8).shape, generator=torch.Generator().manual_seed(i)))
    before = [pool.view(torch.uint8).clone() for pool in pools]
    cache.copy_page(1, 3)
    cache.copy_page(2, 2)
    for pool, old in zip(pools, before):
        assert torch.equal(pool.view(torch.uint8), old[[0, 1, 2, 1]])
    for wrong in (4, -1, True, 1.0):
        with pytest.raises(OptionError, match=r"copy_page: page is .*; expected 0 to 3"):
            cache.copy_page(0, wrong)


@pytest.mark.parametrize("large", [True, False])
def test_a_larger_cache_with_and_without_large_pages(large, monkeypatch):
    """Zeros, one piece of memory, gone when the last pool is."""
    if not large:
        monkeypatch.setattr("exl2nb.cache.pool.large_pages", lambda size: None)
    spec = CacheSpec(3, 2, 64, 20, "fp16")
    assert spec.total_bytes > LARGE_BYTES
    cache = KVCache(spec)
    pools = cache.k + cache.v
    assert not any(one.any() for one in pools)
    assert [b.data_ptr() - a.data_ptr() for a, b in itertools.pairwise(pools)] == [pools[0].nbytes] * 5
    pools[0][3] = 1
    cache.copy_page(3, 4)
    assert pools[0][3:5].all()
    assert not pools[0][5:].any()
    assert not pools[1].any()


@pytest.mark.parametrize(
    "change", [{"num_pages": 0}, {"num_pages": 2.0}, {"head_dim": -1}, {"num_layers": True}, {"page_size": 512}, {"num_kv_heads": "2"}]
)
def test_wrong_number_is_named(change):
    with pytest.raises(OptionError, match=next(iter(change))):
        CacheSpec(**{"num_layers": 1, "num_kv_heads": 1, "head_dim": 64, "num_pages": 1, **change})


@pytest.mark.parametrize("mode", ["q4", "q8", "fp8", "k16v4"])
def test_codes_need_their_sizes(mode):
    with pytest.raises(OptionError, match=f"mode {mode} needs a head_dim that is a multiple of 8, found 12; use fp16"):
        CacheSpec(1, 1, 12, 1, mode)
    with pytest.raises(OptionError, match=f"mode {mode} needs pages of 256 tokens, found 16"):
        CacheSpec(1, 1, 64, 1, mode, page_size=16)
    CacheSpec(1, 1, 12, 1, "fp16")


def test_a_cache_larger_than_the_machine_is_refused_by_size():
    with pytest.raises(OptionError, match=r"need \d+.* GiB, cpu has .* GiB; lower"):
        KVCache(CacheSpec(1024, 1024, 256, 1 << 20))
