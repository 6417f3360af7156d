"""Text that the dense model writes, many rows at once: the reference network with keys and values kept. Knows nothing of files.

What a model writes at temperature 1 is text of the distribution that it learned, and there is no end of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from exl2nb.model import reference
from exl2nb.model.config import ModelConfig
from exl2nb.ops.gpu import capturing, fast_products

SEED_TOKENS = 8  # tokens of a text that a row begins with
WRITING_BYTES = {"cpu": 1 << 29, "cuda": 16 << 30}  # of keys, values and predictions: rows that are written together are as many as fit
MAX_CONCURRENT_ROWS = 4096  # rows at once
CACHE_STEP_TOKENS = 64  # of the cache: a recorded step reads the next multiple of them, whatever lies beyond its own place masked
LAUNCH_AHEAD_TOKENS = 4  # tokens that are launched before the first of them is waited for


def rows_at_once(config: ModelConfig, length: int, device: torch.device) -> int:
    """Rows of `length` tokens that are written together."""
    most = WRITING_BYTES[device.type]
    if device.type == "cuda" and torch.cuda.is_available():
        most = min(most, torch.cuda.get_device_properties(device).total_memory // 4)
    return max(1, min(MAX_CONCURRENT_ROWS, most // _row_bytes(config, length, device)))


def writing_bytes(config: ModelConfig, length: int, device: torch.device) -> int:
    """Memory that rows which are written together take, the model's weights not counted."""
    return rows_at_once(config, length, device) * _row_bytes(config, length, device)


def _row_bytes(config: ModelConfig, length: int, device: torch.device) -> int:
    cache = 2 * config.num_layers * config.num_kv_heads * config.head_dim * length * _writing_dtype(device).itemsize
    return cache + 12 * config.vocab_size + 4 * (8 * config.hidden_size + 4 * config.intermediate_size)


def _writing_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.float16


class PastTokens:
    """Keys and values of all layers, `(B, Hkv, S, D)` each (reference.Past).

    positions: int64 `(1,)`, of the token that runs. read: how many places of the cache it reads: those up to its own, or more, with a mask.
    """

    def __init__(self, config: ModelConfig, rows: int, context: int, device: torch.device) -> None:
        self._config, self.context, self.read = config, context, 0
        self.positions = torch.zeros(1, dtype=torch.int64, device=device)
        shape = (config.num_layers, 2, rows, config.num_kv_heads, context, config.head_dim)
        self._held = torch.zeros(shape, dtype=_writing_dtype(device), device=device)  # what lies beyond a token is finite
        self._hidden: dict[int, Tensor] = {}

    def begin(self, read: int, masked: bool) -> None:
        """The next token reads `read` places. masked: as its position says on the device."""
        self.read, self._hidden = read, {}
        for window in set(self._config.windows) if masked else ():
            place = torch.arange(read, device=self.positions.device)
            seen = place <= self.positions
            self._hidden[window] = ~(seen & (place > self.positions - window) if window > 0 else seen)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One more token of every row; all query heads of a KV head attend as if they were queries of one."""
        config, held, window = self._config, self._held[layer], self._config.windows[layer]
        for kept, new in zip(held, (k, v)):
            kept.index_copy_(2, self.positions, new.to(held.dtype))
        hidden, cap = self._hidden.get(window), config.attention_softcap
        first = max(0, self.read - window) if window > 0 and hidden is None else 0
        keys, values = held[:, :, :, first : self.read]
        queries = q[:, :, 0].unflatten(1, (k.shape[1], -1))  # (B, Hkv, Hq / Hkv, D)
        if hidden is None and not cap:
            mixed = F.scaled_dot_product_attention(queries.to(held.dtype), keys, values, scale=config.attention_scale)
        else:
            scores = ((queries * config.attention_scale).to(held.dtype) @ keys.transpose(-1, -2)).float()
            scores = cap * torch.tanh(scores / cap) if cap else scores
            scores = scores if hidden is None else scores.masked_fill_(hidden, -torch.inf)
            mixed = scores.softmax(-1).to(held.dtype) @ values
        return mixed.float().flatten(1, 2)[:, :, None]


class _Writer:
    """`rows` rows at a time. On a GPU a token of all of them is a graph, which is launched while those before it run.

    A graph reads the token's place from the device, so one serves CACHE_STEP_TOKENS tokens. Experts are chosen on the host: such a model
    has none.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], rows: int, length: int, generator: torch.Generator) -> None:
        self._config, self._weights, self._length = config, weights, length
        self._device, self._generator = generator.device, generator
        self._ids = torch.zeros(rows, length, dtype=torch.int64, device=self._device)
        self._noise = torch.empty(rows, config.vocab_size, device=self._device)
        self._past = PastTokens(config, rows, length, self._device)
        self._records = self._device.type == "cuda" and not any(map(config.experts, range(config.num_layers)))
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def write(self, begin: Tensor, step: Callable[[int], None]) -> Tensor:
        """Rows int `(n, P)`, n up to `rows`, continued: int32 `(n, length)` on the CPU."""
        rows, known = begin.shape
        self._ids[:rows, :known] = begin.to(self._device)
        self._ids[rows:, :known] = self._ids[:1, :known]
        self._past.positions.zero_()
        launched = deque[torch.cuda.Event]()
        for at in range(self._length - 1):
            draw = at + 1 >= known
            if draw:
                self._noise.exponential_(generator=self._generator)
            if self._records and draw and at:
                self._graph(at).replay()
            else:
                self._token(at + 1, draw)
            if self._records:
                launched.append(torch.cuda.Event(blocking=True))
                launched[-1].record()
                if len(launched) > LAUNCH_AHEAD_TOKENS:
                    launched.popleft().synchronize()
            step(rows)
        return self._ids[:rows].to(torch.int32).cpu()

    def _graph(self, at: int) -> torch.cuda.CUDAGraph:
        """Of the token at place `at` and all others that read as many places."""
        read = min(self._length, (at // CACHE_STEP_TOKENS + 1) * CACHE_STEP_TOKENS)
        if read not in self._graphs:
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self._device)
            pool = next((made.pool() for made in self._graphs.values()), None)
            record = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
            with capturing, torch.cuda.device(self._device), record:
                self._token(read, draw=True, masked=True)
            self._graphs[read] = graph
        return self._graphs[read]

    def _token(self, read: int, draw: bool, masked: bool = False) -> None:
        """All rows' next token runs; draw: and the one after it is drawn, by the noise: exponential numbers."""
        config, weights, past = self._config, self._weights, self._past
        past.begin(read, masked)
        with fast_products(self._device) if self._device.type == "cuda" else nullcontext():  # on the CPU too few rows for it to pay
            x = reference.embed(config, weights, self._ids.index_select(1, past.positions), past.positions)
            for layer in range(config.num_layers):
                x = reference.block(config, layer, weights, x, past=past)
            past.positions += 1
            if draw:
                probabilities = reference.head(config, weights, reference.final_norm(config, weights, x[:, 0])).softmax(-1)
                self._ids.index_copy_(1, past.positions, probabilities.div_(self._noise).argmax(-1, keepdim=True))


def write_rows(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    beginnings: Tensor,
    length: int,
    seed: int,
    step: Callable[[int], None] = lambda tokens: None,
) -> Tensor:
    """Continue every row at temperature 1, nothing filtered.

    Args:
        weights: of the dense model, by name; on a GPU they lie there.
        beginnings: int `(R, P)`, what each row begins with.
        length: tokens of a row when it is finished.
        step: called with the number of tokens that were added, again and again.

    Returns:
        int32 `(R, length)` on the CPU; the same for the same arguments on the same machine.
    """
    device = weights[f"{config.names.embed}.weight"].device
    generator = torch.Generator(device).manual_seed(seed)
    rows, made, writer = rows_at_once(config, length, device), list[Tensor](), None
    if device.type == "cuda" and len(beginnings):  # equal parts, which all use the same graphs
        rows = -(-len(beginnings) // -(-len(beginnings) // rows))
    for begin in beginnings.split(rows):
        if writer is None or device.type == "cpu":
            writer = _Writer(config, weights, len(begin), length, generator)
        made.append(writer.write(begin, step))
    return torch.cat(made) if len(beginnings) else torch.empty(0, length, dtype=torch.int32)
