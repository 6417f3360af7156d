"""The LoRA adapters of a loaded model: load, list, unload, and choose one or a blend of several per request."""

from __future__ import annotations

import html
import os
import re
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from exl2nb.core.errors import OptionError
from exl2nb.core.options import check_range, shown
from exl2nb.core.progress import Sink, showing
from exl2nb.core.show import facts, size_text
from exl2nb.generator.engine import Engine
from exl2nb.generator.request import LoraRow
from exl2nb.io import hub
from exl2nb.model.model import Model

if TYPE_CHECKING:
    from exl2nb.model.lora import LoraFile
    from exl2nb.ops.lora_table import Adapter

MAX_WEIGHT = 100.0
MAX_ROWS = 4096  # different adapters and blends in use at once
_ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Lora:
    """A loaded adapter.

    scale: its weight where a request names it without one. rank: its largest. targets: how many matrices of each role it changes. nbytes:
    of its numbers in memory. base: the model that its file names.
    """

    name: str
    path: Path
    scale: float
    rank: int
    targets: Mapping[str, int]
    nbytes: int
    base: str
    file: LoraFile
    changes: Adapter

    def __repr__(self) -> str:
        places = ", ".join(f"{role} x {count}" for role, count in self.targets.items())
        return f"Lora({self.name!r}: rank {self.rank}, {places}, {size_text(self.nbytes)}, scale {self.scale:g})"

    def _repr_html_(self) -> str:
        rows = {
            "rank": str(self.rank),
            "matrices": ", ".join(f"{role} \u00d7 {count}" for role, count in self.targets.items()),
            "memory": size_text(self.nbytes),
            "scale": f"{self.scale:g}",
            "made for": self.base or "not said",
        }
        return facts(f"LoRA {self.name}", rows)


class Loras:
    """`llm.loras`. Loading and unloading is safe while requests run: they keep what they began with.

    Example:
        >>> import exl2nb as ex
        >>> with ex.demo(progress=None) as llm:
        ...     llm.loras.list()
        []
    """

    def __init__(self, model: Model, engine: Engine) -> None:
        self._model, self._engine = model, engine
        self._loaded: dict[str, Lora] = {}
        self._rows: weakref.WeakValueDictionary[str, LoraRow] = weakref.WeakValueDictionary()
        self._adapters: list[Adapter | None] = []
        self._lock = threading.Lock()

    def load(
        self,
        path: str | os.PathLike[str],
        *,
        name: str | None = None,
        scale: float = 1.0,
        revision: str | None = None,
        progress: Sink | Literal["auto"] | None = "auto",
    ) -> Lora:
        """Load an adapter in PEFT's format.

        Args:
            path: directory or hub id, with adapter_config.json and adapter_model.safetensors.
            name: for requests; None = the last part of the path.
            scale: its weight where a request names it without one.
            revision: of the hub's repository.
            progress: takes the events of stage "download".

        Raises:
            ModelNotFound, FormatError, ConfigError: the adapter cannot be used with this model; says why. OptionError: a name that is taken
            or no name, a scale out of range. EngineClosed: the model was closed.
        """
        from exl2nb.model.lora import adapter_changes, read_lora
        from exl2nb.ops.lora_table import with_gemm_strips

        check_range("loras.load: scale", scale, -MAX_WEIGHT, MAX_WEIGHT)
        with showing(progress, "load an adapter") as sink:
            folder = hub.resolve(path, revision, sink, adapter=True)
        name = hub.label(path) if name is None else name
        if not isinstance(name, str) or not _ADAPTER_NAME.fullmatch(name):
            raise OptionError(f"loras.load: name is {shown(name)}; expected letters, digits, . _ and -, at most 64 of them")
        file, config = read_lora(folder, self._model.config), self._model.config
        network, program = self._engine.call(lambda: self._model.network_and_program)
        made = adapter_changes(file, config, network, program)
        if self._model.device != "cpu":  # between two steps and in their stream: what becomes free later may still be read by a step
            made = self._engine.call(lambda: with_gemm_strips({op: change.to(self._model.device) for op, change in made.items()}, program))
        roles = Counter(role for _, parts in file.targets for role in parts) + Counter(
            key.rpartition(".")[0].rpartition(".")[2] for key in file.vectors
        )
        lora = Lora(
            name=name, path=folder, scale=float(scale), rank=file.rank, targets=dict(roles), base=file.base, file=file, changes=made,
            nbytes=sum(change.nbytes for change in made.values()),
        )  # fmt: skip
        with self._lock:
            if name in self._loaded:
                raise OptionError(f"loras.load: {name!r} is loaded already; unload it first, or give another name=")
            self._loaded[name] = lora
        return lora

    def unload(self, name: str) -> None:
        """Forget an adapter. Requests that use it go on with it; its memory returns when the last one ends.

        Raises:
            OptionError: no such name.
        """
        with self._lock:
            self._named(name, where="loras.unload")
            del self._loaded[name]
            self._tidy()
            self._model.set_adapters(self._adapters)

    def list(self) -> list[Lora]:
        """What is loaded, in the order of loading."""
        with self._lock:
            return [*self._loaded.values()]

    @property
    def nbytes(self) -> int:
        """Memory of all that are loaded."""
        return sum(lora.nbytes for lora in self.list())

    def __getitem__(self, name: str) -> Lora:
        with self._lock:
            return self._named(name, where="loras")

    def __contains__(self, name: object) -> bool:
        return name in self._loaded

    def __iter__(self) -> Iterator[str]:
        return iter([lora.name for lora in self.list()])

    def __len__(self) -> int:
        return len(self._loaded)

    def __repr__(self) -> str:
        return f"Loras({', '.join(map(repr, self.list())) or 'none'})"

    def _repr_html_(self) -> str:
        rows = {lora.name: f"rank {lora.rank}, {size_text(lora.nbytes)}, scale {lora.scale:g}, {lora.path}" for lora in self.list()}
        return facts("LoRA adapters", rows) if rows else f"<p>{html.escape('No adapters are loaded: llm.loras.load(path)')}</p>"

    # ---- for requests

    def resolved(self, options: Mapping[str, Any], *, where: str) -> dict[str, Any]:
        """The options of a request with their adapters in place of names.

        Raises:
            OptionError: a name that is not loaded, or a weight out of range.
        """
        found = dict(options)
        if isinstance(lora := found.get("lora"), LoraRow) or lora is None:
            return found
        found["lora"] = self.row(lora, where=where)
        return found

    def row(self, lora: str | Mapping[str, float], *, where: str) -> LoraRow | None:
        """The adapters of a request; None where all weights are 0."""
        with self._lock:
            if isinstance(lora, str):
                weights = {lora: self._named(lora, where=where).scale}
            elif isinstance(lora, Mapping) and lora:
                weights = {}
                for name, weight in lora.items():
                    self._named(name, where=where)
                    check_range(f"{where}: lora[{name!r}]", weight, -MAX_WEIGHT, MAX_WEIGHT)
                    weights[name] = float(weight)
            else:
                raise OptionError(f"{where}: lora is {shown(lora)}; expected a name, or weights by name such as {{'a': 0.7, 'b': 0.3}}")
            mix = [(self._loaded[name], weight) for name, weight in sorted(weights.items()) if weight]
            return self._row(mix) if mix else None

    def _row(self, mix: list[tuple[Lora, float]]) -> LoraRow:
        key = " + ".join(sorted(f"{lora.file.digest} * {weight!r}" for lora, weight in mix))
        if (known := self._rows.get(key)) is not None:
            return known
        from exl2nb.ops.lora_table import blend_adapters

        _, program = self._model.network_and_program
        plain = len(mix) == 1 and mix[0][1] == 1
        adapter = mix[0][0].changes if plain else blend_adapters([(lora.changes, weight) for lora, weight in mix], program)
        self._tidy()
        free = next((row for row, taken in enumerate(self._adapters) if taken is None), len(self._adapters))
        if free >= MAX_ROWS:
            raise OptionError(f"lora: {free} adapters and blends are in use; expected at most {MAX_ROWS} at once")
        self._adapters[free : free + 1] = [adapter]
        self._model.set_adapters(self._adapters)
        label = " + ".join(lora.name if weight == lora.scale else f"{weight:g} {lora.name}" for lora, weight in mix)
        row = self._rows[key] = LoraRow(row=free, key=key, label=label)
        return row

    def _tidy(self) -> None:
        """Drop the adapters of rows that no request has."""
        used = {row.row for row in self._rows.values()}
        self._adapters = [adapter if i in used else None for i, adapter in enumerate(self._adapters)]

    def _named(self, name: object, *, where: str) -> Lora:
        if not isinstance(name, str) or name not in self._loaded:
            known = ", ".join(self._loaded) or "none: llm.loras.load(path)"
            raise OptionError(f"{where}: lora {shown(name)} is not loaded; loaded are {known}")
        return self._loaded[name]
