"""`exl2nb eval` and `logits`: perplexity, divergence from a reference, and the logits of given token ids."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from exl2nb.cli.console import Console
from exl2nb.cli.models import add_load_options, add_model, file_bytes, load_options, loaded, locate, locate_demo
from exl2nb.core.errors import OptionError
from exl2nb.core.show import size_text

# name: what `converter.calibration.read_calibration` fetches
PUBLIC_TEXTS = {
    "wikitext2": "dataset:Salesforce/wikitext:wikitext-2-raw-v1/test-*.parquet",
    "wikitext103": "dataset:Salesforce/wikitext:wikitext-103-raw-v1/test-*.parquet",
    "c4": "dataset:allenai/c4:en/c4-validation.00000-of-*.json.gz",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_model(parser, cache="fp32")
    parser.add_argument("--against", metavar="REF", help="reference model: adds KL divergence and top-1 agreement")
    parser.add_argument(
        "--text",
        metavar="SOURCE",
        help=f"file (.txt, .jsonl, .parquet ...), dataset:owner/name, or {', '.join(PUBLIC_TEXTS)}; "
        "its encoding is cut into rows from the start",
    )
    parser.add_argument("--rows", type=int, default=32, help="rows to read (default 32)")
    parser.add_argument("--length", type=int, default=512, help="tokens a row (default 512)")
    tasks = parser.add_argument_group("tasks", "in place of --text; needs pip install lm-eval")
    tasks.add_argument("--tasks", metavar="NAMES", help="tasks of the evaluation harness, with commas between them")
    tasks.add_argument("--include", metavar="DIR", help="folder with tasks of your own")
    tasks.add_argument("--limit", type=float, help="questions of each task, or their share below 1")
    tasks.add_argument("--num-fewshot", type=int, help="examples before each question")
    add_load_options(parser, draft=False, device="cpu")


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure and print."""
    if (args.text is None) == (args.tasks is None):
        raise OptionError("eval: give --text, for perplexity, or --tasks, for the evaluation harness; see exl2nb eval --help")
    if args.tasks is not None:
        return _run_tasks(args, console)
    from exl2nb.eval.comparison import compare_models, perplexity
    from exl2nb.eval.rows import token_rows
    from exl2nb.model.inspection import inspect
    from exl2nb.tokenizer.tokenizer import Tokenizer

    text = read_source(args.text)
    directory = locate(args.model, console.sink, revision=args.revision)
    reference = locate(args.against, console.sink) if args.against else None
    ids = token_rows(Tokenizer.load(directory), text, rows=args.rows, length=args.length, where=args.text)
    data: dict[str, Any] = {"ppl": None, "kl_mean": None, "kl_p99": None, "top1": None}
    with loaded(directory, console.sink, options=load_options(args)) as model:
        if reference is None:
            result = perplexity(model, ids, console.sink, cache=args.cache)
            data["ppl"] = result.ppl
            lines = [f"{args.model}, {args.rows} rows of {args.length} tokens", f"  perplexity        {result.ppl:10.4f}"]
        else:
            with loaded(reference, console.sink) as other:
                names = {"reference_name": args.against, "other_name": args.model}
                comparison = compare_models(other, model, ids, console.sink, cache=args.cache, **names)
            data |= {key: value for key, value in comparison.summary().items() if key in (*data, "reference_ppl")}
            lines = [str(comparison)]
    data |= {
        "bpw": inspect(directory).decoder_bpw,
        "bytes": file_bytes(directory),
        "rows": args.rows,
        "length": args.length,
        "cache": args.cache,
    }
    lines.append(f"  bits per weight   {data['bpw']:10.4f}   in the decoder's linears; files {size_text(data['bytes'])}")
    console.result(data, "\n".join(lines))
    return 0


def _run_tasks(args: argparse.Namespace, console: Console) -> int:
    """Run tasks of the evaluation harness."""
    import exl2nb

    if args.against:
        raise OptionError("eval: --against compares on --text; run --tasks once for each model")
    limit = args.limit if args.limit is None or args.limit < 1 else int(args.limit)
    options = {"num_fewshot": args.num_fewshot, "limit": limit, "include": args.include, "cache": args.cache}
    found = exl2nb.evaluate(str(locate_demo(args.model)), args.tasks.split(","), progress=console.sink, **options, **load_options(args))
    console.result(found.to_dict(), repr(found))
    return 0


def read_source(source: str) -> str:
    """The text of a file, of a data set on the hub, or of one of PUBLIC_TEXTS; records are joined by line breaks.

    Raises:
        OptionError: there is no text, or it cannot be fetched; says what to do.
    """
    from exl2nb.converter.calibration import read_calibration

    known = Path(source).exists()
    try:
        return read_calibration(PUBLIC_TEXTS.get(source, source) if not known else source)[0]
    except OptionError as error:
        hint = "" if known or ":" in source or source in PUBLIC_TEXTS else f"; or one of {', '.join(PUBLIC_TEXTS)}, or dataset:owner/name"
        raise OptionError(str(error).replace("calibration ", "text ", 1) + hint) from error


def add_logits_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_model(parser, cache="fp32")
    parser.add_argument(
        "--ids", type=Path, required=True, metavar="FILE", help="safetensors file with `input_ids` (rows, T), int32 or int64"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="safetensors file to write: `logits` (rows, T, vocab) fp32")


def run_logits(args: argparse.Namespace, console: Console) -> int:
    """Read ids, run the model, write logits."""
    from exl2nb.core.errors import FormatError
    from exl2nb.eval.rows import logits
    from exl2nb.io import safetensors

    source = safetensors.SafetensorsFile(args.ids)
    if "input_ids" not in source.names():
        found = ", ".join(source.names()) or "no tensor"
        raise FormatError(f"{args.ids}: found {found}; expected a tensor `input_ids` (rows, T); save the ids under that name")
    ids = source.read("input_ids")
    with loaded(locate(args.model, console.sink), console.sink) as model:
        values = logits(model, ids, console.sink, cache=args.cache)
    safetensors.save(args.out, {"logits": values})
    shape = list(values.shape)
    console.result(
        {"out": str(args.out), "shape": shape, "bytes": args.out.stat().st_size},
        f"{args.out}: logits {shape} fp32, {size_text(values.nbytes)}",
    )
    return 0
