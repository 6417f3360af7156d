"""Measurement files of exllamav2 itself: written so that it reads ours, read so that its own can be solved exactly or compared.

Such a file lists, for the attention and the MLP of every layer, options with `accuracy` (1 - relative error of the module's output) and
`total_bits`, each with a recipe per projection. It knows nothing of the head.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from exl2nb.converter.allocation import allocate_bits
from exl2nb.core.errors import ConversionError, OptionError
from exl2nb.core.options import check_range
from exl2nb.io.hf_config import read_json
from exl2nb.model.config import ModelConfig
from exl2nb.model.layout import model_linears as linears_of
from exl2nb.quant.bits import group_layout, padded, stored_bits

if TYPE_CHECKING:
    from exl2nb.converter.measurement import Measured

Groups = tuple[tuple[int, int], ...]
# (widths, shares, group size): our table for its optimiser, smallest first
EXLLAMAV2_RECIPES: tuple[tuple[tuple[int, ...], tuple[float, ...], int], ...] = (
    ((2,), (1,), 64),
    *(((b + 1, b), (share, 1 - share), size) for b in (2, 3) for share, size in ((0.125, 64), (0.25, 64), (0.5, 32))),
    ((3,), (1,), 32),
    ((4,), (1,), 128),
    ((4,), (1,), 32),
    *(((b + 1, b), (share, 1 - share), size) for b in (4, 5) for share, size in ((0.125, 128), (0.25, 32), (0.5, 32))),
    ((5,), (1,), 32),
    ((6,), (1,), 128),
    ((6,), (1,), 32),
    *(((8, 6), (share, 1 - share), size) for share, size in ((0.125, 128), (0.25, 32), (0.5, 128))),
    ((8,), (1,), 128),
    ((8,), (1,), 32),
)

EXPERT_NAMES = {"gate": "w1", "up": "w3", "down": "w2"}


def measurement_table(linears: Mapping[str, Measured]) -> dict[str, Any]:
    """The two keys that exllamav2 reads: per module, EXLLAMAV2_RECIPES with what the anchors predict."""
    modules: dict[str, dict[str, list[Measured]]] = {}
    heads = []
    for key, measured in linears.items():
        module, name = peer_owner(key, measured.role)
        if measured.role == "head":
            heads.append(key)
        else:
            modules.setdefault(module, {}).setdefault(name, []).append(measured)
    options = {module: [_peer_option(recipe, parts) for recipe in EXLLAMAV2_RECIPES] for module, parts in modules.items()}
    ends = {"model.norm.norm": None, **{f"{key}.linear": None for key in heads or ["lm_head"]}}
    return {"measurement": {**options, **ends}, "last_module_idx": len(modules) + 2}


def peer_owner(key: str, role: str) -> tuple[str, str]:
    """Module and projection under which exllamav2 files a matrix; all experts of a layer share their options, as w1, w3 and w2."""
    module, _, name = key.rpartition(".")
    stem, dot, _ = role.partition(".")
    return (key.partition(".experts.")[0], EXPERT_NAMES[stem]) if dot else (module, name)


def _peer_option(recipe: tuple[tuple[int, ...], tuple[float, ...], int], parts: Mapping[str, Sequence[Measured]]) -> dict[str, Any]:
    widths, shares, size = recipe
    error = power = cost = 0.0
    for m in itertools.chain.from_iterable(parts.values()):
        groups = group_layout(m.in_features, widths, shares, size)
        error += _predicted_error(m, groups, size)
        power += m.power
        cost += stored_bits(groups, padded(m.out_features), bias=m.bias)
    written = {"group_size": {str(b): size for b in widths}, "bits": list(widths), "bits_prop": list(shares), "scale_bits": 4}
    accuracy = 1 - math.sqrt(max(error, 0.0) / max(power, 1e-300))
    return {"accuracy": min(max(1e-6, accuracy), 1 - 1e-9), "total_bits": int(cost), **dict.fromkeys(parts, written)}


def _predicted_error(measured: Measured, groups: Iterable[tuple[int, int]], size: int) -> float:
    from exl2nb.converter.allocation import group_errors

    groups = list(groups)
    return sum(float(group_errors(measured.anchors, bits, size, len(groups))[g]) for g, (bits, _) in enumerate(groups))


@dataclass(frozen=True)
class PeerOption:
    """One option of one module: relative error of its output, bits of its matrices, recipe per projection."""

    error: float
    bits: int
    recipes: dict[str, dict[str, Any]] = field(repr=False)


@dataclass(frozen=True)
class PeerMeasurement:
    """What exllamav2 measured: module key ("model.layers.3.mlp") -> options."""

    path: Path
    modules: dict[str, tuple[PeerOption, ...]]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PeerMeasurement:
        """Read a `measurement.json` of exllamav2 (ours are read too: their own part is ignored).

        Raises:
            ConversionError: not such a file, or damaged; names module and option.
        """
        path = Path(path)
        found = read_json(path, error=ConversionError).get("measurement")
        if not isinstance(found, dict) or not found:
            raise ConversionError(f"{path}: found no `measurement` object, expected a measurement file; measure again")
        modules = {}
        for key, value in found.items():
            split = isinstance(value, dict)
            named = {f"{key.removesuffix('.parallel_decoder')}.{part}": v for part, v in value.items()} if split else {key: value}
            for module, options in named.items():
                if options is not None:
                    modules[_module_name(module)] = _module_options(path, module, options)
        return cls(path, modules)

    def solve(self, config: ModelConfig, bpw: float) -> dict[str, Groups]:
        """The exact optimum of its own measure (sum of squared relative errors) at `bpw` bits per weight of the layers' matrices.

        Returns:
            Module key -> groups, for `frozen=` of `Measurement.solve` and of a conversion.

        Raises:
            OptionError, ConversionError: the target cannot be reached, or the file belongs to another architecture.
        """
        check_range("bpw", bpw, 2, 8, where="solve")
        stack = [linear for linear in linears_of(config) if linear.role != "head"]
        owners, names_of = ({linear.key: peer_owner(linear.key, linear.role)[i] for linear in stack} for i in (0, 1))
        missing = sorted(set(owners.values()) - set(self.modules))
        if missing:
            raise ConversionError(f"{self.path}: found no options for {missing[0]}; expected a measurement of this model")
        names = [name for name in self.modules if name in set(owners.values())]
        budget = int(bpw * sum(linear.in_features * linear.out_features for linear in stack))
        picks = allocate_bits([[(o.bits, o.error**2) for o in self.modules[name]] for name in names], budget)
        chosen = {name: self.modules[name][pick] for name, pick in zip(names, picks)}
        groups: dict[str, Groups] = {}
        for linear in stack:
            recipe = chosen[owners[linear.key]].recipes.get(names_of[linear.key])
            if recipe is None:
                raise ConversionError(
                    f"{self.path}: {owners[linear.key]} has no recipe for {linear.key}; expected a measurement of this model"
                )
            groups[linear.key] = tuple(group_layout(linear.in_features, recipe["bits"], recipe["bits_prop"], recipe["group_size"]))
        return groups

    def to_frame(self) -> Any:
        """One line per module and option: module, option, bits, error."""
        import pandas as pd

        return pd.DataFrame(
            [
                {"module": module, "option": i, "bits": option.bits, "error": option.error}
                for module, options in self.modules.items()
                for i, option in enumerate(options)
            ]
        )


def _module_name(key: str) -> str:
    """Its mixture modules are called `block_sparse_moe` or `mlp`, `parallel_decoder` parts `attn` and `mlp`."""
    return f"{key.removesuffix('.attn')}.self_attn" if key.endswith(".attn") else key


def _module_options(path: Path, module: str, options: Any) -> tuple[PeerOption, ...]:
    made: list[PeerOption] = []
    listed: list[Any] = options if isinstance(options, list) and options else [{}]
    for i, option in enumerate(listed):
        try:
            error, bits = 1 - float(option["accuracy"]), int(option["total_bits"])
            recipes = {name: value for name, value in option.items() if isinstance(value, dict) and "bits" in value}
            if not (np.isfinite(error) and 0 < error <= 2 and bits > 0 and recipes):
                raise ValueError("out of range")
            for value in recipes.values():
                group_layout(1024, value["bits"], value["bits_prop"], value["group_size"])
        except (KeyError, TypeError, ValueError, OptionError) as error_:
            raise ConversionError(
                f"{path}: option {i} of {module} is not one ({error_}); expected accuracy, total_bits and recipes"
            ) from error_
        made.append(PeerOption(error, bits, recipes))
    return tuple(made)
