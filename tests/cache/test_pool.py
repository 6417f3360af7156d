import weakref

import pytest
import torch

from exl2nb.cache.pool import KVCache
from exl2nb.cache.spec import CacheSpec
from exl2nb.core.errors import OptionError


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


@pytest.mark.parametrize(
    "change", [{"num_pages": 0}, {"num_pages": 2.0}, {"head_dim": -1}, {"num_layers": True}, {"page_size": 512}, {"num_kv_heads": "2"}]
)
def test_wrong_number_is_named(change):
    with pytest.raises(OptionError, match=next(iter(change))):
        CacheSpec(**{"num_layers": 1, "num_kv_heads": 1, "head_dim": 64, "num_pages": 1, **change})


def test_unknown_mode_lists_the_known_ones():
    with pytest.raises(OptionError, match="unknown cache mode 'q3'; known: fp16, fp32"):
        CacheSpec(1, 1, 64, 1, "q3")


def test_a_cache_larger_than_the_machine_is_refused_by_size():
    with pytest.raises(OptionError, match=r"need \d+.* GiB, cpu has .* GiB; lower"):
        KVCache(CacheSpec(1024, 1024, 256, 1 << 20))
