"""What a model takes on several devices, and what it takes there when the borders between them move.

`SplitFormula` holds the coefficients of each kind of device. `SHARE_TERMS` is the arithmetic, as data, which the browser computes too.
`exl2nb.llm.plan` makes a `SplitPlan` of a model's headers and of what was asked for.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

from exl2nb.core.errors import OptionError
from exl2nb.core.options import shown
from exl2nb.core.show import size_text
from exl2nb.llm.memory import INPUT_LIMITS, PLAN_TERMS, Formula, Term, evaluate
from exl2nb.model.streaming import streamed_layers

MOST_DEVICES, MOST_LAYERS = 64, 4096  # of data that came from elsewhere
MAX_SPEED_BYTES_PER_S = 1e15  # bytes a second


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one device holds of a model, in bytes.

    device: its name. first, last: layers [first, last). weights: with the embedding or the head where they are there. cache: of these
    layers; of those that the CPU lends to a GPU it is there. work: activations, and on a GPU what CUDA and captured steps keep. read:
    weights that a step of one sequence reads, those of lent layers on the GPU. free: memory
    free now, None where it is not known. speed: bytes a second that it reads, None where it is not known. experts: of these layers it holds
    the experts alone, and the others hold the rest.
    """

    device: str
    first: int
    last: int
    weights: int
    cache: int
    work: int
    read: int
    free: int | None
    speed: float | None
    experts: bool = False

    @property
    def total(self) -> int:
        """All together."""
        return self.weights + self.cache + self.work


# Layers [first, last) in `parts` and `read`, with the embedding before layer 0 and the head after the
# last layer.
_HELD_TERMS: list[Term] = [
    ["step", "first", 0, 0, ["+", "first", 1]],
    ["step", "last", ["+", "layers", -1], ["+", "last", 1], ["+", "layers", 2]],
]
SHARE_TERMS: Sequence[tuple[str, Term]] = (
    ("layer_cache", ["floor", "cache", "layers"]),
    ("lent_count", ["at", "lent_counts", "host"]),
    ("share_weights", ["sum", "parts", *_HELD_TERMS]),
    ("share_cache", ["*", "layer_cache", ["+", "last", ["*", -1, "first"], ["*", "sign", "lent_count"]]]),
    ("share_work", ["+", "work", "graphs", "logits", "rounding", "stream", ["*", "lent", "lent_count"]]),
    ("share_read", ["+", ["sum", "read", *_HELD_TERMS], ["*", "sign", ["sum", "lent_read", 0, "lent_count"]]]),
)
"""What a device with layers [first, last) holds, from `PLAN_TERMS` and the values of `KindFormula.known`.

host: of how many layers of the CPU it lends some (sign -1), or computes those that are lent (sign 1); 0 for none.
"""


class Sizes(NamedTuple):
    """A model on one kind of device at one choice of context, batch and cache mode. known: the values of `PLAN_TERMS`."""

    known: Mapping[str, Any]

    def of(self, first: int, last: int, *, host: int = 0, sign: int = 1) -> dict[str, int]:
        """Weights, cache, work and read of layers [first, last), as in `SHARE_TERMS`; nothing where there are none."""
        names = ("weights", "cache", "work", "read")
        if last <= first:
            return dict.fromkeys(names, 0)
        found = evaluate(SHARE_TERMS, {**self.known, "first": first, "last": last, "host": host, "sign": sign})
        return {name: found[f"share_{name}"] for name in names}

    def total(self, first: int, last: int, *, host: int = 0) -> int:
        """Bytes that a device with these layers holds."""
        found = self.of(first, last, host=host)
        return found["weights"] + found["cache"] + found["work"]


@dataclass(frozen=True, kw_only=True)
class KindFormula:
    """A model on one kind of device, "cpu" or "cuda".

    parts: bytes of the embedding, each layer, and head. read: of them what a step of one sequence reads, 0 of the embedding. stream: bytes
    of the table by which a device takes the residual stream over. lent: bytes of a captured step of one layer. formula: of all that depends
    on context, batch and cache mode.
    """

    parts: tuple[int, ...]
    read: tuple[int, ...]
    stream: int
    lent: int
    formula: Formula

    def at(self, *, context: int, batch: int, mode: str) -> Sizes:
        """The sizes for one choice.

        Raises:
            OptionError: a cache mode that this model cannot have.
        """
        if mode not in self.formula.page_bytes:
            raise OptionError(f"plan: cache mode {mode!r} is not for this model; expected one of {', '.join(self.formula.page_bytes)}")
        choice = {"context": context, "batch": batch, "mode": mode}
        return Sizes(evaluate(PLAN_TERMS, {**vars(self.formula), **self.known, **choice}))

    @property
    def known(self) -> dict[str, Any]:
        """What `SHARE_TERMS` need of it: plain JSON values."""
        layers = len(self.parts) - 2
        lent = {
            "lent_counts": [len(streamed_layers(host)) for host in range(layers + 1)],
            "lent_read": [self.read[layer + 1] for layer in streamed_layers(layers)],
        }
        return {"layers": layers, "parts": [*self.parts], "read": [*self.read], "stream": self.stream, "lent": self.lent, **lent}

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"parts": [*self.parts], "read": [*self.read], "stream": self.stream, "lent": self.lent, "formula": self.formula.to_dict()}


class Holder(NamedTuple):
    """A device. limit: bytes that it may hold, its budget or else its free memory. speed: bytes a second that it reads. None: not known."""

    name: str
    limit: int | None = None
    speed: float | None = None

    @property
    def kind(self) -> str:
        """Which kind: "cpu" or "cuda"."""
        return self.name.partition(":")[0]


@dataclass(frozen=True, kw_only=True)
class SplitFormula:
    """Bytes on each device as a function of the borders between them, context, batch and cache mode.

    devices: in running order. kinds: those of the devices. lends: the CPU, where it is the first, lends layers to the next GPU while tokens
    are decoded (`model.streaming`).
    """

    devices: tuple[Holder, ...]
    kinds: Mapping[str, KindFormula]
    lends: bool = False

    @property
    def layers(self) -> int:
        """Of the model."""
        return len(next(iter(self.kinds.values())).parts) - 2

    @property
    def formula(self) -> Formula:
        """One that knows page sizes and the longest context."""
        return self.kinds[self.devices[0].kind].formula

    def check(self, borders: object) -> tuple[int, ...]:
        """Borders that can be: where each device but the last ends.

        Raises:
            OptionError: others.
        """
        wanted = len(self.devices) - 1
        if isinstance(borders, Sequence) and not isinstance(borders, str) and len(borders) == wanted:
            numbers = [n for n in borders if isinstance(n, int) and not isinstance(n, bool)]
            if len(numbers) == wanted and all(a <= b for a, b in pairwise([0, *numbers, self.layers])):
                return tuple(numbers)
        raise OptionError(
            f"plan: borders are {shown(borders)}; expected {wanted} rising numbers from 0 to {self.layers}, where devices end"
        )

    def shares(self, borders: Sequence[int], *, context: int, batch: int, mode: str) -> tuple[Share, ...]:
        """What each device that has layers holds.

        Raises:
            OptionError: borders that cannot be, or a cache mode that this model cannot have.
        """
        sizes = {kind: one.at(context=context, batch=batch, mode=mode) for kind, one in self.kinds.items()}
        places = zip(self.devices, pairwise([0, *self.check(borders), self.layers]))
        held = [(device, first, last) for device, (first, last) in places if last > first]
        host = self._host([(device.name, last) for device, _, last in held])
        found = []
        for number, (device, first, last) in enumerate(held):
            here = sizes[device.kind].of(first, last, host=host if number < 2 else 0, sign=1 if number else -1)
            found.append(Share(device=device.name, first=first, last=last, free=device.limit, speed=device.speed, experts=False, **here))
        return tuple(found)

    def _host(self, ends: Sequence[tuple[str, int]]) -> int:
        """How many layers of the CPU can be lent. ends: names of the devices that have layers, and the layers where these end."""
        lends = self.lends and len(ends) > 1 and ends[0][0] == "cpu" and ends[1][0] != "cpu"
        return ends[0][1] if lends else 0

    def lent(self, shares: Sequence[Share]) -> Sequence[int]:
        """The layers of the first share that are lent to the second."""
        return streamed_layers(self._host([(share.device, share.last) for share in shares]))

    def borders(self, shares: Sequence[Share]) -> tuple[int, ...]:
        """Where each device but the last ends."""
        ends, left = [], [*shares]
        for device in self.devices:
            if left and left[0].device == device.name:
                ends.append(left.pop(0).last)
            else:
                ends.append(ends[-1] if ends else 0)
        return tuple(ends[:-1])

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        kinds = {kind: one.to_dict() for kind, one in self.kinds.items()}
        return {"devices": [[*device] for device in self.devices], "kinds": kinds, "lends": self.lends}

    @classmethod
    def from_dict(cls, data: Any) -> SplitFormula:
        """Back from `to_dict`.

        Raises:
            OptionError: it is not what `to_dict` gives.
        """
        try:
            devices = tuple(Holder(name, limit, speed) for name, limit, speed in data["devices"])
            kinds = {
                kind: KindFormula(
                    parts=tuple(one["parts"]),
                    read=tuple(one["read"]),
                    stream=one["stream"],
                    lent=one["lent"],
                    formula=Formula.from_dict(one["formula"]),
                )
                for kind, one in data["kinds"].items()
            }
            lends = data["lends"] is True
        except (TypeError, KeyError, ValueError, AttributeError) as cause:
            raise OptionError(f"plan: the formula of several devices is {shown(data)[:200]}; expected what to_dict gives") from cause
        good = 0 < len(devices) <= MOST_DEVICES and all(_is_holder(device) and device.kind in kinds for device in devices)
        rows = [row for one in kinds.values() for row in (one.parts, one.read)]
        good = good and len({len(row) for row in rows}) == 1 and 3 <= len(rows[0]) <= MOST_LAYERS
        if not good or not all(
            _is_bytes(n) for n in [*(n for row in rows for n in row), *(n for one in kinds.values() for n in (one.stream, one.lent))]
        ):
            raise OptionError(
                "plan: the formula of several devices holds what is no device or no number of bytes; expected what to_dict gives"
            )
        return cls(devices=devices, kinds=kinds, lends=lends)


def _count(share: Share) -> str:
    """Of its layers, as `load` takes it."""
    layers = share.last - share.first
    return f"{layers} layer{'s' * (layers > 1)}"


def _is_bytes(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53  # exact in the browser too


def _is_holder(device: Holder) -> bool:
    named = isinstance(device.name, str) and device.kind in ("cpu", "cuda") and len(device.name) < 16
    return named and (device.limit is None or check_limit(device.limit)) and (device.speed is None or check_speed(device.speed))


def check_limit(value: object) -> bool:
    """Whether a device may hold so many bytes."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= INPUT_LIMITS["free"]


def check_speed(value: object) -> bool:
    """Whether a device may read so many bytes a second."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and 0 < value <= MAX_SPEED_BYTES_PER_S


DEVICE_COLOURS = ("#5b6470", "#a4541f", "#2f7a58", "#75589c", "#a5464e", "#2f7f93", "#76661f", "#666666")
"""Of the devices in the widget and its twin; of the ninth the first again. White text has a contrast of 4.5:1 on each."""


@dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """Bytes that a model takes on each of several devices; see `MemoryPlan` for one.

    name: of the model. context, batch, cache_mode: as there. shares: in running order. parallel: "layers" or "tensor", as in `load`; with
    "tensor" each device has a part of every layer. path: of the model, as it was asked for, with revision. formula: gives these numbers for
    other choices, see `at`; None with "tensor".
    """

    name: str
    context: int
    batch: int
    cache_mode: str
    shares: tuple[Share, ...]
    parallel: str = "layers"
    path: str = field(default="", repr=False)
    revision: str | None = field(default=None, repr=False)
    formula: SplitFormula | None = field(default=None, repr=False)

    def at(
        self,
        *,
        borders: Sequence[int] | None = None,
        context: int | None = None,
        batch: int | None = None,
        cache: str | None = None,
        limits: Mapping[str, int | None] | None = None,
        speeds: Mapping[str, float | None] | None = None,
    ) -> SplitPlan:
        """The same model with other choices; None keeps a value.

        Args:
            borders: layers where each device but the last ends: (12, 20) puts layers 0 to 11 on the first, 12 to 19 on the second.
            context, batch, cache: as in `plan`. limits: bytes that a device may hold, by name. speeds: bytes a second that it reads, by
                name. None in them: not known.

        Raises:
            OptionError: borders that cannot be, a number out of range, a cache mode that this model cannot have, an unknown device, or a
                plan without borders (parallel="tensor", or one name for two devices).

        Example:
            >>> import exl2nb as ex
            >>> from pathlib import Path
            >>> demo = Path(ex.__file__).parent / "demo_model"
            >>> planned = ex.plan(demo, devices={"cuda:0": "1GiB", "cpu": "rest"})
            >>> [(share.device, share.last) for share in planned.at(borders=[5]).shares]
            [('cpu', 5), ('cuda:0', 12)]
        """
        formula = self.movable()
        for what, value in (("context", context), ("batch", batch)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= INPUT_LIMITS[what]):
                raise OptionError(f"plan: {what} is {value!r}; expected a whole number from 1 to {INPUT_LIMITS[what]}")
        names = [device.name for device in formula.devices]
        for what, given, check in (("limits", limits or {}, check_limit), ("speeds", speeds or {}, check_speed)):
            for name, value in given.items():
                if name not in names or not (value is None or check(value)):
                    raise OptionError(f"plan: {what} has {shown(name)}: {shown(value)}; expected sizes above 0 of {', '.join(names)}")
        old = self.borders
        devices = tuple(
            Holder(name, (limits or {}).get(name, limit), (speeds or {}).get(name, speed)) for name, limit, speed in formula.devices
        )
        formula = replace(formula, devices=devices)
        choice = {
            "context": self.context if context is None else context,
            "batch": self.batch if batch is None else batch,
            "mode": self.cache_mode if cache is None else cache,
        }
        shares = formula.shares(old if borders is None else borders, **choice)
        return replace(
            self, context=choice["context"], batch=choice["batch"], cache_mode=choice["mode"], shares=shares, formula=formula
        )  # fmt: skip

    def movable(self) -> SplitFormula:
        """The formula.

        Raises:
            OptionError: the plan has no borders that could move.
        """
        if self.formula is None or len({device.name for device in self.formula.devices}) < len(self.formula.devices):
            why = "experts on the CPU" if any(share.experts for share in self.shares) else f"parallel={self.parallel!r}"
            why = why if self.formula is None else "one name for two devices"
            raise OptionError(f"plan: {why}: no borders between devices; expected a plan of layers on devices with different names")
        return self.formula

    @property
    def borders(self) -> tuple[int, ...]:
        """Where each device but the last ends, those without layers included; as `at` takes them."""
        return self.movable().borders(self.shares)

    @property
    def total(self) -> int:
        """All devices together."""
        return sum(share.total for share in self.shares)

    @property
    def fits(self) -> bool | None:
        """Whether every device has room; None if that is not known of one."""
        known = [share.total <= share.free for share in self.shares if share.free is not None]
        return False if not all(known) else True if len(known) == len(self.shares) else None

    @property
    def tokens_per_second(self) -> float | None:
        """What one sequence decodes at most: devices with whole layers read them one after the other, those with parts of all at the same
        time; None: a speed is not known.
        """
        times = [share.read / share.speed for share in self.shares if share.speed]
        spent = sum(times) if self.parallel == "layers" else max(times, default=0.0)
        return 1 / spent if len(times) == len(self.shares) and spent else None

    @property
    def load_source(self) -> str:
        """The model's place and revision, as arguments in Python."""
        return repr(self.path or self.name) + ("" if self.revision is None else f", revision={self.revision!r}")

    @property
    def load_line(self) -> str:
        """Python that loads the model so."""
        sizes = f"context={self.context}, cache={self.cache_mode!r}"
        if self.batch > 1:
            sizes += f", cache_tokens={self.context * self.batch}"
        return f"llm = ex.load({self.load_source}, {self._placed()}, {sizes})"

    def _placed(self) -> str:
        names = [share.device for share in self.shares]
        if any(share.experts for share in self.shares):
            first, *others = (share for share in self.shares if not share.experts)
            counts = {share.device: _count(share) for share in others}
            return f"devices={ {first.device: 'rest'} | counts | {'cpu': 'experts'}!r}"
        if self.parallel == "tensor":
            return f"devices={names!r}, parallel='tensor'"
        if len(names) == 1:
            return f"device={names[0]!r}"
        if len(set(names)) < len(names):
            return f"devices={names!r}"
        if names == ["cpu", "cuda"]:
            return f"gpu_layers={self.shares[1].last - self.shares[1].first}"
        rest, *others = self.shares
        counts = {share.device: _count(share) for share in others}
        first = {rest.device: "rest"}  # GPUs run in the order of their names here, the CPU always first
        return f"devices={counts | first if rest.device == 'cpu' else first | counts!r}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        shares = [{**vars(share), "total": share.total} for share in self.shares]
        names = [
            "name",
            "context",
            "batch",
            "cache_mode",
            "parallel",
            "total",
            "fits",
            "tokens_per_second",
            "path",
            "revision",
            "load_line",
        ]
        formula = None if self.formula is None else self.formula.to_dict()
        return {**{name: getattr(self, name) for name in names}, "devices": shares, "formula": formula}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SplitPlan:
        """Back from `to_dict`.

        Raises:
            OptionError: it is not what `to_dict` gives.
        """
        texts = [data.get("name"), data.get("cache_mode"), data.get("path") or "", data.get("revision") or ""]
        rows = data.get("devices")
        texts = [text for text in texts if isinstance(text, str)]
        good = isinstance(rows, Sequence) and all(isinstance(row, Mapping) and {"device", "last"} <= row.keys() for row in rows)
        if not good or len(texts) < 4:
            raise OptionError(f"plan: the data is {shown(data)[:200]}; expected what exl2nb.plan(..., devices=...).to_dict() gives")
        formula = SplitFormula.from_dict(data.get("formula"))
        name, mode, path, revision = texts
        start = cls(name=name, context=1, batch=1, cache_mode=mode, shares=(), path=path, revision=revision or None, formula=formula)
        ends = {row["device"]: row["last"] for row in data["devices"] if isinstance(row["device"], str)}
        borders, last = [], 0
        for device in formula.devices[:-1]:
            last = ends.get(device.name, last)
            borders.append(last)
        if data.get("context") is None or data.get("batch") is None:
            raise OptionError("plan: the data has no context or no batch; expected what exl2nb.plan(..., devices=...).to_dict() gives")
        return start.at(borders=borders, context=data["context"], batch=data["batch"])

    def verdict(self) -> str:
        """One line: does it fit, and how fast can it be."""
        over = [
            f"{share.device} by {size_text(share.total - share.free)}"
            for share in self.shares
            if share.free is not None and share.total > share.free
        ]
        fits = f"too much for {', '.join(over)}" if over else "fits" if self.fits else "free memory is not known of every device"
        speed = self.tokens_per_second
        most = "" if speed is None else f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"
        return f"{size_text(self.total)} in all: {fits}" + (f"; at most {most} tokens/s, by bytes read" if most else "")

    def __str__(self) -> str:
        lines = [f"{self.name}, {self.batch} x {self.context} tokens, {self.cache_mode} cache"]
        most = max([1, *(max(share.total, share.free or 0) for share in self.shares)])
        for share in self.shares:
            free = "" if share.free is None else f" of {size_text(share.free)} free"
            bar = "#" * round(40 * share.total / most)
            lines.append(f"{share.device:<8} {self._held(share):<17} {size_text(share.total):>10}{free}  {bar}".rstrip())
        if self.formula is not None and (lent := self.formula.lent(self.shares)):
            lines.append(f"while tokens are decoded {self.shares[1].device} computes layers {', '.join(map(str, lent))} of the CPU's")
        return "\n".join([*lines, self.verdict()])

    def _held(self, share: Share) -> str:
        if share.experts:
            return "all experts"
        return f"layers {share.first:>3} to {share.last - 1:<3}" if self.parallel == "layers" else f"1/{len(self.shares)} of each layer"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(share.device)}</td><td>{self._held(share).removeprefix('layers ')}</td>"
            f"<td>{size_text(share.weights)}</td><td>{size_text(share.cache)}</td><td>{size_text(share.work)}</td><td><b>{size_text(share.total)}</b></td>"
            f"<td>{'not known' if share.free is None else size_text(share.free)}</td></tr>"
            for share in self.shares
        )
        head = "".join(f"<th>{name}</th>" for name in ("device", "layers", "weights", "cache", "work", "in all", "free"))
        caption = html.escape(str(self).split("\n", 1)[0])
        return f"<table><caption>{caption}</caption><tr>{head}</tr>{rows}</table><div>{html.escape(self.verdict())}</div>"
