"""The memory of a model before it is loaded: weights, cache, activations, logits, compared with free memory; from headers alone."""

from __future__ import annotations

import html
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from exl2nb.cache.modes import parse_mode
from exl2nb.core.errors import DeviceError, OptionError
from exl2nb.io.peek import peek
from exl2nb.llm.plan_model import MULTIPROCESSORS, PARTS, Formula, formula_of
from exl2nb.model.inspect import inspect
from exl2nb.model.loader import read_model_config

CONTEXT = 4096  # as `load`, where the caller does not say and the model allows more
LIMITS = {"context": 1 << 24, "batch": 1 << 16, "free": 1 << 60}
COLOURS = {"weights": "#3b6ea8", "cache": "#52a37f", "work": "#d9a441", "graphs": "#8a6fb0", "logits": "#b5565e", "rounding": "#9a9a9a"}
LABELS = {"weights": "weights", "cache": "cache", "work": "activations", "graphs": "graphs", "logits": "logits", "rounding": "rounding"}


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes that a loaded model will take.

    name: of the model. device: "cpu" or "cuda". context: tokens of one sequence. batch: sequences. cache_mode: format of K and V. weights:
    in the layout of the kernels; a tied head is stored once more. cache: pages for `batch` sequences of full length. work: activations of
    the largest step. graphs: what captured decode steps and CUDA's own code keep, on a GPU. logits: one row per sequence. rounding: what
    the allocator of a GPU takes beyond the tensors. free: memory free now, None where it is not known. token_bytes: of the cache, per
    token. formula: gives these numbers for any other choice, see `at`.
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
    formula: Formula = field(repr=False)
    graphs: int = 0
    rounding: int = 0
    free: int | None = None

    @property
    def parts(self) -> dict[str, int]:
        """Name -> bytes."""
        return {name: getattr(self, name) for name in PARTS}

    def at(self, *, context: int | None = None, batch: int | None = None, cache: str | None = None, free: int | None = None) -> MemoryPlan:
        """The same model with other choices; None keeps a value.

        Raises:
            OptionError: a number out of range, or a cache mode that this model cannot have.

        Example:
            >>> import exl2nb as ex
            >>> from pathlib import Path
            >>> planned = ex.plan(Path(ex.__file__).parent / "demo_model", cache="fp16")
            >>> planned.at(cache="q4").cache < planned.cache / 3
            True
        """
        return MemoryPlan.of(
            self.formula,
            name=self.name,
            device=self.device,
            context=self.context if context is None else context,
            batch=self.batch if batch is None else batch,
            cache=self.cache_mode if cache is None else cache,
            free=self.free if free is None else free,
        )

    def unbounded(self) -> MemoryPlan:
        """A copy with free memory not known."""
        return replace(self, free=None)

    @classmethod
    def of(cls, formula: Formula, *, name: str, device: str, context: int, batch: int, cache: str, free: int | None = None) -> MemoryPlan:
        """What a formula gives for one choice.

        Raises:
            OptionError: a number out of range, or a cache mode that the formula does not know.
        """
        for what, value in {"context": context, "batch": batch, **({} if free is None else {"free": free})}.items():
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LIMITS[what]:
                raise OptionError(f"plan: {what} is {value!r}; expected a whole number from 1 to {LIMITS[what]}")
        mode = parse_mode(cache, where="plan")
        if mode not in formula.page_bytes:
            raise OptionError(f"plan: cache mode {mode!r} is not for this model; expected one of {', '.join(formula.page_bytes)}")
        return cls(
            name=name,
            device=device,
            context=context,
            batch=batch,
            cache_mode=mode,
            token_bytes=formula.page_bytes[mode] // formula.page_tokens,
            formula=formula,
            free=free,
            **formula.parts(context=context, batch=batch, mode=mode),
        )

    @property
    def total(self) -> int:
        """All together."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool | None:
        """Whether it fits the free memory; None if that is not known."""
        return None if self.free is None else self.total <= self.free

    @property
    def longest(self) -> int | None:
        """Tokens of context that fit at this batch and the model allows; whole pages; None where free memory is not known."""
        if self.free is None:
            return None
        return self.formula.fitting_context(self.free, batch=self.batch, mode=self.cache_mode)

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
            "formula": self.formula.to_dict(),
        }

    def verdict(self) -> str:
        """One line: does it fit, and what to do if not."""
        if self.free is None:
            return f"{size_text(self.total)} in all; free memory is not known"
        sizes, most = f"{size_text(self.total)} in all, {size_text(self.free)} free", self.formula.longest
        if self.fits and self.context > most:
            return f"{sizes}: there is memory, but the model itself reads {most} tokens at most; take context={most}"
        if self.fits:
            return f"{sizes}: fits, with memory for {self.longest} tokens of context"
        over = size_text(self.total - self.free)
        advice = f"try context={self.longest}" if self.longest else "take fewer bits per weight"
        smaller = "" if self.cache_mode == "q4" else " or cache='q4'"
        return f"{sizes}: {over} too much; {advice}{smaller}"

    def __str__(self) -> str:
        most = max(1, self.total, self.free or 0)
        lines = [f"{_plain(self.name)} on {self.device}, {self.batch} x {self.context} tokens, {self.cache_mode} cache"]
        for name, size in self.parts.items():
            if not size:
                continue  # no graphs on a CPU
            lines.append(f"{name:<8} {size_text(size):>10}  {'#' * round(40 * size / most)}".rstrip())
        return "\n".join([*lines, self.verdict()])

    def _repr_html_(self) -> str:
        most = max(1, self.total, self.free or 0)
        bars = "".join(
            f'<div title="{name}: {size_text(size)}" style="width:{100 * size / most:.2f}%;background:{COLOURS[name]}"></div>'
            for name, size in self.parts.items()
            if size
        )
        names = " ".join(
            f'<span style="white-space:nowrap"><span style="color:{COLOURS[name]}">&#9632;</span> {name} {size_text(size)}</span>'
            for name, size in self.parts.items()
            if size
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
    """Compute what a model will take, without loading it.

    Args:
        path: model directory or hub id, of which headers are read and nothing is downloaded. revision: branch, tag or commit on the hub.
        context: tokens of prompt and answer; None = what the model allows, at most 4096.
        cache: mode of the KV cache, as in `load`.
        batch: sequences of full length in the cache (`load(cache_tokens=batch * context)`).
        device: "cpu" or "cuda": whose free memory it is compared with. "cuda" where there is no GPU assumes an H100 and needs `free`.
        free: bytes to compare with; None queries the device.

    Raises:
        OptionError: a number out of range, an unknown mode or device. ModelNotFound, ConfigError, FormatError: the model cannot be read.
        DeviceError: device "cuda" without one.

    Example:
        >>> import exl2nb as ex
        >>> from pathlib import Path
        >>> ex.plan(Path(ex.__file__).parent / "demo_model", batch=4, free=10**9).fits
        True
    """
    if device not in ("cpu", "cuda"):
        raise OptionError(f"plan: device is {device!r}; expected 'cpu' or 'cuda'")
    mode = parse_mode(cache, where="plan")
    with peek(path, revision) as folder:  # of a hub id the headers alone
        config, found = read_model_config(folder), inspect(folder)
        name = folder.name if Path(path).expanduser().exists() else Path(path).name
    return MemoryPlan.of(
        formula_of(config, found, device, modes=(mode,), multiprocessors=_multiprocessors()),
        name=name,
        device=device,
        context=context if context is not None else min(config.max_position_embeddings, CONTEXT),
        batch=batch,
        cache=mode,
        free=free if free is not None else free_bytes(device),
    )


def _multiprocessors() -> int:
    """Of the GPU here, or of the one that is assumed."""
    import torch

    return torch.cuda.get_device_properties().multi_processor_count if torch.cuda.is_available() else MULTIPROCESSORS


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
    """Free memory of the control group, as on Binder."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        return None if limit == "max" else max(0, int(limit) - int((folder / "memory.current").read_text(encoding="ascii")))
    except (OSError, ValueError):
        return None


def size_text(count: int) -> str:
    """Readable bytes: 7.80 MiB."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count} bytes"


def _plain(name: str) -> str:
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name[:80])
