"""All tensors of a model directory by name, whatever files hold them. Knows nothing of their meaning."""

from __future__ import annotations

import os
from pathlib import Path

from torch import Tensor

from exl2nb.core.errors import FormatError, ModelNotFound
from exl2nb.io.hf_config import read_json
from exl2nb.io.safetensors import SafetensorsFile, TensorInfo

_OTHER_WEIGHTS = (".bin", ".gguf", ".pt", ".pth", ".ckpt", ".npz", ".h5", ".msgpack", ".onnx")


class TensorStore:
    """Name -> tensor over every `*.safetensors` of one directory (subfolders are not searched).

    An EXL2 model (some name ends in `.q_weight`) has no index: all files count, and an index left over from its source is ignored. Any
    other model with an index has exactly the files that the index names.

    Args:
        directory: the model directory.

    Raises:
        ModelNotFound: no such directory, or no .safetensors file in it.
        FormatError: a broken header, a name in two files, a shard or tensor that the index promises and that is missing.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        opened = [SafetensorsFile(path) for path in _find(self.directory)]
        self.is_exl2 = any(name.endswith(".q_weight") for file in opened for name in file.names())
        self._files = opened if self.is_exl2 else _indexed(self.directory, opened)
        for file in opened:
            if file not in self._files:
                file.close()
        self._home: dict[str, SafetensorsFile] = {}
        for file in self._files:
            for name in file.names():
                if name in self._home:
                    raise FormatError(
                        f"{file.path}: tensor {name!r}: found it in {self._home[name].path.name} too, expected it in one file; "
                        "remove the file that does not belong to the model"
                    )
                self._home[name] = file

    @property
    def files(self) -> list[Path]:
        """The files that count, sorted by name."""
        return [file.path for file in self._files]

    def names(self) -> list[str]:
        """All tensor names, file by file in the order of their data."""
        return list(self._home)

    def __contains__(self, name: object) -> bool:
        return name in self._home

    def __len__(self) -> int:
        return len(self._home)

    def info(self, name: str) -> TensorInfo:
        """Header entry of one tensor.

        Raises:
            FormatError: the model has no such tensor.
        """
        return self._file(name).info(name)

    def read(self, name: str, *, rows: tuple[int, int] | None = None, into: Tensor | None = None) -> Tensor:
        """Copy one tensor into memory (see SafetensorsFile.read).

        Raises:
            FormatError: the model has no such tensor, or its file was cut short.
        """
        return self._file(name).read(name, rows=rows, into=into)

    def close(self) -> None:
        """Close all files; reading afterwards is an error."""
        for file in self._files:
            file.close()

    def __enter__(self) -> TensorStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"TensorStore({str(self.directory)!r}, {len(self._files)} files, {len(self)} tensors)"

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._home:
            raise FormatError(f"{self.directory}: tensor {name!r}: found none of that name in {len(self._files)} files, expected one")
        return self._home[name]


def _find(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise ModelNotFound(f"{directory}: no such directory; give the folder that holds config.json and the .safetensors files")
    names = sorted(entry.name for entry in os.scandir(directory) if not entry.name.startswith("."))
    paths = [directory / name for name in names if name.endswith(".safetensors")]
    if not paths:
        others = [name for name in names if name.endswith(_OTHER_WEIGHTS)]
        hint = (
            f"found {others[0]}: only safetensors are read, take or make a safetensors version" if others else "is this a model directory?"
        )
        raise ModelNotFound(f"{directory}: no .safetensors file; {hint}")
    return paths


def _indexed(directory: Path, opened: list[SafetensorsFile]) -> list[SafetensorsFile]:
    """The files that the directory's index names, all of them where there is no index."""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return opened
    table = read_json(index, limit_bytes=100_000_000, error=FormatError).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(value, str) for value in table.values()):
        raise FormatError(f"{index}: weight_map: found {type(table).__name__}, expected an object from tensor name to file name")
    by_name = {file.path.name: file for file in opened}
    for tensor, name in table.items():
        if name not in by_name:
            raise FormatError(
                f"{index}: tensor {tensor!r}: found no file {name!r}, expected one: download it, or remove the index if it is stale"
            )
        if tensor not in by_name[name]:
            raise FormatError(f"{by_name[name].path}: tensor {tensor!r}: found none, expected it from {index.name}")
    return [file for file in opened if file.path.name in set(table.values())]
