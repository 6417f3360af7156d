"""Tensor parallelism: every rank is a process with a part of each matrix; all of them run every layer together.

A rank has some heads of attention, some channels of each MLP or expert, and some columns of the output head. What attention gives is
gathered, so every rank multiplies by the whole output matrix of attention: the rows of that matrix are stored in an order that mixes heads,
and cutting them would change the file's groups. The channels of an MLP follow the stored order of its down matrix, so a cut falls between
groups and no code changes. What the ranks' MLPs add to the residual stream is summed. Two exchanges a layer, by torch.distributed (gloo).

Rank 0 is the process that loaded the model. The others (`python -m exl2nb.model.rank`) wait for its commands and end with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from itertools import pairwise
from math import prod
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import BroadcastOptions, ProcessGroupGloo, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from exl2nb import ops
from exl2nb.cache.pool import KVCache
from exl2nb.cache.spec import CacheSpec
from exl2nb.core.errors import EngineClosed, GenerationError, OptionError
from exl2nb.core.progress import Meter, Sink
from exl2nb.model.batch import TENSORS, Batch
from exl2nb.model.config import ModelConfig
from exl2nb.model.layers import MLP, Attention, Layer, ResidualAdd, RoutedMLP, Step
from exl2nb.model.loader import Builder, read_model_config
from exl2nb.model.model import Model, Network
from exl2nb.model.rope import RopeOverride
from exl2nb.model.sources import Source, find_sources
from exl2nb.model.split import Span
from exl2nb.model.store import ModelStore, open_store
from exl2nb.quant.exl2 import Exl2Tensors

HOST = "127.0.0.1"
START_S, EXCHANGE_S, END_S = 600.0, 60.0, 2.0  # until all ranks have loaded; of one exchange; until a rank that was told to has ended
UNIT = 32  # columns and rows of an EXL2 matrix come in such
FORWARD, COPY, MAKE, DROP, CLOSE = range(5)  # commands: a step, a page to copy, a cache to make or to drop, the end
COMMAND = 8  # numbers in a command: what, which cache, and what it needs
FIELDS = ("input_ids", "positions", "slot_mapping", "block_table", "cu_seqlens", "context_lens", "logit_rows")


class Group:
    """The exchanges of the ranks.

    Args:
        rank, size: this one, and how many. store: where they find each other.

    Raises:
        RuntimeError: a rank is gone, or does not answer in time.
    """

    def __init__(self, rank: int, size: int, store: Store) -> None:
        self.rank, self.size = rank, size
        options: Any = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._devices = [ProcessGroupGloo.create_device(hostname=HOST)]
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

    def send(self, x: Tensor) -> Tensor:
        """Rank 0's x, in place."""
        self._group.broadcast([x], BroadcastOptions()).wait()  # whose root is rank 0
        return x

    def close(self) -> None:
        """Give up what waits, and the connections."""
        with suppress(RuntimeError):
            self._group.abort()
        with suppress(RuntimeError):
            self._group.shutdown()
        self._group = None


# ---- a rank's part of the weights


def bounds(total: int, size: int, unit: int = 1) -> list[int]:
    """Where the parts of `total` begin, and its end: as equal as whole units allow."""
    units = -(-total // unit)
    return [min(total, units * rank // size * unit) for rank in range(size + 1)]


def check_parallel(config: ModelConfig, sources: Mapping[str, Source], size: int) -> None:
    """Raise OptionError where a model cannot be divided among so many ranks; says why."""
    unit = UNIT if any(source.kind == "exl2" for source in sources.values()) else 1
    heads = f"{config.num_heads} heads and {config.num_kv_heads} KV heads"
    moe = [found for layer in range(config.num_layers) if (found := config.experts(layer)) is not None]
    narrow = min([config.intermediate_size, *(one.intermediate_size for one in moe), *(one.shared_size or unit * size for one in moe)])
    for wrong, why in (
        (config.num_kv_heads % size != 0, f"{heads} do not divide by {size}"),
        (config.head_dim * (config.num_kv_heads // size) % unit != 0, f"a rank's KV heads have no multiple of {unit} columns"),
        (config.qk_norm == "full", "a norm over all heads needs them on one rank"),
        (any(source.kind == "gptq" for source in sources.values()), "GPTQ files are not divided: convert the model to EXL2"),
        (narrow < unit * size, f"{narrow} channels of an MLP are too few for {size} ranks"),
    ):
        if wrong:
            raise OptionError(f"load: parallel='tensor' over {size} devices: {why}; take another number of devices, or parallel='layers'")


class ShardBuilder(Builder):
    """Packs a rank's part of every matrix."""

    def __init__(
        self, config: ModelConfig, store: ModelStore, sources: dict[str, Source], *, device: str, widen: bool, rank: int, size: int
    ) -> None:
        super().__init__(config, store, sources, widen=widen, device=device, arena=None)
        self.rank, self.size = rank, size
        self._columns: dict[str, Tensor] = {}  # key -> original outputs of the linear that the rank keeps, in its order
        self._rows: dict[str, tuple[int, int]] = {}  # key -> stored rows
        vocab = bounds(config.vocab_size, size, UNIT)
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
        self._cut(*(self.config.names.at(layer, role) for role in (*(("gate",) if self.config.gated else ()), "up", "down")))
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

    def _cut(self, *keys: str) -> None:
        """The channels of an MLP: in the stored order of its last matrix."""
        *before, down = keys
        source = self.sources[down]
        limits = bounds(source.linear.in_features, self.size, UNIT if source.kind == "exl2" else 1)
        first, last = limits[self.rank], limits[self.rank + 1]
        channels = torch.arange(source.linear.in_features)
        if source.kind == "exl2":
            channels = self._exl2(source).perm
        self._rows[down] = first, last
        self._columns |= dict.fromkeys(before, channels[first:last])

    def packed(self, key: str) -> Tensor:
        """A blob of the rank's part."""
        columns, rows, source = self._columns.get(key), self._rows.get(key), self.sources[key]
        if columns is None and rows is None:
            return super().packed(key)
        if source.kind == "dense":
            weight = self.store.read(f"{source.prefix}.weight")
            weight = weight[columns] if columns is not None else weight[:, slice(*rows or ())]
            return ops.pack_dense((weight.float() if self.widen else weight).contiguous())
        exl2 = self._exl2(source)
        exl2 = exl2.columns(columns) if columns is not None else exl2.rows(*rows or (0, 0))
        outputs = len(columns) if columns is not None else source.linear.out_features
        if self.widen:
            return ops.pack_dense(exl2.reconstruct()[:, :outputs].T.float().contiguous())
        parts = (exl2.q_weight, exl2.q_scale, exl2.q_scale_max, exl2.q_groups, exl2.q_invperm)
        return ops.pack_exl2(*parts, out_features=outputs)

    def linear_bias(self, key: str) -> Tensor:
        """The rank's part of a bias."""
        whole, columns = super().linear_bias(key), self._columns.get(key)
        return whole if columns is None else whole[columns]

    def _exl2(self, source: Source) -> Exl2Tensors:
        linear = source.linear
        return Exl2Tensors.read(self.store, source.prefix, in_features=linear.in_features, out_features=linear.out_features)


# ---- a rank's part of a step


class RankModel(Model):
    """A rank: its part of the network, and the step that all ranks run together."""

    def __init__(self, config: ModelConfig, network: Network, group: Group, *, context: int) -> None:
        self.group = group
        self._vocab = [b - a for a, b in pairwise(bounds(config.vocab_size, group.size, UNIT))]
        super().__init__(config, network, context=context)
        self.cache_shape = config.num_layers, config.num_kv_heads // group.size, config.head_dim

    def run(self, batch: Batch, cache: KVCache) -> Tensor:
        """The rank's share of a step; logits f32 `(R, V)` on every rank."""
        network, batch = self._prepare(batch, cache), self._with_rope_rows(batch)
        step = Step(batch, cache, self._ropes)
        x = network.embedding(batch.input_ids, batch.positions)
        for layer in network.layers:
            self._layer(layer, x, step)
        logits = network.head(x, batch.logit_rows)
        return self.capped(self.group.gather(logits, self._vocab))

    def _layer(self, layer: Layer, x: Tensor, step: Step) -> None:
        """Attention's output gathered, the MLPs' results summed; x changes in place, alike on every rank."""
        mixed = layer.attention.attend(x, step)
        mlp, inner = layer.mlp, None
        if layer.parallel and isinstance(mlp, MLP):
            inner = mlp.activate(x)
        layer.attention.add(x, self.group.gather(mixed, [mixed.shape[1]] * self.group.size))
        if isinstance(mlp, MLP):
            part = torch.zeros_like(x)
            replace(mlp, added=ResidualAdd()).add(part, mlp.activate(x) if inner is None else inner)
        else:
            part = x.clone()
            replace(mlp, added=ResidualAdd())(part)
            part -= x
        added = self.group.add(part)
        if mlp.added.norm is not None:
            added = F.rms_norm(added, (added.shape[1],), mlp.added.norm, mlp.added.eps)
        x.add_(added, alpha=mlp.added.scale)

    def _record(self, network: Network) -> None:
        """Nothing: the layers run one by one."""


class ParallelModel(RankModel):
    """Rank 0, which tells the others what to run; made by `load_parallel`.

    processes: of the other ranks.
    """

    def __init__(
        self, config: ModelConfig, network: Network, group: Group, processes: Sequence[subprocess.Popen[bytes]], *, context: int
    ) -> None:
        super().__init__(config, network, group, context=context)
        self.processes, self._broken = list(processes), ""
        self._caches, self._dropped = 0, list[int]()

    @property
    def draws(self) -> bool:
        """False: the host draws from the gathered logits."""
        return False

    @property
    def runs_ahead(self) -> bool:
        """False: one step after the other."""
        return False

    @property
    def where(self) -> str:
        """The ranks in words."""
        return f"each of {self.group.size} ranks on {self.device}"

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        """As `Model.forward`.

        Raises:
            GenerationError: a rank is gone or does not answer; the model can only be closed then.
        """
        self._check_open()
        if batch.adapters is not None:
            raise self._whole("adapters")
        if batch.pictures is not None:
            raise self._whole("pictures")
        assert isinstance(cache, SharedCache), "made by new_cache"
        self._prepare(batch, cache)
        self._open(cache)
        parts = [*TENSORS(batch), *([] if batch.long is None else [batch.long])]
        sizes = [len(batch.input_ids), *batch.block_table.shape, len(batch.logit_rows), len(parts) - len(TENSORS(batch))]
        self.tell(FORWARD, cache.number, *sizes)
        try:
            self.group.send(torch.cat([part.reshape(-1) for part in parts]))
            return self.run(batch, cache)
        except RuntimeError as error:
            raise self._lost(error) from error

    def copied(self, cache: SharedCache, source: int, target: int) -> None:
        """Have the other ranks copy a page."""
        self._open(cache)
        self.tell(COPY, cache.number, source, target)

    def _open(self, cache: SharedCache) -> None:
        """Have the other ranks drop the caches that are gone, and make this one. On the thread that runs the steps, as all commands."""
        while self._dropped:
            self.tell(DROP, self._dropped.pop())
        if not cache.shared:
            self.tell(MAKE, cache.number, cache.spec.num_pages, int.from_bytes(cache.spec.mode.encode(), "little"))
            cache.shared = True
            weakref.finalize(cache, self._dropped.append, cache.number)

    def new_cache(self, spec: CacheSpec) -> KVCache:
        """A cache whose other heads are with the other ranks."""
        self._check_open()
        self._caches += 1
        return SharedCache(spec, self, self._caches)

    def tell(self, *numbers: int) -> None:
        """Send a command."""
        self._check_open()
        try:
            self.group.send(torch.tensor([*numbers, *[0] * (COMMAND - len(numbers))], dtype=torch.int64))
        except RuntimeError as error:
            raise self._lost(error) from error

    def forward_by_ops(self, *_: Any, **__: Any) -> NoReturn:
        """Raises OptionError: hidden states need the model in one process."""
        raise self._whole("hidden states")

    def trace(self, *_: Any, **__: Any) -> NoReturn:
        """Raises OptionError: traces need the model in one process."""
        raise self._whole("trace and patch")

    def layer(self, index: int, tokens: int) -> NoReturn:
        """Raises OptionError: traces need the model in one process."""
        raise self._whole("trace and patch")

    def matrix(self, layer: int, part: str) -> NoReturn:
        """Raises OptionError: a rank has a part of a matrix."""
        raise self._whole("matrices")

    def unembed(self, x: Tensor) -> NoReturn:
        """Raises OptionError: a rank has a part of the head."""
        raise self._whole("the logit lens")

    def set_adapters(self, adapters: Sequence[Any]) -> NoReturn:
        """Raises OptionError: adapters need the model in one process."""
        raise self._whole("adapters")

    def close(self) -> None:
        """End the other ranks, drop every tensor. Harmless when repeated."""
        if self._network is None:
            return
        if not self._broken:
            with suppress(GenerationError, EngineClosed):
                self.tell(CLOSE)
        super().close()
        self.group.close()
        end(self.processes)

    def _check_open(self) -> None:
        if self._network is None:
            raise EngineClosed("the model was closed; load it again")
        if self._broken:
            raise GenerationError(f"{self._broken}; close the model and load it again")

    def _lost(self, error: Exception) -> GenerationError:
        """What to say when an exchange has failed: the rank that ended, or the exchange's own words."""
        deadline = time.monotonic() + 1  # a process that was killed may still be ending
        gone: list[str] = []
        while not gone and time.monotonic() < deadline:
            codes = [process.poll() for process in self.processes]
            gone = [f"rank {rank} ended (exit code {code})" for rank, code in enumerate(codes, 1) if code is not None]
            time.sleep(0.02)
        self._broken = "tensor parallel: " + (", ".join(gone) or str(error).splitlines()[0][:200])
        end(self.processes, wait_s=0)
        return GenerationError(f"{self._broken}; close the model and load it again")

    def _whole(self, what: str) -> OptionError:
        return OptionError(f"{what}: the model runs as {self.group.size} ranks, which this does not know yet; load it on one device")


class SharedCache(KVCache):
    """Rank 0's pools. number: of the cache, with every rank. shared: whether the others have made theirs."""

    def __init__(self, spec: CacheSpec, model: ParallelModel, number: int) -> None:
        super().__init__(spec)
        self._model, self.number, self.shared = model, number, False

    def copy_page(self, source: int, target: int) -> None:
        """As `KVCache.copy_page`, on every rank."""
        super().copy_page(source, target)
        self._model.copied(self, source, target)


# ---- the other ranks


class Rank:
    """Another rank: carries out what rank 0 says until it says the end."""

    def __init__(self, model: RankModel) -> None:
        self._model, self._caches = model, dict[int, KVCache]()

    def serve(self) -> None:
        """One command after the other."""
        group = self._model.group
        while True:
            kind, number, *rest = group.send(torch.zeros(COMMAND, dtype=torch.int64)).tolist()
            if kind == FORWARD:
                self._model.run(self._batch(*rest[:5]), self._caches[number])
            elif kind == COPY:
                self._caches[number].copy_page(rest[0], rest[1])
            elif kind == MAKE:
                mode = rest[1].to_bytes(8, "little").rstrip(b"\0").decode()
                self._caches[number] = KVCache(CacheSpec(*self._model.cache_shape, rest[0], mode))
            elif kind == DROP:
                del self._caches[number]
            else:
                return

    def _batch(self, tokens: int, sequences: int, pages: int, rows: int, long: int) -> Batch:
        shapes = [(tokens,)] * 3 + [(sequences, pages), (sequences + 1,), (sequences,), (rows,)] + [(sequences,)] * long
        flat = torch.empty(sum(map(prod, shapes)), dtype=torch.int32)
        pieces = self._model.group.send(flat).split([prod(shape) for shape in shapes])
        names = [*FIELDS, *["long"] * long]
        tensors: dict[str, Any] = {name: piece.view(shape) for name, piece, shape in zip(names, pieces, shapes)}
        return Batch(**tensors)


def read_part(
    directory: str | os.PathLike[str],
    rank: int,
    size: int,
    *,
    context: int | None,
    rope: RopeOverride,
    widen: bool = False,
    progress: Sink | None = None,
) -> tuple[ModelConfig, Network, int]:
    """A rank's part of a model, and the context that it runs. widen: to fp32, as a reference."""
    config = read_model_config(directory, rope=rope)
    with open_store(config, directory) as store:
        sources = find_sources(config, store)
        check_parallel(config, sources, size)
        builder = ShardBuilder(config, store, sources, device="cpu", widen=widen, rank=rank, size=size)
        with Meter("load", total=config.num_layers + 2, unit="layers", sink=progress) as meter:
            embedding, layers, head = builder.span(Span("cpu", 0, config.num_layers), meter)
    assert embedding is not None
    assert head is not None
    return config, Network(embedding, tuple(layers), head), config.max_position_embeddings if context is None else context


def load_parallel(
    directory: str | os.PathLike[str], size: int, *, context: int | None, rope: RopeOverride | None = None, progress: Sink | None = None
) -> ParallelModel:
    """Load a model as `size` ranks: this process and `size - 1` others, each with its part of every matrix.

    Raises:
        OptionError: the model cannot be divided so; says why. GenerationError: a rank did not start. Otherwise as `load_model`.
    """
    rope = rope or RopeOverride()
    config, network, longest = read_part(directory, 0, size, context=context, rope=rope, progress=progress)
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=START_S))
    threads = max(1, (os.cpu_count() or size) // size)
    processes = []
    try:
        for rank in range(1, size):
            task = {
                "directory": os.fspath(directory),
                "rank": rank,
                "size": size,
                "port": store.port,
                "context": context,
                "rope": asdict(rope),
            }
            environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            command = [sys.executable, "-m", "exl2nb.model.rank", json.dumps(task)]
            processes.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, start_new_session=True)
            )
        _wait_until_loaded(store, processes)
        group = Group(0, size, store)
        return ParallelModel(config, network, group, processes, context=longest)
    except BaseException:
        end(processes, wait_s=0)
        raise


def _wait_until_loaded(store: Store, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + START_S
    names = [f"loaded {rank}" for rank in range(1, len(processes) + 1)]
    while not store.check(names):
        for rank, process in enumerate(processes, 1):
            if (code := process.poll()) is not None:
                why = store.get(f"failed {rank}").decode() if store.check([f"failed {rank}"]) else f"exit code {code}"
                raise GenerationError(f"tensor parallel: rank {rank} ended while it was loading: {why[:500]}")
        if time.monotonic() > deadline:
            raise GenerationError(f"tensor parallel: the ranks did not load within {START_S:g} s")
        time.sleep(0.02)


def end(processes: Sequence[subprocess.Popen[bytes]], *, wait_s: float = END_S) -> None:
    """Wait for processes, and kill those that have not ended by then."""
    deadline = time.monotonic() + wait_s
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.wait()
        if process.stdin is not None:
            process.stdin.close()
