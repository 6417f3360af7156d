"""`exl2nb demo`: the packaged model quantised at several bitrates, streamed from, measured, and written up. The main job."""

from __future__ import annotations

import argparse
import platform
import shutil
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import exl2nb
from exl2nb.cli import report
from exl2nb.cli.console import BitTable, Console, render_text
from exl2nb.cli.models import demo_directory, file_bytes, loaded
from exl2nb.cli.report import DemoResult, ReportEntry
from exl2nb.core.errors import OptionError
from exl2nb.core.options import check_range
from exl2nb.core.show import size_text

if TYPE_CHECKING:
    from exl2nb.eval.comparison import Comparison
    from exl2nb.tokenizer.tokenizer import Tokenizer

DEMO_MARK_FILE = ".exl2nb-demo"  # in a directory that the demo made, and may therefore make again
REPORT_FILE = "report.html"
DEMO_PROMPT = "The old house stood at the end of the lane, and"
DEMO_SAMPLING = {"temperature": 0.8, "top_p": 0.95, "seed": 1}


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What the demo does.

    bpw: bitrates. out: directory for models and report. rows, length: of evaluation. tokens: of each sample. timed_tokens: of the speed
    run. passage: tokens of the evaluation text shown in the report. calibration_rows, calibration_length: of the conversion; None = the
    converter's own.
    """

    bpw: tuple[float, ...] = (3.0, 4.0, 6.0)
    out: Path = Path("exl2nb-demo")
    rows: int = 32
    length: int = 512
    tokens: int = 72
    timed_tokens: int = 256
    passage: int = 160
    calibration_rows: int | None = None
    calibration_length: int | None = None

    def __post_init__(self) -> None:
        if not self.bpw:
            raise OptionError("demo: no bitrate given; expected at least one, such as 4.0")
        for value in self.bpw:
            check_range("bpw", value, 2, 8, where="demo")
        if len(set(self.bpw)) != len(self.bpw):
            raise OptionError(f"demo: bpw {' '.join(f'{b:g}' for b in self.bpw)} names a bitrate twice; expected different ones")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--bpw", type=float, nargs="+", default=[3.0, 4.0, 6.0], help="bitrates (default 3.0 4.0 6.0)")
    parser.add_argument("--out", type=Path, default=DemoOptions.out, help="directory for models and report (default ./exl2nb-demo)")
    parser.add_argument("--rows", type=int, default=DemoOptions.rows, help="rows of 512 tokens to measure on, at most 60 (default 32)")


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the demo and print its result."""
    result = run_demo(DemoOptions(bpw=tuple(args.bpw), out=args.out, rows=args.rows), console)
    if console.json_mode:
        console.result(result.to_dict(), "")
        return 0
    console.say("\n" + console.bold("What it costs") + f"  ({result.rows * result.length:,} tokens of the packaged evaluation text)\n")
    console.say(result.table())
    for entry in result.quantised:
        console.say("\n" + console.bold(f"Where the bits went at {entry.name}") + "  (bits per weight, layers across)\n")
        columns = shutil.get_terminal_size().columns
        console.say(render_text(BitTable.of(entry.bits), colours=console.colour, columns=columns))
    console.say(f"\nReport: {Path(result.report).resolve()}\nModels: {', '.join(entry.path for entry in result.quantised)}")
    console.say(f"{result.total_s:.0f} s in all. Next: exl2nb generate {result.quantised[0].path} --prompt 'It was'")
    return 0


def run_demo(options: DemoOptions, console: Console) -> DemoResult:
    """Convert, stream, measure, report.

    Raises:
        OptionError: options out of range, or `out` is a directory with something else in it.
        ConversionError: see `converter.conversion_job`.
    """
    begin = time.monotonic()
    prepare(options.out)
    console.say(f"exl2nb {exl2nb.__version__}: {_engine_line()}")
    models = [("FP16", demo_directory(), None, None), *convert_all(options, console)]
    samples = {name: stream_from(name, path, options, console) for name, path, _, _ in models}
    measured, passage = measure(options, {name: path for name, path, _, _ in models}, console)
    entries = [_entry(model, samples[model[0]], measured.get(model[0]), measured, options) for model in models]
    entries[1:] = sorted(entries[1:], key=lambda entry: -(entry.target_bpw or 0))
    result = DemoResult(
        entries=tuple(entries),
        prompt=DEMO_PROMPT,
        rows=options.rows,
        length=options.length,
        passage=passage,
        machine=machine(),
        total_s=time.monotonic() - begin,
        created=time.strftime("%Y-%m-%d %H:%M"),
        version=exl2nb.__version__,
        report=str(options.out / REPORT_FILE),
    )
    from exl2nb.io.atomic import atomic_write

    with atomic_write(options.out / REPORT_FILE) as file:
        file.write(report.render(result).encode())
    return result


def prepare(out: Path) -> None:
    """Make the output directory, or clear one that an earlier demo made; anything else in it is left alone and refused."""
    if out.exists() and not out.is_dir():
        raise OptionError(f"demo: {out} is a file; expected a directory for the models and the report; give another --out")
    if out.is_dir() and any(out.iterdir()):
        if not (out / DEMO_MARK_FILE).is_file():
            raise OptionError(
                f"demo: {out} holds other files; expected a new or empty directory, or one of an earlier demo; give another --out"
            )
        for path in out.glob("*bpw"):
            shutil.rmtree(path)
    out.mkdir(parents=True, exist_ok=True)
    (out / DEMO_MARK_FILE).write_text("Made by `exl2nb demo`, which may replace what is in this directory.\n", encoding="utf-8")


Made = tuple[str, Path, "float | None", "float | None"]  # name, directory, requested bpw, seconds of conversion


def convert_all(options: DemoOptions, console: Console) -> list[Made]:
    """Convert the demo model to every bitrate; the first run's measurement serves the others."""
    from exl2nb.converter.conversion_job import ConversionJob

    made: list[Made] = []
    with tempfile.TemporaryDirectory(prefix=".work-", dir=options.out) as work:
        for bpw in options.bpw:
            name, start = f"{bpw:g} bpw", time.monotonic()
            console.say(console.bold(f"\nConverting the demo model to {name}"))
            job = ConversionJob(
                demo_directory(),
                options.out / f"{bpw:g}bpw",
                bpw=bpw,
                rows=options.calibration_rows,
                length=options.calibration_length,
                work_dir=work,
            )
            done = job.run(console.sink)
            seconds = time.monotonic() - start
            console.say(f"{size_text(done.nbytes)} in {seconds:.1f} s")
            made.append((name, options.out / f"{bpw:g}bpw", bpw, seconds))
    return made


def stream_from(name: str, path: Path, options: DemoOptions, console: Console) -> tuple[str, float]:
    """Stream a sample to the terminal, then time a longer run. Returns the text and decode tok/s."""
    from exl2nb.cli.generate import stream_text
    from exl2nb.llm.load import load

    with load(path, progress=None) as llm:
        console.say(console.bold(f"\n{name} writes:"))
        if not console.json_mode:
            console.write(DEMO_PROMPT)
        text = stream_text(llm.stream(DEMO_PROMPT, max_tokens=options.tokens, ignore_eos=True, **DEMO_SAMPLING), console).text
        timed = llm.generate(DEMO_PROMPT, max_tokens=options.timed_tokens, temperature=0, ignore_eos=True)
        console.say(f"\n[{timed.timings.decode_tok_s:.0f} tok/s]")
    return text, timed.timings.decode_tok_s


def measure(options: DemoOptions, paths: dict[str, Path], console: Console) -> tuple[dict[str, Comparison], tuple[str, ...]]:
    """Compare every model with the first on the packaged evaluation text. Returns results by name, and the passage's token texts."""
    from exl2nb.eval.comparison import compare_many
    from exl2nb.eval.rows import read_text, token_rows
    from exl2nb.tokenizer.tokenizer import Tokenizer

    console.say(console.bold("\nMeasuring all of them on the same text"))
    reference, *others = paths
    tokenizer = Tokenizer.load(paths[reference])
    text = read_text(demo_directory() / "evaluation.txt")
    ids = token_rows(tokenizer, text, rows=options.rows, length=options.length, where="evaluation text")
    with ExitStack() as stack:
        models = {name: stack.enter_context(loaded(path)) for name, path in paths.items()}
        base = models.pop(reference)
        results = compare_many(base, {name: models[name] for name in others}, ids, console.sink, reference_name=reference)
    return results, passage_texts(tokenizer, ids[0, : options.passage].tolist())


def passage_texts(tokenizer: Tokenizer, ids: list[int]) -> tuple[str, ...]:
    """What each token adds to the text; side by side they are the passage. BOS adds nothing."""
    texts, before = [], ""
    for end in range(1, len(ids) + 1):
        now = tokenizer.decode(ids[:end]).rstrip("\ufffd")
        texts.append(now[len(before) :])
        before = now
    return tuple(texts)


def _entry(
    model: Made, sample: tuple[str, float], result: Comparison | None, measured: dict[str, Comparison], options: DemoOptions
) -> ReportEntry:
    from exl2nb.model.inspection import inspect

    name, path, target, seconds = model
    found = inspect(path)
    some = next(iter(measured.values()))
    head = found.head
    return ReportEntry(
        name=name,
        path=str(path),
        target_bpw=target,
        bpw=found.decoder_bpw,
        head_bits=head.bpw if head else 0.0,
        bytes=file_bytes(path),
        ppl=result.ppl if result else some.reference_ppl,
        kl_mean=result.kl_mean if result else 0.0,
        kl_p99=result.kl_p99 if result else 0.0,
        top1=result.top1 if result else 1.0,
        decode_tok_s=sample[1],
        convert_s=seconds,
        sample=sample[0],
        bits={matrix.key: matrix.bpw for matrix in found.decoder},
        histogram=result.histogram() if result else [],
        passage_kl=result.kl[0, : options.passage].tolist() if result else [],
    )


def machine() -> dict[str, str]:
    """What ran it, for the report."""
    import torch

    from exl2nb.cli.doctor import cpu_name
    from exl2nb.ops import _load

    found = _load.load_libraries()
    engine = f"compiled, {found.isa}" if "cpu" in found.loaded else f"torch reference ops ({found.note})"
    return {
        "Engine": engine,
        "Processor": f"{cpu_name()}, {torch.get_num_threads()} threads",
        "System": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}",
    }


def _engine_line() -> str:
    facts: dict[str, Any] = machine()
    return f"{facts['Engine']}; {facts['Processor']}"
