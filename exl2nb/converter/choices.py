"""Choices that a conversion is to keep: of a plan, of a plan's JSON, or of an EXL2 model made earlier, by whomever."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exl2nb.converter.options import Groups
from exl2nb.converter.plan import Plan
from exl2nb.core.errors import OptionError
from exl2nb.io.hf_config import read_json
from exl2nb.io.shards import TensorStore
from exl2nb.quant.exl2_check import parse_groups

Frozen = Mapping[str, Any] | Plan | str | os.PathLike[str]
_SUFFIX = ".q_groups"


def read_choices(source: Frozen) -> dict[str, Groups]:
    """Module key -> (bits, rows) from top to bottom.

    Args:
        source: such a mapping; a plan; a JSON file of `Plan.to_dict()` or of such a mapping; the directory of an EXL2 model.

    Raises:
        OptionError: none of these. FormatError: the model's files are damaged.
    """
    if isinstance(source, Plan):
        return source.groups()
    if isinstance(source, Mapping):
        return dict(source)
    path = Path(source)
    if path.is_dir():
        return _of_model(path)
    table = read_json(path, error=OptionError)
    found = {c["key"]: c["groups"] for c in table["choices"]} if isinstance(table.get("choices"), list) else table
    try:
        return {str(key): tuple((int(bits), int(rows)) for bits, rows in groups) for key, groups in found.items()}
    except (TypeError, ValueError) as error:
        raise OptionError(f"{path}: found no choices; expected module key -> [[bits, rows], ...], or a plan's `to_dict()`") from error


def _of_model(path: Path) -> dict[str, Groups]:
    with TensorStore(path) as store:
        keys = [name.removesuffix(_SUFFIX) for name in store.names() if name.endswith(_SUFFIX)]
        if not keys:
            raise OptionError(f"{path}: found no EXL2 matrix; expected an EXL2 model whose choices are to be kept")
        return {
            key: tuple(parse_groups(store.read(key + _SUFFIX).tolist(), store.info(f"{key}.q_weight").shape[0], key, file=path))
            for key in keys
        }
