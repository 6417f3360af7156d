"""A model in ranks: the logits of the whole one, for every architecture and several counts of ranks; here each rank is a thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from exl2nb import ops
from exl2nb.cache.pool import KVCache
from exl2nb.core.errors import OptionError
from exl2nb.model.batch import Batch
from exl2nb.model.loader import load_model
from exl2nb.model.parallel import RENDEZVOUS_HOST, RankModel, channel_bounds, make_store, read_part, slice_bounds
from exl2nb.model.rope import RopeOverride
from exl2nb.ops.gpu import unpack_half
from exl2nb.quant.exl2 import Exl2Tensors

from .tiny import random_exl2
from .zoo import ZOO, build, write, write_exl2

REFUSED = {"olmo2": "a norm over all heads"}


class Threads:
    """The exchanges of `model.parallel.RankGroup` among threads of one process."""

    def __init__(self, size: int) -> None:
        self.size, self._barrier = size, threading.Barrier(size, timeout=60)
        self._pieces: list[torch.Tensor | None] = [None] * size

    def of(self, rank: int) -> _Member:
        return _Member(self, rank)

    def exchange(self, rank: int, piece: torch.Tensor) -> list[torch.Tensor]:
        self._pieces[rank] = piece.clone()
        self._barrier.wait()
        found = [piece for piece in self._pieces if piece is not None]
        self._barrier.wait()
        return found


class _Member:
    def __init__(self, group: Threads, rank: int) -> None:
        self._group, self.rank, self.size = group, rank, group.size

    def gather(self, piece: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        assert piece.shape[1] == widths[self.rank]
        return torch.cat(self._group.exchange(self.rank, piece), dim=1)

    def add(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(torch.stack(self._group.exchange(self.rank, x)).sum(0))


def ranks(directory: Path, size: int, *, widen: bool = True) -> list[RankModel]:
    group, models = Threads(size), []
    for rank in range(size):
        config, network, context = read_part(directory, rank, size, context=None, rope=RopeOverride(), widen=widen)
        models.append(RankModel(config, network, group.of(rank), context=context))  # pyright: ignore[reportArgumentType]
    return models


def logits_of(models: Sequence[RankModel], steps: Sequence[Batch]) -> list[torch.Tensor]:
    """Of every rank."""

    def run(model: RankModel) -> torch.Tensor:
        cache = KVCache(model.cache_spec(512, mode="fp32"))
        return torch.cat([model.run(batch, cache) for batch in steps])

    with ThreadPoolExecutor(len(models)) as pool:
        return [*pool.map(run, models)]


def steps(vocab: int) -> list[Batch]:
    """A prompt, a second piece of it, one token."""
    ids = [(7 * i + 3) % vocab for i in range(40)]
    return [Batch.single(ids[a:b], start=a, pages=[1, 0], logit_rows="all") for a, b in ((0, 23), (23, 39), (39, 40))]


@pytest.mark.parametrize("name", [name for name in ZOO if name not in REFUSED])
def test_ranks_compute_what_the_whole_model_does(name: str, tmp_path: Path) -> None:
    folder = write(name, build(name), tmp_path)
    whole = load_model(folder, weights="fp32")
    batches = steps(whole.config.vocab_size)
    cache = KVCache(whole.cache_spec(512, mode="fp32"))
    expected = torch.cat([whole.forward(batch, cache) for batch in batches])
    size = next(size for size in (2, 1) if whole.config.num_kv_heads % size == 0)
    found = logits_of(ranks(folder, size), batches)
    assert all(torch.equal(found[0], other) for other in found[1:]), "every rank has the same bits"
    torch.testing.assert_close(found[0], expected, rtol=0, atol=2e-5 * float(expected.std()) + 2e-6)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe-bias", "cohere"])
def test_exl2_files_are_cut_without_changing_a_code(name: str, size: int, tmp_path: Path) -> None:
    shape = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "hidden_size": 128, "intermediate_size": 192}
    moe = {"moe_intermediate_size": 160} if "moe" in name else {}
    folder = write_exl2(write(name, build(name, **shape, **moe), tmp_path / "dense"), tmp_path / "exl2")
    for weights, tolerance in (("fp32", 2e-5), ("auto", 5e-3)):  # kernels round a rank's inputs in blocks of its own
        whole = load_model(folder, weights=weights)
        batches = steps(whole.config.vocab_size)
        cache = KVCache(whole.cache_spec(512, mode="fp32"))
        expected = torch.cat([whole.forward(batch, cache) for batch in batches])
        found = logits_of(ranks(folder, size, widen=weights == "fp32"), batches)
        assert all(torch.equal(found[0], other) for other in found[1:])
        torch.testing.assert_close(found[0], expected, rtol=0, atol=tolerance * float(expected.std()))
        again = logits_of(ranks(folder, size, widen=weights == "fp32"), batches)
        assert torch.equal(found[0], again[0])


def test_columns_and_rows_of_a_matrix() -> None:
    for seed in range(4):
        matrix = random_exl2(256, 96, (8, 6, 5, 4, 3, 2), seed=seed)
        whole, perm = matrix.reconstruct(), matrix.perm
        index = torch.randperm(96, generator=torch.Generator().manual_seed(seed))[: 20 + 13 * seed]
        columns = matrix.columns(index).validate("columns")
        assert torch.equal(columns.reconstruct()[:, : len(index)], whole[:, index])
        for first, last in ((0, 256), (0, 32), (32, 96), (96, 256), (224, 256)):
            rows = matrix.rows(first, last).validate("rows")
            assert torch.equal(rows.reconstruct(), whole[perm[first:last]])
    assert isinstance(matrix, Exl2Tensors)


def test_bounds() -> None:
    assert slice_bounds(10, 3) == [0, 3, 6, 10]
    assert slice_bounds(131, 2, 32) == [0, 64, 131]
    assert slice_bounds(96, 3, 32) == [0, 32, 64, 96]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_channels_are_divided_by_bits_between_groups(size: int) -> None:
    """Those of Llama-2-70B at 2.55 bits: the first part has fewer, since its rows of down are wider."""
    groups = [(6, 32)] * 45 + [(3, 64)] * 90 + [(2, 64)] * 335 + [(2, 32)]
    limits, beside = channel_bounds(groups, size, 4.4), 4.4
    starts = [0, *accumulate(rows for _, rows in groups)]
    assert limits[0] == 0 and limits[-1] == starts[-1] == 28672
    assert set(limits) <= set(starts), "every part begins with a group"
    bits = [bits for bits, rows in groups for _ in range(rows)]
    parts = [sum(bits[a:b]) + beside * (b - a) for a, b in pairwise(limits)]
    assert max(parts) <= 1.02 * sum(parts) / size
    even = [sum(bits[a:b]) + beside * (b - a) for a, b in pairwise(slice_bounds(28672, size, 32))]
    assert max(even) > 1.05 * sum(even) / size, "what equal numbers of channels would cost"


def test_large_groups_are_divided_within() -> None:
    assert channel_bounds([(4, 768)], 2, 8.0) == [0, 384, 768]
    assert channel_bounds([(8, 128), (2, 128)], 4, 0.5) == [0, 32, 96, 128, 256]
    assert channel_bounds([(8, 32), (2, 96)], 4, 0.0) == [0, 32, 64, 96, 128], "a unit for each rank at least"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_parts_that_begin_within_a_group(size: int, device: str) -> None:
    """The down matrix of Llama-2-70B at 4 bits, few of its outputs: packed rows of every rank are those of the file."""
    table, outputs, rng = [(8, 32)] * 45 + [(4, 128)] * 212 + [(4, 96)], 64, torch.Generator().manual_seed(0)
    starts = [0, *accumulate(rows * bits // 32 for bits, rows in table)]
    words = [
        torch.randint(-(2**31), 2**31 - 1, (n, width), generator=rng) for n, width in ((starts[-1], outputs), (len(table), outputs // 8))
    ]
    whole = Exl2Tensors(
        q_weight=words[0].int(),
        q_scale=words[1].int(),
        q_scale_max=torch.rand(len(table), generator=rng).half() + 0.5,
        q_groups=torch.tensor([value for (bits, _), at in zip(table, starts) for value in (bits, at)], dtype=torch.int16),
        q_invperm=torch.randperm(28672, generator=rng).int(),
    )
    expected, limits = whole.reconstruct()[whole.perm].float(), slice_bounds(28672, size, 32)
    for first, last in pairwise(limits):
        part = whole.rows(first, last)
        blob = ops.pack_exl2(
            *(x.to(device) for x in (part.q_weight, part.q_scale, part.q_scale_max, part.q_groups, part.q_invperm)), out_features=outputs
        )
        found = unpack_half(blob).float().cpu() if device == "cuda" else ops.unpack(blob)
        torch.testing.assert_close(found[:, :outputs], expected[first:last], rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize(("name", "message"), [*REFUSED.items()])
def test_what_cannot_be_divided_is_refused_by_name(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=message):
        ranks(write(name, build(name), tmp_path), 2)


def test_counts_that_do_not_divide(tmp_path: Path) -> None:
    folder = write("llama", build("llama"), tmp_path)
    with pytest.raises(OptionError, match="4 heads and 2 KV heads do not divide by 3"):
        ranks(folder, 3)


def test_ranks_meet_on_this_machine_alone() -> None:
    store = make_store()
    store.set("a", "1")
    listening = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        rows = [line.split() for line in Path(table).read_text().splitlines()[1:]] if Path(table).exists() else []
        listening += [row[1] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == store.port]
    assert listening == [f"0100007F:{store.port:04X}"]
    assert TCPStore(RENDEZVOUS_HOST, store.port, is_master=False, timeout=timedelta(seconds=30)).get("a") == b"1"
