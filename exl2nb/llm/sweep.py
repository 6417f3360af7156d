"""Many bitrates and caches of one model: converted, measured, and put side by side. In this process, in several, or on a Ray cluster.

A task is one bitrate: it converts the model, unless that is done, and measures the result with every cache mode. Tasks know each other only
by the folder that they share, and each leaves its numbers there: a worker that is lost has its task done again by another, from where the
conversion was, and a sweep that is called again continues.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from exl2nb.cache.spec import parse_mode
from exl2nb.converter.convert_keywords import CONVERT_DEFAULTS, ConvertOptions
from exl2nb.core.errors import ConversionError, Exl2Error, OptionError
from exl2nb.core.options import check_range, shown, spelled_out
from exl2nb.core.progress import Meter, Sink, showing
from exl2nb.core.show import size_text
from exl2nb.io.atomic import atomic_write

if TYPE_CHECKING:
    import pandas as pd
    from typing_extensions import Unpack

SWEEP_PLACES = ("local", "ray")
MAX_TASK_TRIES = 3  # of a task whose worker is lost
RESULT_COLUMNS = ("bpw", "cache", "bytes", "kl_mean", "kl_p99", "ppl", "reference_ppl", "top1", "directory")
Task = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What every bitrate and cache mode of a model costs.

    model: its name. rows: a dict for each pair, with the keys `RESULT_COLUMNS`: bits per weight, cache mode, bytes of the files, mean and
    99th percentile of KL to the model in nats, perplexity of both, share of positions with the same most likely token, and where the files
    are.
    """

    model: str
    rows: tuple[dict[str, Any], ...]

    def to_frame(self) -> pd.DataFrame:
        """One line for each pair."""
        import pandas as pd

        return pd.DataFrame(list(self.rows), columns=list(RESULT_COLUMNS))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"model": self.model, "rows": [*self.rows]}

    def __str__(self) -> str:
        lines = [
            f"{self.model}: {len(self.rows)} combinations",
            " bpw  cache        size    KL mean     KL 99 %  perplexity  same top token",
        ]
        lines += [
            f"{row['bpw']:4g}  {row['cache']:<6} {size_text(row['bytes']):>10}  {row['kl_mean']:9.5f}  {row['kl_p99']:10.5f}"
            f"  {row['ppl']:10.3f}  {row['top1']:14.2%}"
            for row in self.rows
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return self.to_frame().drop(columns="directory").to_html(index=False, float_format=lambda value: f"{value:.5g}")


@spelled_out(ConvertOptions, CONVERT_DEFAULTS)
def sweep(
    model: str | os.PathLike[str],
    bpw: Sequence[float],
    out: str | os.PathLike[str],
    *,
    cache: Sequence[str] = ("fp16",),
    text: str | os.PathLike[str] | None = None,
    text_rows: int = 16,
    text_length: int = 512,
    on: str = "local",
    workers: int = 1,
    progress: Sink | Literal["auto"] | None = "auto",
    **options: Unpack[ConvertOptions],
) -> Sweep:
    """Convert a model to several bitrates, and measure each of them with several cache modes.

    Args:
        model: directory or hub id of an fp16, bf16 or fp32 model.
        bpw: bits per weight, each at least 2 and at most 8.
        out: folder for the converted models (`4bpw`, ...) and their numbers. A sweep that was interrupted continues there.
        cache: modes of the KV cache, as in `load`.
        text, text_rows, text_length: what is measured on, as text, rows and length in `compare`.
        on: "local": on this machine. "ray": on the Ray cluster that is running, or one started here; every node needs `model` and `out`
            under the same path. Needs the extra `ray`.
        workers: with "local", processes at a time; 1 = this one. With "ray" the cluster decides.
        progress: takes the events of stage "sweep", counted in bitrates; "auto" and None as in `load`.
        options: of `convert`, the same for all: calibration, effort, head_bits, seed, device, ...

    Raises:
        OptionError: a value out of range, or an option that `convert` does not have. ConversionError: the folder holds other files of the
        same name, a task failed, or its worker was lost three times. Otherwise as `convert` and `compare`.

    Example:
        >>> import exl2nb as ex
        >>> ex.sweep("model", [2.5, 4.0], "swept", cache=["fp16", "q4"]).to_frame()  # doctest: +SKIP
    """
    from exl2nb.converter.conversion_job import ConversionJob
    from exl2nb.io.hub import label, resolve

    if on not in SWEEP_PLACES:
        raise OptionError(f"sweep: on is {shown(on)}; expected one of {', '.join(SWEEP_PLACES)}")
    if not isinstance(bpw, Sequence) or isinstance(bpw, str) or not bpw or not cache or isinstance(cache, str):
        raise OptionError(f"sweep: bpw is {shown(bpw)} and cache {shown(cache)}; expected a list of each, with one entry at least")
    if isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers <= 1024:
        raise OptionError(f"sweep: workers is {shown(workers)}; expected a whole number from 1 to 1024")
    for rate in bpw:
        check_range("bpw", rate, 2, 8, where="sweep")
    rates = sorted({float(rate) for rate in bpw})
    modes = [*dict.fromkeys(parse_mode(mode, where="sweep") for mode in cache)]
    folder = Path(out).absolute()
    with showing(progress, "sweep") as sink:
        source = resolve(model, progress=sink).absolute()
        ConversionJob(source, folder / f"{rates[0]:g}bpw.none", bpw=rates[0], **options)  # its own checks of the options
        folder.mkdir(parents=True, exist_ok=True)
        common = {"model": str(source), "cache": modes, "text": text and str(text), "is_file": isinstance(text, os.PathLike),
                  "rows": text_rows, "length": text_length, "options": options}  # fmt: skip
        tasks = {rate: {**common, "bpw": rate, "directory": str(folder / f"{rate:g}bpw")} for rate in rates}
        found: dict[float, list[dict[str, Any]]] = {}
        with Meter("sweep", total=len(tasks), unit="bitrates", sink=sink) as meter:
            for rate, result in _run(tasks, on=on, workers=workers):
                found[rate] = result
                meter.step(detail=f"{rate:g} bits per weight")
    return Sweep(model=label(source), rows=tuple(row for rate in rates for row in found[rate]))


def _run(tasks: Mapping[float, Task], *, on: str, workers: int) -> Iterator[tuple[float, list[dict[str, Any]]]]:
    if on == "ray":
        return _on_ray(tasks)
    return _in_processes(tasks, workers) if workers > 1 else ((rate, run_task(task)) for rate, task in tasks.items())


# ---- one task


def run_task(task: Task) -> list[dict[str, Any]]:
    """Convert to one bitrate, unless that is done, and measure it with every cache mode.

    Args:
        task: plain JSON values, as `sweep` makes them.

    Returns:
        A dict with the keys `RESULT_COLUMNS` for each cache mode.
    """
    from exl2nb.llm.functions import compare, convert
    from exl2nb.llm.load import load

    directory, record = Path(task["directory"]), Path(f"{task['directory']}.sweep.json")
    known = _read(record)
    made = {"model": task["model"], "bpw": task["bpw"], "options": task["options"]}
    if known.get("made") != made:
        if directory.exists():
            raise ConversionError(f"{directory}: exists, and was not made by this sweep; remove it, or choose another folder for out=")
        known = {"made": made, "measured": {}}
        _write(record, known)
    if not directory.exists():
        convert(task["model"], directory, bpw=task["bpw"], progress=None, **task["options"])
    text = Path(task["text"]) if task["is_file"] else task["text"]
    results = []
    for mode in task["cache"]:
        key = json.dumps([mode, task["text"], task["is_file"], task["rows"], task["length"]])
        if key not in known["measured"]:
            with load(task["model"], progress=None) as reference, load(directory, progress=None) as other:
                comparison = compare(reference, other, text, rows=task["rows"], length=task["length"], cache=mode, progress=None)
            summary = comparison.summary()
            known["measured"][key] = {name: summary[name] for name in RESULT_COLUMNS if name in summary}
            _write(record, known)
        size = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
        results.append({"bpw": task["bpw"], "cache": mode, "bytes": size, "directory": str(directory), **known["measured"][key]})
    return results


def _read(record: Path) -> dict[str, Any]:
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("measured"), dict) else {}


def _write(record: Path, values: Mapping[str, Any]) -> None:
    with atomic_write(record) as file:
        file.write(json.dumps(values).encode())


# ---- workers


def _in_processes(tasks: Mapping[float, Task], workers: int) -> Iterator[tuple[float, list[dict[str, Any]]]]:
    """So many processes at a time, each with one task; one that dies has its task done again."""
    waiting, running, tries = [*tasks], dict[float, SweepProcess](), dict.fromkeys(tasks, 0)
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                rate = waiting.pop(0)
                tries[rate] += 1
                running[rate] = SweepProcess(tasks[rate])
            for rate, process in [*running.items()]:
                if (code := process.popen.poll()) is None:
                    continue
                del running[rate]
                result = process.result()
                if result is not None:
                    yield rate, result
                elif tries[rate] < MAX_TASK_TRIES:
                    waiting.append(rate)
                else:
                    raise ConversionError(
                        f"sweep: the worker of {rate:g} bits per weight was lost {MAX_TASK_TRIES} times (exit code {code})"
                    )
            time.sleep(0.05)
    finally:
        for process in running.values():
            process.popen.kill()
            process.result()


class SweepProcess:
    """A Python process with one task; its answer comes through a file."""

    def __init__(self, task: Task) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="exl2nb-sweep-")
        self._answer = Path(self._folder.name) / "answer.json"
        code = "import sys; from exl2nb.llm.sweep import answer; answer(*sys.argv[1:])"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", code, json.dumps(task), str(self._answer)]
        self.popen = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def result(self) -> list[dict[str, Any]] | None:
        """The task's result, or None where the process ended without one.

        Raises:
            ConversionError: the task failed; in its own words.
        """
        self.popen.wait()
        found = json.loads(self._answer.read_text(encoding="utf-8")) if self._answer.exists() else {}
        self._folder.cleanup()
        if "error" in found:
            raise ConversionError(f"sweep: {found['error']}")
        return found.get("result")


def answer(task: str, path: str) -> None:
    """In a worker: run a task, and write its result, or what went wrong, to a file."""
    try:
        found = {"result": run_task(json.loads(task))}
    except Exl2Error as error:
        found = {"error": str(error)}
    _write(Path(path), found)


def _on_ray(tasks: Mapping[float, Task]) -> Iterator[tuple[float, list[dict[str, Any]]]]:
    """Ray places the tasks, and places one again whose worker or node is lost."""
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise OptionError("sweep: on='ray' needs Ray: pip install 'exl2nb[ray]', or take on='local'") from None
    ours = not ray.is_initialized()
    if ours:
        ray.init(
            include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}}
        )
    try:
        remote: Callable[..., Any] = ray.remote(max_retries=MAX_TASK_TRIES)(_ray_task).remote
        waiting = {remote(task): rate for rate, task in tasks.items()}
        try:
            while waiting:
                for done in ray.wait([*waiting], num_returns=1)[0]:
                    found = ray.get(done)
                    rate = waiting.pop(done)
                    if "error" in found:
                        raise ConversionError(f"sweep: {found['error']}")
                    yield rate, found["result"]
        except ray.exceptions.RayError as error:
            raise ConversionError(f"sweep: Ray could not finish a task: {str(error).splitlines()[0][:300]}") from error
        finally:
            for task in waiting:
                ray.cancel(task, force=True)
    finally:
        if ours:
            ray.shutdown()


def _ray_task(task: Task) -> dict[str, Any]:
    try:
        return {"result": run_task(task)}
    except Exl2Error as error:
        return {"error": str(error)}
