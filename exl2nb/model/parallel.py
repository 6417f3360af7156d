"""Tensor parallelism: every rank is a process with a part of each matrix; all of them run every layer together.

A rank has some heads of attention, some channels of each MLP or expert, and some columns of the output head. What attention gives is
gathered, so every rank multiplies by the whole output matrix of attention: the rows of that matrix are stored in an order that mixes heads,
and cutting them would change the file's groups. The channels of an MLP follow the stored order of its down matrix, so no code changes
there, and are divided by bits: the first rows of that matrix are the widest. What the ranks' MLPs add to the residual stream is summed. Two
exchanges a layer: on the CPU by torch.distributed (gloo), on GPUs by kernels that write to each other's memory (`ops.peers`), also within
captured steps.

Rank 0 is the process that loaded the model. The others (`python -m exl2nb.model.rank`) wait for its commands, which come through their
standard input, and end with it. On GPUs rank 0 alone draws tokens; the others get them from its GPU.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from itertools import pairwise
from math import prod
from struct import Struct
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroupGloo, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from exl2nb import ops
from exl2nb.cache.pool import KVCache
from exl2nb.cache.spec import CacheSpec
from exl2nb.core.errors import EngineClosed, GenerationError, OptionError
from exl2nb.core.progress import Meter, Sink
from exl2nb.model.batch import Batch, batch_tensors
from exl2nb.model.config import ModelConfig
from exl2nb.model.gpu_forward import GpuForward, cache_formats
from exl2nb.model.layers import MLP, Attention, RoutedMLP
from exl2nb.model.loader import Builder, read_model_config
from exl2nb.model.model import Model, Network
from exl2nb.model.rope import RopeOverride
from exl2nb.model.sources import Source, find_sources
from exl2nb.model.split import LayerRange
from exl2nb.model.store import ModelStore, open_store
from exl2nb.ops.gpu import launch_lock
from exl2nb.ops.interpreter import CpuBackend, Inputs, interpret
from exl2nb.ops.peers import MOST_RANKS, Peers, peer_buffer_bytes
from exl2nb.quant.bits import padded, stored_bits
from exl2nb.quant.exl2 import Exl2Tensors, parse_groups

RENDEZVOUS_HOST = "127.0.0.1"
START_S, EXCHANGE_S, END_S = 600.0, 60.0, 2.0  # until all ranks have loaded; of one exchange; until a rank that was told to has ended
SLICE_UNIT = 32  # columns and rows of an EXL2 matrix come in such
# Commands: a step; a page to copy; a cache to make or to drop; the end; of captured steps: one to record, its sequences, to run it.
FORWARD_COMMAND = 0
COPY_PAGE_COMMAND = 1
MAKE_CACHE_COMMAND = 2
DROP_CACHE_COMMAND = 3
CLOSE_COMMAND = 4
RECORD_STEP_COMMAND = 5
STEP_ROWS_COMMAND = 6
REPLAY_STEP_COMMAND = 7
COMMAND_HEADER = Struct("<9q")  # what, which cache, what it needs; then bytes that follow
MAX_STEP_TOKENS = 64  # tokens of a step that goes through the step kernels of GPUs
WATCH_S = 0.05  # between looks at the other ranks' processes
BATCH_FIELDS = ("input_ids", "positions", "slot_mapping", "block_table", "cu_seqlens", "context_lens", "logit_rows")


class RankGroup:
    """The exchanges of the ranks.

    Args:
        rank, size: this one, and how many. store: where they find each other.

    Raises:
        RuntimeError: a rank is gone, or does not answer in time.
    """

    def __init__(self, rank: int, size: int, store: Store) -> None:
        self.rank, self.size = rank, size
        options: Any = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._devices = [ProcessGroupGloo.create_device(hostname=RENDEZVOUS_HOST)]
        options._timeout = timedelta(seconds=EXCHANGE_S)
        self._group: Any = ProcessGroupGloo(store, rank, size, options)

    def gather(self, piece: Tensor, widths: Sequence[int]) -> Tensor:
        """The pieces f32 `(T, widths[rank])` of all ranks side by side."""
        most = max(widths)
        mine = piece if piece.shape[1] == most else F.pad(piece, (0, most - piece.shape[1]))
        pieces = [torch.empty_like(mine) for _ in widths]
        self._group.allgather([pieces], [mine.contiguous()]).wait()
        return torch.cat([piece[:, :width] for piece, width in zip(pieces, widths)], dim=1)

    def add(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in place; the same bits on every rank."""
        self._group.allreduce([x]).wait()
        return x

    def close(self) -> None:
        """Give up what waits, and the connections."""
        with suppress(RuntimeError):
            self._group.abort()
        with suppress(RuntimeError):
            self._group.shutdown()
        self._group = None


# ---- a rank's part of the weights


def slice_bounds(total: int, size: int, unit: int = 1) -> list[int]:
    """Where the parts of `total` begin, and its end: as equal as whole units allow."""
    units = -(-total // unit)
    return [min(total, units * rank // size * unit) for rank in range(size + 1)]


def channel_bounds(groups: Sequence[tuple[int, int]], size: int, beside: float) -> list[int]:
    """Where the parts of an MLP's channels begin, and their end: of about as many bits each, since ranks wait for the slowest.

    They begin with a group, unless groups are large beside a part: in a part that begins within a group of 128 rows every other unit of 64
    rows has two groups, so an item of the GPU's blob holds one unit in place of five.

    Args:
        groups: `(bits, rows)` of the last matrix. beside: bits of a channel in the other matrices, over the outputs of the last one.
    """
    total = sum(rows for _, rows in groups)
    places, bits_before = [0], [0.0]
    for bits, rows in groups:
        step = rows if 8 * size * rows <= total else SLICE_UNIT
        for first in range(0, rows, step):
            taken = min(step, rows - first)
            places.append(places[-1] + taken)
            bits_before.append(bits_before[-1] + taken * (bits + beside))
    found = [0]
    for rank in range(1, size):
        wanted = bits_before[-1] * rank / size
        nearest = min(range(len(places)), key=lambda i: abs(bits_before[i] - wanted))
        found.append(min(max(places[nearest], found[-1] + SLICE_UNIT), total - (size - rank) * SLICE_UNIT))
    return [*found, total]


def check_parallel(config: ModelConfig, formats: Collection[str], size: int, *, where: str = "load") -> None:
    """Raise OptionError where a model with matrices in these formats cannot be divided among so many ranks; says why."""
    unit = SLICE_UNIT if "exl2" in formats else 1
    heads = f"{config.num_heads} heads and {config.num_kv_heads} KV heads"
    moe = [found for layer in range(config.num_layers) if (found := config.experts(layer)) is not None]
    narrow = min([config.intermediate_size, *(one.intermediate_size for one in moe), *(one.shared_size or unit * size for one in moe)])
    for wrong, why in (
        (config.num_kv_heads % size != 0, f"{heads} do not divide by {size}"),
        (config.head_dim * (config.num_kv_heads // size) % unit != 0, f"a rank's KV heads have no multiple of {unit} columns"),
        (config.qk_norm == "full", "a norm over all heads needs them on one rank"),
        ("gptq" in formats, "GPTQ files are not divided: convert the model to EXL2"),
        (narrow < unit * size, f"{narrow} channels of an MLP are too few for {size} ranks"),
    ):
        if wrong:
            raise OptionError(
                f"{where}: parallel='tensor' over {size} devices: {why}; take another number of devices, or parallel='layers'"
            )


def max_exchanged_numbers(config: ModelConfig, size: int) -> int:
    """Numbers that a rank sends at most for a token."""
    vocab = slice_bounds(config.vocab_size, size, SLICE_UNIT)
    return max(config.hidden_size, config.num_heads * config.head_dim // size, *(b - a for a, b in pairwise(vocab)))


def buffer_bytes(config: ModelConfig, size: int) -> int:
    """Bytes of the buffer of a rank on a GPU."""
    return peer_buffer_bytes(size, MAX_STEP_TOKENS * max_exchanged_numbers(config, size))


class ShardBuilder(Builder):
    """Packs a rank's part of every matrix."""

    def __init__(
        self, config: ModelConfig, store: ModelStore, sources: dict[str, Source], *, device: str, widen: bool, rank: int, size: int
    ) -> None:
        super().__init__(config, store, sources, widen=widen, device=device, arena=None)
        self.rank, self.size = rank, size
        self._columns: dict[str, Tensor] = {}  # key -> original outputs of the linear that the rank keeps, in its order
        self._rows: dict[str, tuple[int, int]] = {}  # key -> stored rows
        vocab = slice_bounds(config.vocab_size, size, SLICE_UNIT)
        self._columns[config.names.head] = torch.arange(vocab[rank], vocab[rank + 1])  # dense or not, in the same units

    def attention(self, layer: int) -> Attention:
        """The rank's heads; the output matrix whole."""
        config, share = self.config, self.size
        for role, heads in (("q", config.num_heads), ("k", config.num_kv_heads), ("v", config.num_kv_heads)):
            width = heads // share * config.head_dim
            self._columns[config.names.at(layer, role)] = torch.arange(self.rank * width, (self.rank + 1) * width)
        whole = super().attention(layer)
        heads, kv_heads = config.num_heads // share, config.num_kv_heads // share
        norms = {
            name: norm if norm is None or norm.dim() == 1 else norm[self.rank * count : (self.rank + 1) * count].contiguous()
            for name, norm, count in (("q_norm", whole.q_norm, heads), ("k_norm", whole.k_norm, kv_heads))
        }
        return replace(whole, num_heads=heads, num_kv_heads=kv_heads, **norms)

    def mlp(self, layer: int) -> MLP:
        """The rank's channels; the bias behind them on rank 0 alone."""
        self._cut(*(self.config.names.at(layer, role) for role in (*(("gate",) if self.config.gated else ()), "up", "down")), even=False)
        whole = super().mlp(layer)
        return whole if self.rank == 0 else replace(whole, down_bias=None)

    def routed_mlp(self, layer: int) -> RoutedMLP:
        """The rank's channels of every expert; the router whole."""
        names, moe = self.config.names, self.config.experts(layer)
        assert moe is not None
        for expert in range(moe.num_experts):
            self._cut(*(names.at(layer, f"{role}.{expert}") for role in ("gate", "up", "down")))
        if moe.shared_size:
            self._cut(*(names.at(layer, f"shared_{role}") for role in ("gate", "up", "down")))
        return super().routed_mlp(layer)

    def _cut(self, *keys: str, even: bool = True) -> None:
        """The channels of an MLP: in the stored order of its last matrix. even: as many for each rank, as those of experts must be."""
        *before, down = keys
        source = self.sources[down]
        limits = slice_bounds(source.linear.in_features, self.size, SLICE_UNIT if source.kind == "exl2" else 1)
        channels = torch.arange(source.linear.in_features)
        if source.kind == "exl2":
            channels = torch.argsort(self.store.read(f"{source.prefix}.q_invperm").long())
            if not even:
                beside = sum(self._bits(key) * self.sources[key].linear.in_features for key in before)
                limits = channel_bounds(self._groups(down), self.size, beside / source.linear.out_features)
        first, last = limits[self.rank], limits[self.rank + 1]
        self._rows[down] = first, last
        self._columns |= dict.fromkeys(before, channels[first:last])

    def _groups(self, key: str) -> list[tuple[int, int]]:
        """`(bits, rows)` of every group of an EXL2 matrix."""
        prefix = self.sources[key].prefix
        table = self.store.read(f"{prefix}.q_groups").tolist()
        return parse_groups(table, self.store.info(f"{prefix}.q_weight").shape[0], prefix, file=self.store.info(f"{prefix}.q_groups").path)

    def _bits(self, key: str) -> float:
        """Bits of a weight, its share of the scales included."""
        linear = self.sources[key].linear
        if self.sources[key].kind != "exl2":
            return 16.0
        return stored_bits(self._groups(key), padded(linear.out_features)) / (linear.in_features * padded(linear.out_features))

    def packed(self, key: str) -> Tensor:
        """A blob of the rank's part."""
        columns, rows, source = self._columns.get(key), self._rows.get(key), self.sources[key]
        if columns is None and rows is None:
            return super().packed(key)
        if source.kind == "dense":
            weight = self.store.read(f"{source.prefix}.weight")
            weight = weight[columns] if columns is not None else weight[:, slice(*rows or ())]
            return ops.pack_dense((weight.float() if self.widen else weight).contiguous().to(self.device))
        exl2 = self._exl2(source)
        if columns is not None:
            named = {name: part.to(self.device) for name, part in exl2.tensors("").items()}  # a GPU picks columns sooner
            exl2 = Exl2Tensors(**{name[1:]: part for name, part in named.items()}).columns(columns.to(self.device))
        else:
            exl2 = exl2.rows(*rows or (0, 0))
        outputs = len(columns) if columns is not None else source.linear.out_features
        if self.widen:
            return ops.pack_dense(exl2.reconstruct()[:, :outputs].T.float().contiguous())
        parts = (exl2.q_weight, exl2.q_scale, exl2.q_scale_max, exl2.q_groups, exl2.q_invperm)
        return ops.pack_exl2(*(part.to(self.device) for part in parts), out_features=outputs)

    def linear_bias(self, key: str) -> Tensor:
        """The rank's part of a bias."""
        whole, columns = super().linear_bias(key), self._columns.get(key)
        return whole if columns is None else whole[columns.to(whole.device)]

    def _exl2(self, source: Source) -> Exl2Tensors:
        linear = source.linear
        return Exl2Tensors.read(self.store, source.prefix, in_features=linear.in_features, out_features=linear.out_features)


# ---- a rank's part of a step


class RankBackend(CpuBackend):
    """The ops of a rank on the CPU: attention's output is gathered, what the MLPs give is summed, and the logits are gathered.

    vocab: outputs of each rank's head.
    """

    def __init__(self, batch: Batch, cache: KVCache, group: RankGroup | Peers, vocab: Sequence[int]) -> None:
        super().__init__(Inputs(*batch_tensors(batch)), cache.k, cache.v, blocks=batch.blocks())
        self._group, self._vocab, self._gathered = group, vocab, False

    def attend(self, made: tuple[Tensor, ...], op: ops.AttentionOp) -> Tensor:
        """The output of the heads of all ranks."""
        mixed, self._gathered = super().attend(made, op), True
        return self._group.gather(mixed, [mixed.shape[1]] * self._group.size)

    def add(self, x: Tensor, y: Tensor, op: ops.ResidualOp) -> Tensor:
        """Add attention's output, whose matrix is whole on every rank, or the sum of the ranks' MLPs."""
        whole, self._gathered = self._gathered and not op.side, self._gathered and op.side
        if whole:
            return super().add(x, y, op)
        part = super().add(torch.zeros_like(x), y, replace(op, norm=None, scale=1.0))
        return self._sum(x, part, op.norm, op.eps, op.scale)

    def routed(self, x: Tensor, op: ops.RoutedOp) -> Tensor:
        """Add the sum of the ranks' experts."""
        part = super().routed(x.clone(), replace(op, post_norm=None, scale=1.0))
        part -= x
        return self._sum(x, part, op.post_norm, op.post_eps, op.scale)

    def head(self, x: Tensor, op: ops.HeadOp) -> Tensor:
        """The logits of all ranks."""
        return self._group.gather(super().head(x, op), self._vocab)

    def _sum(self, x: Tensor, part: Tensor, norm: Tensor | None, eps: float, scale: float) -> Tensor:
        added = self._group.add(part)
        return x.add_(added if norm is None else F.rms_norm(added, (added.shape[1],), norm, eps), alpha=scale)


class RankModel(Model):
    """A rank: its part of the network, and the step that all ranks run together. group: `Peers` on a GPU."""

    def __init__(
        self,
        config: ModelConfig,
        network: Network,
        group: RankGroup | Peers,
        *,
        context: int,
        device: str = "cpu",
        deterministic: bool = False,
    ) -> None:
        self.group = group
        self._vocab = [b - a for a, b in pairwise(slice_bounds(config.vocab_size, group.size, SLICE_UNIT))]
        super().__init__(config, network, context=context, device=device, deterministic=deterministic)
        self.cache_shape = config.num_layers, config.num_kv_heads // group.size, config.head_dim

    def run(self, batch: Batch, cache: KVCache, ids: Tensor | None = None) -> Tensor:
        """The rank's share of a step; logits f32 `(R, V)` on every rank. ids: as in `Model.forward`."""
        self._prepare(batch, cache)
        batch = self._with_rope_rows(batch)
        if self.device != "cpu":
            return self.capped(self.gpu.run(batch, cache, ids=ids))
        assert self._program is not None
        return self.capped(interpret(self._program.steps, RankBackend(batch, cache, self.group, self._vocab)))

    @property
    def gpu(self) -> GpuForward:
        """As `Model.gpu`: its logits are those of all ranks."""
        gpu = super().gpu
        gpu.vocab, gpu.most = self.config.vocab_size, MAX_STEP_TOKENS
        return gpu

    def _record(self, network: Network) -> None:
        super()._record(network)
        assert self._program is not None
        self._program.peers = self.group if isinstance(self.group, Peers) else None

    def close(self) -> None:
        """Drop every tensor, and the connections."""
        super().close()
        self.group.close()


class ParallelModel(RankModel):
    """Rank 0, which tells the others what to run; made by `load_parallel`.

    processes: of the other ranks. store: where they say why they end.
    """

    def __init__(
        self,
        config: ModelConfig,
        network: Network,
        group: RankGroup | Peers,
        processes: Sequence[subprocess.Popen[bytes]],
        store: Store,
        *,
        context: int,
        device: str = "cpu",
        deterministic: bool = False,
    ) -> None:
        super().__init__(config, network, group, context=context, device=device, deterministic=deterministic)
        self.processes, self._store, self._broken = list(processes), store, ""
        self._caches, self._dropped, self._closing = 0, list[int](), threading.Event()
        self.capabilities = replace(
            self.capabilities,
            fused_draw=False,  # the host draws from the gathered logits
            draws_ahead=False,
            captures_drafts=False,
            missing=frozenset(("adapters", "hidden states", "matrices", "pictures", "the logit lens", "trace and patch")),
            missing_why=f"the model runs as {group.size} ranks",
        )
        if isinstance(group, Peers):
            threading.Thread(target=self._watch, name="exl2nb ranks", daemon=True).start()

    @property
    def ranks(self) -> ParallelModel | None:
        """Itself, on GPUs: what the executor tells of captured steps."""
        return None if self.device == "cpu" else self

    @property
    def where(self) -> str:
        """The ranks in words."""
        return f"each of {self.group.size} ranks on {self.device.partition(':')[0]}"

    def forward(self, batch: Batch, cache: KVCache, *, ids: Tensor | None = None, fetch: bool = True) -> Tensor:
        """As `Model.forward`. On GPUs `check` says afterwards whether all ranks took part.

        Raises:
            GenerationError: a rank is gone or does not answer; the model can only be closed then.
        """
        self._tell_step(batch, cache, known=ids is None)
        try:
            if ids is not None:
                self.share(ids)
            return self.run(batch, cache, ids)
        except RuntimeError as error:  # the others are in the middle of a step that this one does not take
            raise self.lost(error) from error

    def _tell_step(self, batch: Batch, cache: KVCache, *, known: bool) -> None:
        self.check()
        if batch.adapters is not None:
            self.capabilities.require("adapters")
        if batch.pictures is not None:
            self.capabilities.require("pictures")
        self._prepare(batch, cache)
        parts = [*batch_tensors(batch), *([] if batch.long is None else [batch.long])]
        sizes = [len(batch.input_ids), *batch.block_table.shape, len(batch.logit_rows), len(parts) - len(batch_tensors(batch)), not known]
        self.tell(FORWARD_COMMAND, self._open(cache), *sizes, data=torch.cat([part.reshape(-1) for part in parts]))

    # ---- captured steps

    def record(self, cache: KVCache, rows: int, width: int) -> None:
        """Have the other ranks capture a step of up to so many sequences and pages, and run it once without any."""
        self.tell(RECORD_STEP_COMMAND, self._open(cache), rows, width)

    def set_rows(self, cache: KVCache, rows: int, width: int, table: Tensor) -> None:
        """Give the other ranks the block table int32 `(rows * width,)` of a captured step; `share` gives them the rest."""
        self.tell(STEP_ROWS_COMMAND, self._open(cache), rows, width, data=table)

    def replay(self, cache: KVCache, rows: int, width: int) -> None:
        """Have the other ranks run a captured step."""
        self.tell(REPLAY_STEP_COMMAND, self._open(cache), rows, width)

    def share(self, numbers: Tensor) -> None:
        """Give the other ranks numbers that are on the GPU, int32 1-D."""
        assert isinstance(self.group, Peers)
        self.group.share(numbers)

    def copied(self, cache: SharedCache, source: int, target: int) -> None:
        """Have the other ranks copy a page."""
        self.tell(COPY_PAGE_COMMAND, self._open(cache), source, target)

    def _open(self, cache: KVCache) -> int:
        """Have the other ranks drop the caches that are gone, and make this one. On the thread that runs the steps, as all commands."""
        assert isinstance(cache, SharedCache), "made by new_cache"
        while self._dropped:
            self.tell(DROP_CACHE_COMMAND, self._dropped.pop())
        if not cache.shared:
            self.tell(MAKE_CACHE_COMMAND, cache.number, cache.spec.num_pages, int.from_bytes(cache.spec.mode.encode(), "little"))
            cache.shared = True
            weakref.finalize(cache, self._dropped.append, cache.number)
        return cache.number

    def new_cache(self, spec: CacheSpec) -> KVCache:
        """A cache whose other heads are with the other ranks."""
        self.check()
        self._caches += 1
        return SharedCache(spec, self, self._caches)

    def tell(self, what: int, *numbers: int, data: Tensor | None = None) -> None:
        """Send a command. data: int32 that belong to it."""
        self.check()
        follows = b"" if data is None else data.to(torch.int32).contiguous().numpy().tobytes()
        message = COMMAND_HEADER.pack(what, *numbers, *[0] * (7 - len(numbers)), len(follows)) + follows
        for process in self.processes:
            assert process.stdin is not None
            left = memoryview(message)
            try:
                while left:
                    left = left[process.stdin.write(left) :]
            except (OSError, ValueError) as error:  # ValueError: closed, because another rank has ended
                raise self.lost(error) from error

    def close(self) -> None:
        """End the other ranks, drop every tensor. Harmless when repeated."""
        if self._network is None:
            return
        self._closing.set()
        if not self._broken:
            with suppress(GenerationError, EngineClosed):
                self.tell(CLOSE_COMMAND)
        end_processes(self.processes)
        if isinstance(self.group, Peers):
            self.group.stop()
            torch.cuda.synchronize(self.device)
        super().close()

    def check(self) -> None:
        """Raise what has happened to the ranks: what a step gave is theirs only if this passes after it."""
        if self._network is None:
            raise EngineClosed("the model was closed; load it again")
        if self._broken:
            raise GenerationError(f"{self._broken}; close the model and load it again")

    def _watch(self) -> None:
        """On a thread: ends the waiting of kernels when a rank has ended."""
        while not self._closing.wait(WATCH_S):
            if any(process.poll() is not None for process in self.processes):
                self.lost(None)
                return

    def lost(self, error: Exception | None) -> GenerationError:
        """What to say when a step has failed: the rank that ended, or the error's own words. The other ranks are ended."""
        deadline = time.monotonic() + 1  # a process that was killed may still be ending
        gone: list[str] = []
        while not gone and time.monotonic() < deadline:
            codes = [process.poll() for process in self.processes]
            gone = [f"rank {rank} ended ({exit_reason(self._store, rank, code)})" for rank, code in enumerate(codes, 1) if code is not None]
            time.sleep(0.02)
        self._broken = self._broken or "tensor parallel: " + (", ".join(gone) or str(error).splitlines()[0][:200])
        if isinstance(self.group, Peers):
            self.group.stop()
        end_processes(self.processes, wait_s=0)
        return GenerationError(f"{self._broken}; close the model and load it again")


class SharedCache(KVCache):
    """Rank 0's pools. number: of the cache, with every rank. shared: whether the others have made theirs."""

    whole = False

    def __init__(self, spec: CacheSpec, model: ParallelModel, number: int) -> None:
        super().__init__(spec, model.device)
        self._model, self.number, self.shared = model, number, False

    def copy_page(self, source: int, target: int) -> None:
        """As `KVCache.copy_page`, on every rank."""
        super().copy_page(source, target)
        self._model.copied(self, source, target)


# ---- the other ranks


class RankStep:
    """A rank's part of a captured step of up to `rows` sequences of up to `width` pages; rank 0 draws and sends the tokens."""

    def __init__(self, model: RankModel, cache: KVCache, rows: int, width: int) -> None:
        assert isinstance(model.group, Peers)
        group, device = model.group, torch.device(model.device)
        self._state = torch.zeros(rows * (3 + width), dtype=torch.int32, device=device)
        ids, positions, lens, table = self._state.split([rows, rows, rows, rows * width])
        self._drawn, self._table = drawn, table = self._state[: 3 * rows], table
        bounds = torch.arange(rows + 1, dtype=torch.int32, device=device)
        logits = torch.zeros(rows, model.config.vocab_size, device=device)
        kernels, heads = model.gpu.step_kernels(rows), (cache.spec.num_kv_heads, cache.spec.head_dim)

        def step() -> None:
            kernels.run(
                ids, positions, table.view(rows, width), bounds, lens, None, cache.k, cache.v, cache_formats(cache), heads, logits
            )  # fmt: skip
            group.share(drawn)

        self._step, self._group = step, group
        self._kept = kernels, bounds, logits  # the graph knows their addresses only
        self._graph: torch.cuda.CUDAGraph | None = None

    def record(self) -> None:
        """Run it without any sequence, and capture it where it has not been."""
        self._state.zero_()
        self._step()
        if self._graph is None:
            torch.cuda.synchronize(self._state.device)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._step()

    def set(self, table: Tensor) -> None:
        """Take a block table, and what rank 0 shares."""
        self._table.copy_(table.pin_memory(), non_blocking=True)
        self._group.share(self._drawn)

    def replay(self) -> None:
        """Enqueue it."""
        assert self._graph is not None, "recorded"
        with launch_lock(self._state.device):
            self._graph.replay()


class Rank:
    """Another rank: carries out what rank 0 says until it says the end. read: waits for a command; its numbers and what follows them."""

    def __init__(self, model: RankModel, read: Callable[[], tuple[tuple[int, ...], bytes]]) -> None:
        self._model, self._read = model, read
        self._caches, self._steps = dict[int, KVCache](), dict[tuple[int, ...], RankStep]()

    def serve(self) -> None:
        """One command after the other."""
        model = self._model
        while True:
            (kind, number, *rest), follows = self._read()
            data = torch.frombuffer(bytearray(follows), dtype=torch.int32) if follows else torch.empty(0, dtype=torch.int32)
            key = (number, *rest[:2])
            if kind == FORWARD_COMMAND:
                self._forward(data, self._caches[number], *rest[:6])
            elif kind == REPLAY_STEP_COMMAND:
                self._steps[key].replay()
            elif kind == STEP_ROWS_COMMAND:
                self._steps[key].set(data)
            elif kind == RECORD_STEP_COMMAND:
                if key not in self._steps:
                    self._steps[key] = RankStep(model, self._caches[number], *rest[:2])
                self._steps[key].record()
            elif kind == COPY_PAGE_COMMAND:
                self._caches[number].copy_page(rest[0], rest[1])
            elif kind == MAKE_CACHE_COMMAND:
                mode = rest[1].to_bytes(8, "little").rstrip(b"\0").decode()
                self._caches[number] = KVCache(CacheSpec(*model.cache_shape, rest[0], mode), model.device)
            elif kind == DROP_CACHE_COMMAND:
                self._steps = {known: step for known, step in self._steps.items() if known[0] != number}
                del self._caches[number]
            else:
                if model.device != "cpu":
                    torch.cuda.synchronize(model.device)
                return

    def _forward(self, flat: Tensor, cache: KVCache, tokens: int, sequences: int, pages: int, rows: int, long: int, drawn: int) -> None:
        shapes = [(tokens,)] * 3 + [(sequences, pages), (sequences + 1,), (sequences,), (rows,)] + [(sequences,)] * long
        pieces = flat.split([prod(shape) for shape in shapes])
        names = [*BATCH_FIELDS, *["long"] * long]
        tensors: dict[str, Any] = {name: piece.view(shape) for name, piece, shape in zip(names, pieces, shapes)}
        ids = None
        if drawn:  # rank 0's GPU has drawn some of the tokens
            assert isinstance(self._model.group, Peers)
            ids = torch.empty(tokens, dtype=torch.int32, device=self._model.device)
            self._model.group.share(ids)
        self._model.run(Batch(**tensors), cache, ids)


def read_part(
    directory: str | os.PathLike[str],
    rank: int,
    size: int,
    *,
    context: int | None,
    rope: RopeOverride,
    widen: bool = False,
    device: str = "cpu",
    progress: Sink | None = None,
) -> tuple[ModelConfig, Network, int]:
    """A rank's part of a model, and the context that it runs. widen: to fp32, as a reference."""
    config = read_model_config(directory, rope=rope)
    context = config.max_position_embeddings if context is None else context
    config.check_context(context)
    with open_store(config, directory) as store, ops.on_device(device):
        sources = find_sources(config, store)
        check_parallel(config, {source.kind for source in sources.values()}, size)
        builder = ShardBuilder(config, store, sources, device=device, widen=widen, rank=rank, size=size)
        with Meter("load", total=config.num_layers + 2, unit="layers", sink=progress) as meter:
            embedding, layers, head = builder.span(LayerRange(device, 0, config.num_layers), meter)
        if device != "cpu":
            torch.cuda.empty_cache()
    assert embedding is not None
    assert head is not None
    return config, Network(embedding, tuple(layers), head), context


def join_group(
    config: ModelConfig, rank: int, size: int, store: Store, device: str, wait: Callable[[list[str]], None] | None = None
) -> RankGroup | Peers:
    """The exchanges of a rank, once all ranks have come as far as this. wait: for entries of the store, while the other ranks live.

    Raises:
        DeviceError: the GPUs cannot write to each other's memory.
    """
    if device == "cpu":
        return RankGroup(rank, size, store)

    def swap(mine: bytes) -> list[bytes]:
        store.set(f"memory {rank}", mine.hex())
        names = [f"memory {other}" for other in range(size)]
        if wait is not None:
            wait(names)
        return [bytes.fromhex(store.get(name).decode()) for name in names]

    vocab = slice_bounds(config.vocab_size, size, SLICE_UNIT)
    return Peers(
        rank, size, numbers=MAX_STEP_TOKENS * max_exchanged_numbers(config, size), vocab=vocab, device=torch.device(device), swap=swap
    )


def load_parallel(
    directory: str | os.PathLike[str],
    devices: Sequence[str],
    *,
    context: int | None,
    rope: RopeOverride | None = None,
    deterministic: bool = False,
    progress: Sink | None = None,
) -> ParallelModel:
    """Load a model as a rank for each device: this process and others, each with its part of every matrix.

    Args:
        devices: "cpu" for all, or GPUs.

    Raises:
        OptionError: the model cannot be divided so; says why. GenerationError: a rank did not start. DeviceError: the GPUs cannot write to
        each other's memory. Otherwise as `load_model`.
    """
    devices = ["cuda:0" if device == "cuda" else device for device in devices]
    rope, size, here = rope or RopeOverride(), len(devices), devices[0]
    if here != "cpu" and size > MOST_RANKS:
        raise OptionError(f"load: parallel='tensor' over {size} devices; expected at most {MOST_RANKS}")
    _check_divides(directory, rope, size)
    store = make_store()
    threads = max(1, (os.cpu_count() or size) // size)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, device in enumerate(devices[1:], 1):
            task = {
                "directory": os.fspath(directory),
                "rank": rank,
                "size": size,
                "port": store.port,
                "context": context,
                "rope": asdict(rope),
                "device": device,
                "deterministic": deterministic,
            }
            environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            command = [sys.executable, "-m", "exl2nb.model.rank", json.dumps(task)]
            processes.append(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, start_new_session=True, bufsize=0
                )
            )
        config, network, longest = read_part(directory, 0, size, context=context, rope=rope, device=here, progress=progress)
        wait = partial(_wait_for_ranks, store, processes)
        wait([f"loaded {rank}" for rank in range(1, size)])
        group = join_group(config, 0, size, store, here, wait)
        return ParallelModel(config, network, group, processes, store, context=longest, device=here, deterministic=deterministic)
    except BaseException:
        end_processes(processes, wait_s=0)
        raise


def make_store() -> TCPStore:
    """The store by which ranks find each other, reached from this machine alone: torch's own socket listens on every network."""
    listener = socket.create_server((RENDEZVOUS_HOST, 0))
    port, wait = listener.getsockname()[1], timedelta(seconds=START_S)
    return TCPStore(RENDEZVOUS_HOST, port, is_master=True, wait_for_workers=False, timeout=wait, master_listen_fd=listener.detach())


def _check_divides(directory: str | os.PathLike[str], rope: RopeOverride, size: int) -> None:
    config = read_model_config(directory, rope=rope)
    with open_store(config, directory) as store:
        check_parallel(config, {source.kind for source in find_sources(config, store).values()}, size)


def _wait_for_ranks(store: Store, processes: Sequence[subprocess.Popen[bytes]], names: list[str]) -> None:
    deadline = time.monotonic() + START_S
    while not store.check(names):
        for rank, process in enumerate(processes, 1):
            if (code := process.poll()) is not None:
                raise GenerationError(f"tensor parallel: rank {rank} ended while it was loading: {exit_reason(store, rank, code)}")
        if time.monotonic() > deadline:
            raise GenerationError(f"tensor parallel: the ranks did not load within {START_S:g} s")
        time.sleep(0.02)


def exit_reason(store: Store, rank: int, code: int) -> str:
    """Why a rank has ended: what it said, or its exit code."""
    with suppress(RuntimeError):
        if store.check([f"failed {rank}"]):
            return store.get(f"failed {rank}").decode()[:500]
    return f"exit code {code}"


def end_processes(processes: Sequence[subprocess.Popen[bytes]], *, wait_s: float = END_S) -> None:
    """Wait for processes, and kill those that have not ended by then."""
    deadline = time.monotonic() + wait_s
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.wait()
        if process.stdin is not None:
            process.stdin.close()
