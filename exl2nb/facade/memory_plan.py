"""What a model will take before it is loaded: weights, cache, working memory, logits, against what is free. From headers alone."""

from __future__ import annotations

import html
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exl2nb.cache.modes import parse_mode
from exl2nb.cache.spec import PAGE_SIZE, CacheSpec
from exl2nb.core.errors import DeviceError, OptionError
from exl2nb.io import hub
from exl2nb.model.config import ModelConfig
from exl2nb.model.inspect import inspect
from exl2nb.model.loader import read_model_config

CONTEXT = 4096  # as `load`, where the caller does not say and the model allows more
CHUNK = 512  # prompt tokens that a step takes at most on the CPU
_COLOURS = {"weights": "#3b6ea8", "cache": "#52a37f", "work": "#d9a441", "logits": "#b5565e"}


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes that a loaded model will hold.

    name: of the model. device: "cpu" or "cuda". context: tokens of one text. batch: texts at once. cache_mode: how K and V are kept.
    weights: as in the files (a tied head is stored once more, in the layout of the kernels). cache: pages for batch texts of full length.
    work: activations of one step, an estimate. logits: one row per text. free: memory free now, None where it is not known.
    token_bytes: of the cache, per token.
    """

    name: str
    device: str
    context: int
    batch: int
    cache_mode: str
    weights: int
    cache: int
    work: int
    logits: int
    token_bytes: int
    free: int | None = None

    @property
    def parts(self) -> dict[str, int]:
        """Name -> bytes."""
        return {"weights": self.weights, "cache": self.cache, "work": self.work, "logits": self.logits}

    @property
    def total(self) -> int:
        """All together."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool | None:
        """Whether it fits what is free; None where that is not known."""
        return None if self.free is None else self.total <= self.free

    @property
    def longest(self) -> int | None:
        """Tokens of context at which it would just fit, at this batch; whole pages; None where free memory is not known."""
        if self.free is None:
            return None
        room = self.free - (self.total - self.cache)
        return max(0, room // (self.token_bytes * PAGE_SIZE * self.batch) * PAGE_SIZE)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "name": self.name,
            "device": self.device,
            "context": self.context,
            "batch": self.batch,
            "cache_mode": self.cache_mode,
            "parts": self.parts,
            "total": self.total,
            "token_bytes": self.token_bytes,
            "free": self.free,
            "fits": self.fits,
            "longest": self.longest,
        }

    def verdict(self) -> str:
        """One line: does it fit, and what to do if not."""
        if self.free is None:
            return f"{_size(self.total)} in all; free memory is not known"
        if self.fits:
            return f"{_size(self.total)} in all, {_size(self.free)} free: fits, with memory for {self.longest} tokens of context"
        over = _size(self.total - self.free)
        advice = f"try context={self.longest}" if self.longest else "take fewer bits per weight"
        smaller = "" if self.cache_mode == "q4" else " or cache='q4'"
        return f"{_size(self.total)} in all, {_size(self.free)} free: {over} too much; {advice}{smaller}"

    def __str__(self) -> str:
        most = max(1, self.total, self.free or 0)
        lines = [f"{_plain(self.name)} on {self.device}, {self.batch} x {self.context} tokens, {self.cache_mode} cache"]
        for name, size in self.parts.items():
            lines.append(f"{name:<8} {_size(size):>10}  {'#' * round(40 * size / most)}".rstrip())
        return "\n".join([*lines, self.verdict()])

    def _repr_html_(self) -> str:
        most = max(1, self.total, self.free or 0)
        bars = "".join(
            f'<div title="{name}: {_size(size)}" style="width:{100 * size / most:.2f}%;background:{_COLOURS[name]}"></div>'
            for name, size in self.parts.items()
        )
        names = " ".join(
            f'<span style="white-space:nowrap"><span style="color:{_COLOURS[name]}">&#9632;</span> {name} {_size(size)}</span>'
            for name, size in self.parts.items()
        )
        first = html.escape(str(self).split("\n", 1)[0])
        return (
            f'<div style="font:13px/1.5 system-ui,sans-serif;max-width:46rem"><b>{first}</b>'
            f'<div style="display:flex;height:18px;border:1px solid rgba(128,128,128,.6)">{bars}</div>'
            f"<div>{names}</div><div>{html.escape(self.verdict())}</div></div>"
        )


def plan(
    path: str | os.PathLike[str],
    *,
    context: int | None = None,
    cache: str = "fp16",
    batch: int = 1,
    device: str = "cpu",
    free: int | None = None,
    revision: str | None = None,
) -> MemoryPlan:
    """Say what a model will take, without loading it.

    Args:
        path: model directory or hub id. revision: branch, tag or commit on the hub.
        context: tokens of prompt and answer; None = what the model allows, at most 4096.
        cache: mode of the KV cache, as in `load`.
        batch: texts of full length that the cache holds at once (`load(cache_tokens=batch * context)`).
        device: "cpu" or "cuda": whose free memory it is held against.
        free: bytes to hold it against; None asks the device.

    Raises:
        OptionError: a number out of range, an unknown mode or device. ModelNotFound, ConfigError, FormatError: the model cannot be read.
        DeviceError: device "cuda" without one.

    Example:
        >>> import exl2nb as ex
        >>> from pathlib import Path
        >>> ex.plan(Path(ex.__file__).parent / "demo_model", batch=4, free=10**9).fits
        True
    """
    for name, value, high in (("context", context, 1 << 24), ("batch", batch, 1 << 16), ("free", free, 1 << 60)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high):
            raise OptionError(f"plan: {name} is {value!r}; expected a whole number from 1 to {high}")
    if device not in ("cpu", "cuda"):
        raise OptionError(f"plan: device is {device!r}; expected 'cpu' or 'cuda'")
    folder = hub.resolve(path, revision=revision)
    config, found = read_model_config(folder), inspect(folder)
    tokens = context if context is not None else min(config.max_position_embeddings, CONTEXT)
    pages = batch * -(-tokens // PAGE_SIZE)
    spec = CacheSpec(config.num_layers, config.num_kv_heads, config.head_dim, pages, parse_mode(cache, where="plan"))
    copied = found.embedding.nbytes if found.embedding is not None and found.head is None else 0
    return MemoryPlan(
        name=Path(folder).name,
        device=device,
        context=tokens,
        batch=batch,
        cache_mode=spec.mode,
        weights=found.total_bytes + copied,
        cache=spec.total_bytes,
        work=_work_bytes(config, min(CHUNK, batch * tokens)),
        logits=4 * batch * config.vocab_size,
        token_bytes=spec.token_bytes,
        free=free if free is not None else free_bytes(device),
    )


def free_bytes(device: str = "cpu") -> int | None:
    """Memory free now: of the machine or the container it is in, or of the first GPU; None where it cannot be asked.

    Raises:
        DeviceError: "cuda" without a GPU.
    """
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise DeviceError(
                "plan: device is 'cuda', but torch sees no GPU; use device='cpu', or free= with the bytes of the card in mind"
            )
        return int(torch.cuda.mem_get_info()[0])
    known = [value for value in (_available(), _container()) if value is not None]
    return min(known, default=None)


def _available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
    except (OSError, ValueError, IndexError):
        return None


def _container() -> int | None:
    """What a control group leaves, as on Binder."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        return None if limit == "max" else max(0, int(limit) - int((folder / "memory.current").read_text(encoding="ascii")))
    except (OSError, ValueError):
        return None


def _work_bytes(config: ModelConfig, tokens: int) -> int:
    """Activations of a step of `tokens` tokens in f32: residual and its norm, q, k, v and what attention gives, both halves of the MLP."""
    inner = (
        config.intermediate_size if config.moe is None else max(config.intermediate_size, config.moe.intermediate_size * config.moe.top_k)
    )
    per_token = 2 * config.hidden_size + 2 * config.q_size + 2 * config.kv_size + 3 * inner
    return 4 * tokens * per_token


def _size(count: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count} bytes"


def _plain(name: str) -> str:
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name[:80])
