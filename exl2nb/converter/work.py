"""Where work in progress is filed: one file per layer and stage, written atomically, with a checksum, named after a hash of all its inputs.

A killed job therefore continues where it stopped, a job with other options never takes over what does not belong to it, and what a disk has
changed is made again.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from exl2nb.converter.measurement import Measured, Measurement, checksum, measurement_from_json, measurement_to_json, write_json
from exl2nb.converter.weights import DenseWeights
from exl2nb.core.errors import ConversionError, Exl2Error
from exl2nb.core.progress import Forecast, Meter, Sink
from exl2nb.io import safetensors
from exl2nb.io.atomic import make_directories
from exl2nb.io.hf_config import read_json
from exl2nb.model.layout import Linear
from exl2nb.quant.exl2 import Exl2Tensors

ALGORITHM_REVISION = 7  # of the algorithm: part of every hash, so that work of an older one is never taken over
HEAD_LAYER = -1  # layer index of the head
WORK_FILE_PATTERN = re.compile(
    r"\.?(measure|measurement|statistics|scales|trial|tune|written|layer)-[0-9a-f]{1,16}(-(head|\d{4,}))?\.(json|safetensors)(\..*\.tmp)?"
)
EXTRA_TENSOR_PREFIX = "more."  # before the names of a layer's further tensors
Packed = dict[str, tuple[Exl2Tensors, float]]  # module key -> tensors, loss


class Work:
    """The folder of one job, which has it alone until `close`.

    Raises:
        ConversionError: it cannot be made, or another job is at work in it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        make_directory(directory)
        self._lock = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)  # the system gives it back however the process ends
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise ConversionError(
                f"{directory}: another conversion is at work in it; wait for its end or cancel it, or give another dst or work_dir"
            ) from error
        except OSError:  # a file system without locks
            return

    def close(self) -> None:
        """Let other jobs have the folder."""
        os.close(self._lock)

    def load_measurement(self, key: str) -> Measurement | None:
        """A finished measurement under `key`; None where there is none or it is damaged."""
        try:
            found = Measurement.load(self._path("measurement", key))
        except (Exl2Error, OSError):
            return None
        return found if found.key == key else None

    def save_measurement(self, found: Measurement, layers: int) -> None:
        """Keep a finished measurement; the parts of its layers are no longer needed."""
        found.save(self._path("measurement", found.key))
        for layer in (HEAD_LAYER, *range(layers)):
            self._path("measure", found.key, layer).unlink(missing_ok=True)

    def save_part(self, key: str, layer: int, linears: Mapping[str, Measured]) -> None:
        """Keep the measured linears of one layer, or of the head."""
        table = measurement_to_json(linears)
        write_json(self._path("measure", key, layer), {"linears": table, CHECKSUM_KEY: checksum(table)})

    def load_part(self, key: str, layer: int) -> dict[str, Measured] | None:
        """Read what `save_part` wrote; None where it is missing or damaged, and must be measured again."""
        try:
            found = read_json(self._path("measure", key, layer), error=ConversionError)
            return measurement_from_json(found["linears"]) if found[CHECKSUM_KEY] == checksum(found["linears"]) else None
        except (Exl2Error, OSError, KeyError, TypeError, ValueError):
            return None

    def save_statistics(self, key: str, layer: int, tensors: Mapping[str, Tensor]) -> None:
        """Keep what quantising one layer needs of the sweep."""
        _write_tensors(self._path("statistics", key, layer), tensors)

    def load_statistics(self, key: str, layer: int) -> dict[str, Tensor] | None:
        """Read what `save_statistics` wrote; None where it is missing or damaged."""
        return _read_tensors(self._path("statistics", key, layer))

    def save_scales(self, key: str, factors: Mapping[str, Tensor]) -> None:
        """Keep the channel scales of the dense model's tensors (`equalization.equalize`)."""
        _write_tensors(self._path("scales", key), factors)

    def load_scales(self, key: str) -> dict[str, Tensor] | None:
        """Read what `save_scales` wrote; None where it is missing or damaged."""
        return _read_tensors(self._path("scales", key))

    def save_trial(self, key: str, kl: Tensor) -> None:
        """Keep the true KL of some allocations: f64 `(allocations, rows)`."""
        _write_tensors(self._path("trial", key), {"kl": kl})

    def load_trial(self, key: str, shape: tuple[int, int]) -> Tensor | None:
        """Read what `save_trial` wrote; None where it is missing, damaged or of another shape, and must be tried again."""
        found = (_read_tensors(self._path("trial", key)) or {}).get("kl")
        return found if found is not None and found.shape == shape and found.dtype == torch.float64 else None

    def save_tuning(self, key: str, state: Mapping[str, Tensor]) -> None:
        """Keep how far tuning came."""
        _write_tensors(self._path("tune", key), state)

    def load_tuning(self, key: str) -> dict[str, Tensor] | None:
        """Read what `save_tuning` wrote; None where it is missing or damaged, and tuning begins again."""
        return _read_tensors(self._path("tune", key))

    def save_written(self, key: str, rows: Tensor) -> None:
        """Keep rows int32 `(R, S)` that the dense model wrote."""
        _write_tensors(self._path("written", key), {"rows": rows})

    def load_written(self, key: str) -> Tensor | None:
        """Read what `save_written` wrote; None where it is missing or damaged, and must be written again."""
        return (_read_tensors(self._path("written", key)) or {}).get("rows")

    def has_statistics(self, key: str, layers: int) -> bool:
        """Whether those of every layer are there and whole; reads them."""
        return all(self.load_statistics(key, layer) is not None for layer in range(layers))

    def _path(self, kind: str, key: str, layer: int | None = None) -> Path:
        place = "" if layer is None else "-head" if layer == HEAD_LAYER else f"-{layer:04d}"
        return self.directory / f"{kind}-{key[:16]}{place}.{'json' if kind.startswith('measure') else 'safetensors'}"

    def quantized(self, key: str, layer: int) -> Path:
        """File of one quantised layer, or of the head."""
        return self._path("layer", key, layer)

    def save(self, key: str, layer: int, packed: Packed, more: Mapping[str, Tensor] | None = None) -> None:
        """Write one quantised layer. more: tensors by name, for `load_more`."""
        tensors: dict[str, Tensor] = {f"{EXTRA_TENSOR_PREFIX}{name}": tensor for name, tensor in (more or {}).items()}
        for name, (matrix, loss) in packed.items():
            tensors |= matrix.tensors(name) | {f"{name}.loss": torch.tensor([loss], dtype=torch.float64)}
        _write_tensors(self.quantized(key, layer), tensors)

    def load(self, key: str, layer: int, linears: Mapping[str, Linear]) -> Packed | None:
        """Read one quantised layer; None where it is missing or damaged, and must be made again."""
        path = self.quantized(key, layer)
        found = _read_tensors(path)
        try:
            return (
                None
                if found is None
                else {
                    linear.key: (
                        Exl2Tensors.of(found, linear.key).validate(
                            linear.key, file=path, in_features=linear.in_features, out_features=linear.out_features
                        ),
                        float(found[f"{linear.key}.loss"]),
                    )
                    for linear in linears.values()
                }
            )
        except (Exl2Error, KeyError):
            return None

    def load_more(self, key: str, layer: int) -> dict[str, Tensor]:
        """What `save` was given as `more`."""
        found = _read_tensors(self.quantized(key, layer)) or {}
        return {name.removeprefix(EXTRA_TENSOR_PREFIX): tensor for name, tensor in found.items() if name.startswith(EXTRA_TENSOR_PREFIX)}

    def forget(self, key: str, layers: int) -> None:
        """Remove the quantised layers and the head, and how far their tuning came."""
        self._path("tune", key).unlink(missing_ok=True)
        for layer in (*range(layers), HEAD_LAYER):
            self.quantized(key, layer).unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove what jobs have written here, and the folder if it is empty then."""
        with suppress(OSError):
            for path in list(self.directory.iterdir()):
                if WORK_FILE_PATTERN.fullmatch(path.name):
                    path.unlink(missing_ok=True)
        self.leave()

    def leave(self) -> None:
        """Remove the folder if it is empty."""
        with suppress(OSError):
            self.directory.rmdir()


CHECKSUM_KEY = "sha256"  # key in a JSON file, and in `__metadata__` of a safetensors file


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    safetensors.save(path, held, {CHECKSUM_KEY: _tensor_checksum(held)})


def _read_tensors(path: Path) -> dict[str, Tensor] | None:
    """What `_write_tensors` wrote; None where it is missing or a bit of it has changed."""
    try:
        with safetensors.SafetensorsFile(path) as file:
            found = {name: file.read(name) for name in file.names()}
            return found if file.metadata.get(CHECKSUM_KEY) == _tensor_checksum(found) else None
    except (Exl2Error, OSError):
        return None


def _tensor_checksum(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def make_directory(directory: Path) -> None:
    """Make a directory and those above it; a ConversionError names the one that cannot be made."""
    try:
        make_directories(directory.absolute())
    except OSError as error:
        raise ConversionError(f"{directory}: cannot be made ({error.strerror}); choose a directory you may write to") from error


def hash_of(*parts: object) -> str:
    """SHA-256 of bytes and of the `repr` of anything else."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else repr(part).encode())
        digest.update(b"\0")
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class JobContext:
    """work: where work in progress is filed. sink: takes the events. check: raises to stop. forecast: of all stages together."""

    work: Work
    sink: Sink | None
    check: Callable[[], None]
    forecast: Forecast | None = None

    def meter(self, stage: str, *, total: int, unit: str) -> Meter:
        """The progress of one stage."""
        return Meter(stage, total=total, unit=unit, sink=self.sink, forecast=self.forecast)

    @contextmanager
    def steps(self, stage: str, *, total: int, unit: str, phased: bool = False) -> Iterator[Callable[[str], None]]:
        """Yields a function to call with one line of text after every step; it stops a cancelled job.

        phased: the line begins with a phase of the forecast and a comma.
        """
        with self.meter(stage, total=total, unit=unit) as meter:

            def step(detail: str) -> None:
                self.check()
                meter.step(detail=detail, phase=detail.partition(",")[0] if phased else "")

            yield step


@dataclass(frozen=True, kw_only=True)
class Context(JobContext):
    """weights: the dense model's tensors, layer by layer."""

    weights: DenseWeights
