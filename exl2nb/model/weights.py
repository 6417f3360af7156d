"""The weights of an EXL2 directory, read slice by slice, with those of its original. Loads no model and needs no compiled library."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from exl2nb.core.errors import FormatError, OptionError
from exl2nb.io.hf_config import read_config, with_quantization
from exl2nb.io.hub import label
from exl2nb.model.archs import parse_config
from exl2nb.model.inspect import Inspection, Matrix, inspect
from exl2nb.model.store import ModelStore, open_store
from exl2nb.quant.exl2_slice import Exl2Slices


class Weights:
    """The weights of an EXL2 model, read from its files.

    Args:
        directory: of the model.
        original: directory of the fp16, bf16 or fp32 model it was made of, or None.

    Raises:
        ModelNotFound, ConfigError, FormatError: a directory cannot be read. UnknownArchitecture: config.json names one that is not known.
        OptionError: the first has no EXL2 matrix, or the second has quantised ones.
    """

    def __init__(self, directory: str | os.PathLike[str], original: str | os.PathLike[str] | None = None) -> None:
        self.inspection: Inspection = inspect(directory)
        self.matrices: dict[str, Matrix] = {m.key: m for m in self.inspection.matrices if m.format == "exl2"}
        if not self.matrices:
            formats = ", ".join(sorted({m.format for m in self.inspection.matrices}))
            raise OptionError(f"{directory}: found matrices in {formats}, expected EXL2 ones: convert it first (exl2nb.convert)")
        self._store, _ = _open(Path(directory))
        self._slices: dict[str, Exl2Slices] = {}
        try:
            self._original, self._tied = (None, {}) if original is None else _open(Path(original))
            if self._original is not None and self._original.is_exl2:
                raise OptionError(f"{original}: is an EXL2 model too; expected the fp16, bf16 or fp32 one that {directory} was made of")
        except BaseException:
            self._store.close()
            raise

    def slices(self, key: str) -> Exl2Slices:
        """The matrix under a module key.

        Raises:
            OptionError: there is none. FormatError: it breaks a rule of the format.
        """
        if key not in self.matrices:
            some = ", ".join(list(self.matrices)[:3])
            raise OptionError(f"{label(self.inspection.path)}: no EXL2 matrix {key!r}; there are {len(self.matrices)}, such as {some}")
        if key not in self._slices:
            self._slices = {key: Exl2Slices(self._store, key)}  # the last one is enough
        return self._slices[key]

    @property
    def has_original(self) -> bool:
        """Whether there is an original to compare with."""
        return self._original is not None

    def original(self, key: str, column: int) -> torch.Tensor | None:
        """One column of the original matrix: float32 `(K,)`, rows in their own order; None where it is not known, or is padding.

        Raises:
            FormatError: the original's matrix has another number of rows.
        """
        name = f"{self._tied.get(key, key)}.weight"
        if self._original is None or name not in self._original:
            return None
        info = self._original.info(name)
        if column >= info.shape[0]:
            return None
        if len(info.shape) != 2 or info.shape[1] != self.slices(key).in_features:
            raise FormatError(
                f"{info.path}: tensor {name!r}: found shape {info.shape}, expected {self.slices(key).in_features} columns: "
                "is it the original of this model?"
            )
        return self._original.read(name, rows=(column, column + 1))[0].float()

    def original_rows(self, key: str, rows: torch.Tensor) -> torch.Tensor | None:
        """Some rows (input channels) of the original matrix: float32 `(L, N)`; None where it is not known. Reads the whole matrix.

        Raises:
            FormatError: the original's matrix has another number of rows.
        """
        if self.original(key, 0) is None or self._original is None:
            return None
        return self._original.read(f"{self._tied.get(key, key)}.weight")[:, rows].T.float()

    def close(self) -> None:
        """Close all files."""
        self._store.close()
        if self._original is not None:
            self._original.close()

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open(directory: Path) -> tuple[ModelStore, dict[str, str]]:
    """Files of a model, and its head's name -> the embedding's where one table serves as both."""
    config = parse_config(with_quantization(directory, read_config(directory)), where=str(directory / "config.json"))
    store, names = open_store(config, directory), config.names
    return store, {} if f"{names.head}.weight" in store else {names.head: names.embed}
