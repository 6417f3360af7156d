"""The functions of `exl2nb` around loaded models: demo, convert, compare, inspect."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from exl2nb.cache.spec import parse_mode
from exl2nb.converter.convert_keywords import CONVERT_DEFAULTS, ConvertOptions
from exl2nb.core.errors import Exl2Error, OptionError
from exl2nb.core.options import check_range, spelled_out
from exl2nb.core.progress import Sink, showing
from exl2nb.io.hub import packaged
from exl2nb.io.metadata import metadata_folder
from exl2nb.llm.load_keywords import LOAD_DEFAULTS, LoadOptions
from exl2nb.model.inspection import Inspection
from exl2nb.model.inspection import inspect as inspect_directory

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from exl2nb.converter.result import Conversion
    from exl2nb.eval.comparison import Comparison
    from exl2nb.llm.llm import LLM


@spelled_out(LoadOptions, LOAD_DEFAULTS)
def demo(bpw: float | Literal["seeing"] | None = None, **options: Unpack[LoadOptions]) -> LLM:
    """Load a small model that comes with the package.

    Args:
        bpw: bits per weight; the model is then converted first (a minute), once per machine, into ~/.cache/exl2nb. None = its own fp16
            weights. "seeing" = another model, EXL2 already, which answers questions about pictures of shapes and digits.
        options: those of `load`.

    Raises:
        OptionError: bits outside 2 to 8, or another name.
    """
    from exl2nb.llm.load import load

    if isinstance(bpw, str):
        found = packaged(f"demo:{bpw}")
        if found is None:
            raise OptionError(f"demo: there is no model {bpw[:40]!r}; expected 'seeing', bits per weight from 2 to 8, or nothing")
        return load(found, **options)
    folder = Path(__file__).resolve().parents[1] / "demo_model"
    if bpw is None:
        return load(folder, **options)
    check_range("bpw", bpw, 2, 8, where="demo")
    made = Path.home() / ".cache" / "exl2nb" / f"demo-exl2-{bpw:g}bpw"
    if not (made / "config.json").is_file():
        made.parent.mkdir(parents=True, exist_ok=True)
        convert(folder, made, bpw=bpw, progress=options.get("progress", "auto"))
    return load(made, **options)


@spelled_out(ConvertOptions, CONVERT_DEFAULTS)
def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    bpw: float | None = None,
    progress: Sink | Literal["auto"] | None = "auto",
    **options: Unpack[ConvertOptions],
) -> Conversion:
    """Quantise a model to EXL2. Options and errors: `exl2nb.converter.conversion_job.ConversionJob`.

    Args:
        src: directory or hub id of an fp16, bf16 or fp32 model.
        dst: directory to make.
        bpw: bits per weight to reach; or leave it out and give `target`, such as {"bytes": "2GB"}.
        progress: takes the events of every stage; "auto" and None as in `load`.
    """
    from exl2nb.converter.conversion_job import ConversionJob

    job = ConversionJob(src, dst, bpw=bpw, **options)
    with showing(progress, "convert" if bpw is None else f"convert to {bpw:g} bpw") as sink:
        return job.run(sink)


def compare(
    reference: LLM | str | os.PathLike[str],
    other: LLM | str | os.PathLike[str],
    text: str | os.PathLike[str] | Sequence[int] | None = None,
    *,
    rows: int = 16,
    length: int = 512,
    cache: str = "fp32",
    lora: str | Mapping[str, float] | None = None,
    progress: Sink | Literal["auto"] | None = "auto",
) -> Comparison:
    """Measure what a model lost against its reference: perplexity of both, KL divergence, top-1 agreement, per token.

    Args:
        reference: the model taken as the truth; loaded, or a directory.
        other: the model that is measured.
        text: a text, or a `Path` to a text file; None = the evaluation text of the package (written for the demo model). Token ids are
            one row, whatever `rows` and `length` say.
        rows: rows of tokens.
        length: tokens per row.
        cache: how the measured model keeps keys and values, as in `load`; the reference keeps them in fp32. `compare(llm, llm, cache="q4")`
            shows what a quantised cache costs.
        lora: adapters that the measured model runs with, as for `generate`; it must be a loaded model that has them.
        progress: takes the events of stage "compare"; "auto" and None as in `load`.

    Returns:
        The numbers; the last line of a cell shows them, `.to_frame()` gives a DataFrame.

    Cost: both models run over rows * length tokens. A loaded model's other requests run between its forward passes.
    """
    from contextlib import ExitStack

    import torch

    from exl2nb.eval.comparison import compare_models
    from exl2nb.eval.rows import read_text, token_rows
    from exl2nb.llm.llm import LLM
    from exl2nb.llm.load import load
    from exl2nb.llm.requests import ids_of

    source = Path(__file__).resolve().parents[1] / "demo_model" / "evaluation.txt" if text is None else text
    words = read_text(Path(source)) if isinstance(source, os.PathLike) else source
    cache = parse_mode(cache, where="compare")
    with ExitStack() as stack:
        sink = stack.enter_context(showing(progress, "compare"))
        one, two = (m if isinstance(m, LLM) else stack.enter_context(load(m, progress=sink)) for m in (reference, other))
        if isinstance(words, str):
            ids = token_rows(one.tokenizer, words, rows=rows, length=length, where="compare")
        else:
            ids = torch.tensor([ids_of(words, one.tokenizer, where="compare", name="text")])
        row = None if lora is None else two.loras.row(lora, where="compare")
        name = two.name if row is None else f"{two.name} with {row.label}"
        return compare_models(
            one.engine.shared_model, two.engine.shared_model, ids, sink, reference_name=one.name, other_name=name, cache=cache,
            adapter=-1 if row is None else row.row,
        )  # fmt: skip


def inspect(path: str | os.PathLike[str], *, revision: str | None = None) -> Inspection:
    """Bits per matrix of a model directory or hub id, from the headers of its files alone: no weights are downloaded for it.

    Args:
        path: a folder, or "owner/name".
        revision: branch, tag or commit on the hub.

    Returns:
        As `model.inspection.inspect`; of a hub id with the id as path.

    Raises:
        ModelNotFound, OptionError: as `io.metadata.metadata_folder`. ConfigError, FormatError: as `model.inspection.inspect`.
    """
    with metadata_folder(path, revision) as folder:
        if Path(path).expanduser().exists():
            return inspect_directory(folder)
        try:
            return replace(inspect_directory(folder), path=Path(path))
        except Exl2Error as error:  # of a hub id, the message names the id, not our temporary folder
            raise type(error)(str(error).replace(str(folder), os.fspath(path))) from None
