"""Calibration text and the token rows cut from it: files, hub data sets, lists, conversations, or text that the model writes."""

from __future__ import annotations

import fnmatch
import gzip
import json
import lzma
import os
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from exl2nb.cache.spec import PAGE_SIZE
from exl2nb.converter.convert_keywords import MIN_LENGTH
from exl2nb.core.errors import CalibrationWarning, OptionError, TokenizerError
from exl2nb.core.files import placeholder, read_regular
from exl2nb.core.progress import Meter, Sink
from exl2nb.io import hub
from exl2nb.model.batch import Batch, SequenceSlice
from exl2nb.model.loader import load_model

if TYPE_CHECKING:
    from exl2nb.tokenizer.tokenizer import Tokenizer

Render = Callable[[Sequence[Mapping[str, Any]]], str]
HUB_PREFIX = "dataset:"
MAX_CHARS = 64 << 20  # of text taken from one source; more than any calibration uses
TEXT_COLUMNS = ("text", "content", "body", "completion")
TALK_COLUMNS = ("messages", "conversations", "conversation")
_ROLE_NAMES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}
_FILE_OPENERS: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open}


def read_path(path: Path, render: Render | None) -> str:
    """Text of a file: `.parquet`, `.jsonl`, `.json` (a list of records), or text, each of the last three also as `.xz` or `.gz`.

    Raises:
        OptionError: missing, unreadable, damaged, not UTF-8, or without text; says what was found and what to do.
    """
    kind = path.with_suffix("").suffix if path.suffix in _FILE_OPENERS else path.suffix
    if not path.is_file():
        what = "a directory" if path.is_dir() else "no such file"
        raise OptionError(
            f"calibration {path}: {what}; expected a text file (.txt, .jsonl, .json, .xz, .gz) or a .parquet file; check the path"
        )
    try:
        found = placeholder(read_regular(path, 512))
    except OSError as error:
        raise OptionError(f"calibration {path}: {error.strerror or error}; expected a file that can be read; check the path") from error
    if found is not None and (found.startswith("a Git LFS") or kind in (".parquet", ".jsonl", ".json")):  # a web page is a text, too
        raise OptionError(f"calibration {path}: found {found}")
    if kind == ".parquet":
        return _join_texts(_parquet(path, render), path)
    try:
        with _FILE_OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8") as file:
            if kind == ".jsonl":
                return _join_texts(_json_lines(file, path, render), path)
            text = file.read(MAX_CHARS)
    except OSError as error:
        raise OptionError(
            f"calibration {path}: {error.strerror or error}; expected a text file (.txt, .jsonl, .xz, .gz); check the path"
        ) from error
    except (UnicodeDecodeError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise OptionError(f"calibration {path}: {str(error)[:120]}; expected UTF-8 text, plain or compressed as the name says") from error
    if kind == ".json":
        if text.startswith("{") and "}\n{" in text:  # lines, as some data sets call them .json; the last one may be cut
            whole = text[: text.rindex("\n")] if len(text) == MAX_CHARS else text
            return _join_texts(_json_lines(whole.splitlines(), path, render), path)
        return _join_texts(_records(_parse_lines(text, str(path)), str(path), render), path)
    return _check_text(text, f"calibration {path}", "a UTF-8 text file")


def read_list(items: Sequence[Any], render: Render | None) -> str:
    """Text of a list of strings, records (as lines of JSON hold them) or conversations (lists of messages).

    Raises:
        OptionError: something else, or no text.
    """
    texts = list(_records(list(items), "calibration", render))
    text = "\n".join(texts)
    return _check_text(text, "calibration", "a path, or a list of strings or conversations with text in them")


def read_hub(name: str, render: Render | None) -> str:
    """Text of a data set on the hub: the first file it has that can be read, fetched into the hub's cache.

    Args:
        name: "owner/name", with "@revision" and ":path or pattern in it" where wanted.
        render: of conversations.

    Raises:
        OptionError: no such data set, no access, no network, or no file that can be read.
    """
    import huggingface_hub
    from huggingface_hub import errors

    rest, _, pattern = name.partition(":")
    repo, _, revision = rest.partition("@")
    try:
        hub.check_id(repo)
        with hub.time_limits():
            files = huggingface_hub.HfApi().list_repo_files(repo, repo_type="dataset", revision=revision or None)
        wanted = [file for file in sorted(files) if (fnmatch.fnmatchcase(file, pattern) if pattern else _readable(file))]
        wanted.sort(key=lambda file: "train" not in file)
        if not wanted:
            raise OptionError(
                f"calibration {HUB_PREFIX}{name}: none of its {len(files)} files is a .parquet, .jsonl or .txt"
                f"{f' named {pattern}' if pattern else ''}; expected one; give another data set, or download it and give a file"
            )
        path = huggingface_hub.hf_hub_download(repo, wanted[0], repo_type="dataset", revision=revision or None)
    except (
        errors.HfHubHTTPError,
        errors.LocalEntryNotFoundError,
        errors.OfflineModeIsEnabled,
        OSError,
        ValueError,
        *hub.network_errors(),
    ) as error:
        if isinstance(error, OptionError):
            raise
        raise OptionError(
            f"calibration {HUB_PREFIX}{name}: cannot be fetched ({str(error).splitlines()[0][:160]}); "
            "expected a public data set, or access; "
            "check its name, or download it and give a file"
        ) from error
    return read_path(Path(path), render)


def _readable(file: str) -> bool:
    stem = file.removesuffix(".xz").removesuffix(".gz")
    return stem.endswith((".parquet", ".jsonl", ".txt")) and not file.rpartition("/")[2].startswith((".", "README", "LICENSE"))


def _parquet(path: Path, render: Render | None) -> Iterator[str]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise OptionError(f"calibration {path}: reading Parquet needs pyarrow; install exl2nb[parquet], or give a text file") from error
    try:
        file = parquet.ParquetFile(path)
        schema = file.schema_arrow
        strings = [f.name for f in schema if pa.types.is_string(f.type) or pa.types.is_large_string(f.type)]
        column = next((c for c in (*TALK_COLUMNS, *TEXT_COLUMNS) if c in schema.names), strings[0] if len(strings) == 1 else None)
        if column is None:
            raise OptionError(
                f"calibration {path}: found columns {', '.join(schema.names)[:200]}, expected one of "
                f"{', '.join((*TEXT_COLUMNS, *TALK_COLUMNS))}, or a single column of strings; rename one"
            )
        for batch in file.iter_batches(columns=[column]):
            yield from _records([{column: value} for value in batch.column(0).to_pylist()], str(path), render)
    except pa.ArrowException as error:
        raise OptionError(f"calibration {path}: {str(error)[:160]}; expected a Parquet file; download it again") from error


def _json_lines(file: Iterable[str], path: Path, render: Render | None) -> Iterator[str]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            where = f"{path}, line {number}"
            yield from _records([_parse_lines(line, where)], where, render)


def _parse_lines(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: no JSON, or numbers of thousands of digits
        raise OptionError(f"calibration {where}: {str(error)[:120]}; expected JSON; correct it or leave it out") from error


def _records(values: Any, where: str, render: Render | None) -> Iterator[str]:
    """Texts of records: strings, objects with a text or a conversation, or conversations."""
    for value in values if isinstance(values, list) else [values]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict) and any(c in value for c in TALK_COLUMNS):
            yield _conversation_text(value[next(c for c in TALK_COLUMNS if c in value)], where, render)
        elif isinstance(value, dict) and any(isinstance(value.get(c), str) for c in TEXT_COLUMNS):
            yield next(value[c] for c in TEXT_COLUMNS if isinstance(value.get(c), str))
        elif isinstance(value, dict) and any(value.get(c, 0) is None for c in TEXT_COLUMNS):
            continue  # a table's empty cell
        elif isinstance(value, list):
            yield _conversation_text(value, where, render)
        elif isinstance(value, dict) and len(value) == 1 and isinstance(next(iter(value.values())), str):
            yield next(iter(value.values()))
        else:
            found = f"an object with {', '.join(map(str, value))[:120]}" if isinstance(value, dict) else f"a {type(value).__name__}"
            raise OptionError(
                f"calibration {where}: found something that is not a string: {found}; expected text, an object with one of "
                f"{', '.join((*TEXT_COLUMNS, *TALK_COLUMNS))}, or a list of messages"
            )


def _conversation_text(messages: Any, where: str, render: Render | None) -> str:
    if render is None:
        raise OptionError(f"calibration {where}: found a conversation, and the model has no chat template; expected text; give texts")
    listed = cast(list[Any], messages) if isinstance(messages, (list, tuple)) else [None]
    made = []
    for message in listed:
        content = message.get("content", message.get("value")) if isinstance(message, dict) else None
        role = message.get("role", message.get("from")) if isinstance(message, dict) else None
        if not isinstance(content, (str, list)) or not isinstance(role, str):
            raise OptionError(
                f"calibration {where}: found a message that is {str(message)[:80]!r}; expected an object with role and content"
            )
        made.append({"role": _ROLE_NAMES.get(role, role), "content": content})
    return render(made)


def _join_texts(texts: Iterable[str], path: Path) -> str:
    kept, size = [], 0
    for text in texts:
        kept.append(text)
        size += len(text) + 1
        if size >= MAX_CHARS:
            break
    return _check_text("\n".join(kept), f"calibration {path}", "records with text in them")


def _check_text(text: str, where: str, expected: str) -> str:
    if not text.strip("\0 \t\r\n"):
        raise OptionError(f"{where}: found no text; expected {expected}; give another one")
    if (count := text.count("\0")) > len(text) // 1000:  # a stray one occurs in text from the web
        raise OptionError(f"{where}: found {count} NUL characters among {len(text)}; expected {expected}: this looks like binary or UTF-16")
    return text


Source = str | os.PathLike[str] | Sequence[Any] | None
SELF_TEXT = "self"  # text that the model writes (write_text)
# texts that come with the package: by their name as a source, what files call them and where they are
MIXED_TEXT = "mixed"
DEMO_TEXT = "demo"
PACKAGED_TEXTS = {MIXED_TEXT: ("(mixed)", "calibration_text/mixed.jsonl.xz"), DEMO_TEXT: ("(default)", "demo_model/calibration.txt")}
TEMPLATE_DATE = "01 Jan 2026"  # for chat templates that state one: the same text on every day
MAX_EXCESS_LOSS_NATS = (
    1.0  # nats per token of excess loss; demo model: its own text 0.18, books it never saw 0.22, the mixed text 2.3, code 4.0
)
SENSITIVITY_SHARE = 0.15  # of the calibration rows; the others are for Hessians
MAX_UNKNOWN = 0.25
MAX_PARTS = 0.35  # demo model: English 0.00, Finnish 0.09, source code 0.00, Russian, of which its vocabulary knows nothing, 0.90
ENCODE_CHARACTERS = 1 << 14  # characters of a text that are encoded at once, and those up to the next empty line
_CHARS_PER_TOKEN = 8  # more text per row than any tokenizer needs for prose; rows that still come out short fall back to the whole text


@dataclass(frozen=True)
class Rows:
    """Token rows, int32 `(n, S)` each, from different places of one text, so that nothing is judged by what it was made from.

    hessians: rows for the Hessians that rounding uses. sensitivity: rows for gradients, which set the allocation; empty where there is a
    single row, which then serves for both. report: kept out of everything but the report. name: of the text. tuning, choosing: rows that
    tuning learns from (those for Hessians and sensitivity may be among them), and that it stops by. second: of a text of another kind,
    `second_name`, for the report.
    """

    hessians: Tensor
    sensitivity: Tensor
    report: Tensor
    name: str
    tuning: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.int32))
    choosing: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.int32))
    second: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.int32))
    second_name: str = ""

    @classmethod
    def of(cls, ids: Tensor, report: Tensor, name: str) -> Rows:
        """Divide calibration rows: SENSITIVITY_SHARE of them, spread over all, are for sensitivity."""
        judging = min(len(ids) - 1, max(1, round(SENSITIVITY_SHARE * len(ids))))
        return cls(*take_spread_rows(ids, judging), report, name)

    @property
    def used(self) -> int:
        """How many rows are for Hessians."""
        return len(self.hessians)

    @property
    def calibrating(self) -> Tensor:
        """The rows for Hessians, then those for sensitivity."""
        return torch.cat([self.hessians, self.sensitivity])

    def facts(self) -> dict[str, Any]:
        """What files and reports say of them."""
        count, length = self.calibrating.shape
        return {"rows": count, "length": length, "dataset": self.name}

    def split(self) -> dict[str, int]:
        """How many rows serve for what."""
        tuned = {"tuning": len(self.tuning), "choosing": len(self.choosing)} if len(self.tuning) else {}
        return {"hessians": self.used, "sensitivity": len(self.sensitivity), "report": len(self.report), **tuned}


def read_calibration(source: Source, render: Render | None = None) -> tuple[str, str]:
    """Text and name of a calibration source.

    Args:
        source: a file (`.txt`, `.jsonl`, `.json`, also as `.xz` or `.gz`; `.parquet`), "dataset:owner/name" on the hub, a list of
            strings, records or conversations, "mixed" or "demo" for a text that comes with the package, or None for "mixed".
        render: a conversation (list of messages) -> text, by the model's chat template.

    Raises:
        OptionError: the file is missing, unreadable, not UTF-8 text, or there is no text in it.
    """
    if source is None or (isinstance(source, str) and source in PACKAGED_TEXTS):
        name, file = PACKAGED_TEXTS[source or MIXED_TEXT]
        path = Path(__file__).parent.parent / file
        return (_mixed_rows(path, render) if path.suffix == ".xz" else read_path(path, None)), name
    if isinstance(source, str) and source.startswith(HUB_PREFIX):
        return read_hub(source.removeprefix(HUB_PREFIX), render), source
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        return read_path(path, render), path.name
    return read_list(source, render), f"{len(source)} strings"


def _mixed_rows(path: Path, render: Render | None) -> str:
    """The mixed text, its conversations as the template writes them; without one, or where it refuses them, as plain lines."""
    made, folded = [], False
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for record in map(json.loads, file):
            if "text" in record:
                made.append(record["text"])
                continue
            messages = _fold_spaces(record["messages"]) if folded and render is not None else record["messages"]
            try:
                made.append(_lines(messages) if render is None else render(messages))
            except TokenizerError:  # some templates know no system message
                if not folded and render is not None:
                    folded = True
                    with suppress(TokenizerError):
                        made.append(render(_fold_spaces(messages)))
                        continue
                made.append(_lines(messages))
                render = None
    return "\n\n".join(made)


def _fold_spaces(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """The same with the system message at the beginning of what the user says first."""
    if messages[0]["role"] != "system":
        return messages
    return [{"role": "user", "content": f"{messages[0]['content']}\n\n{messages[1]['content']}"}, *messages[2:]]


def _lines(messages: list[dict[str, str]]) -> str:
    return "\n\n".join(f"{message['role'].title()}: {message['content']}" for message in messages)


def check_like(loss: float, entropy: float, name: str) -> None:
    """Warn where a text is unlike what the model writes.

    On text of the model's own distribution the mean of -log p of its tokens is the mean entropy of its predictions, whatever the entropy;
    what the loss has more is how much less probable than such text the tokens are.

    Args:
        loss: mean -log p of the tokens, nats. entropy: mean of the predictions' entropy at the same places, nats.
        name: of the text.
    """
    if loss - entropy > MAX_EXCESS_LOSS_NATS:
        warnings.warn(
            f"calibration {name}: unlike the model's own text: a loss of {loss:.2f} nats per token where text of its kind has "
            f"{entropy:.2f}, expected at most {MAX_EXCESS_LOSS_NATS:g} more; "
            "give text of its kind with calibration=, or calibration='self'",
            CalibrationWarning,
            stacklevel=2,
        )


def calibration_rows(
    encoder: Tokenizer, text: str, *, rows: int, length: int, seed: int = 0, at_least: int | None = None, spare: int = 0
) -> Tensor:
    """Rows of consecutive tokens from places spread over the whole text.

    The text is cut into `rows` equal spans and each gives one row from a random place in it; every fourth row begins with what the
    tokenizer puts in front of a text (BOS), as prompts do. A text too short for that is encoded once and cut into rows.

    Args:
        at_least: of `rows`, where the text has fewer; None: all of them.
        spare: rows among them that the caller of the library has not asked for, for the hint of the error.

    Returns:
        int32 `(rows, length)`; the same for the same arguments.

    Raises:
        OptionError: the text has too few tokens; the message says how many rows fit.
    """
    generator = torch.Generator().manual_seed(seed)
    span, need = len(text) / rows, length * _CHARS_PER_TOKEN
    jitter = torch.rand(rows, generator=generator, dtype=torch.float64).tolist()
    if span >= need:
        picked = []
        for row, share in enumerate(jitter):
            start = int(row * span + share * (span - need))
            piece = text[start : start + need].partition(" ")[2]  # begin at a word
            picked.append(encoder.encode(piece, add_special=row % 4 == 0)[:length])
        if all(len(ids) == length for ids in picked):
            return torch.tensor(picked, dtype=torch.int32)
    ids = encode_in_pieces(encoder, text)
    count = len(ids) // length
    rows = rows if at_least is None else max(at_least, min(rows, count))
    if count < rows:
        raise OptionError(
            f"calibration: {rows} rows of {length} tokens need {rows * length} tokens, found {len(ids)}; "
            + (f"use rows={count - spare}, a shorter length, or give more text" if count > spare else _shorten_text(len(ids), rows))
        )
    places = torch.randperm(count, generator=generator)[:rows].sort().values
    return torch.tensor(ids[: count * length], dtype=torch.int32).view(count, length)[places].contiguous()


def _shorten_text(count: int, rows: int) -> str:
    """What to do where fewer rows are not enough."""
    fits = count // rows
    return f"give more text, or use length={fits}" if fits >= MIN_LENGTH else "give more text"


def encode_in_pieces(encoder: Tokenizer, text: str) -> list[int]:
    """Ids of a whole text, piece by piece: a tokenizer takes twice as long for a book at once. A piece ends before an empty line."""
    ids, begin = list[int](), 0
    while begin < len(text) or not begin:
        end = text.find("\n\n", begin + ENCODE_CHARACTERS)
        end = len(text) if end < 0 else end
        ids += encoder.encode(text[begin:end], add_special=not begin)
        if end == len(text):
            break
        begin = end
    return ids


def unknown_share(encoder: Tokenizer, ids: Tensor) -> float:
    """How many of some tokens are the one for what the tokenizer does not know."""
    special = encoder.special_tokens
    unknown = encoder.encode(special["unk_token"], add_special=False) if "unk_token" in special else []
    return float((ids == unknown[0]).float().mean()) if len(unknown) == 1 else 0.0


def check_known(encoder: Tokenizer, ids: Tensor, name: str) -> None:
    """See whether a text is in a language of the tokenizer.

    Raises:
        OptionError: much of it is unknown. A tokenizer that falls back on bytes knows everything; where much of the text comes out as parts
            of characters that its vocabulary lacks, a CalibrationWarning says so.
    """
    share = unknown_share(encoder, ids)
    if share > MAX_UNKNOWN:
        raise OptionError(
            f"calibration {name}: {100 * share:.0f} % of its tokens are unknown to the model's tokenizer, expected at most "
            f"{100 * MAX_UNKNOWN:.0f} %; give text in a language of the model"
        )
    share = float(torch.isin(ids, torch.tensor(_byte_token_ids(encoder), dtype=ids.dtype)).float().mean())
    if share > MAX_PARTS:
        warnings.warn(
            f"calibration {name}: {100 * share:.0f} % of its tokens are parts of characters that the model's vocabulary lacks, expected at "
            f"most {100 * MAX_PARTS:.0f} %; is it in a language of the model?",
            CalibrationWarning,
            stacklevel=2,
        )


def _byte_token_ids(encoder: Tokenizer) -> list[int]:
    """Byte tokens: a single byte, or some bytes of a character."""
    if encoder.byte_table is None:
        return sorted(encoder.byte_ids)
    return [token for token, text in encoder.byte_table.items() if not _is_text(text)]


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def take_spread_rows(found: Tensor, extra: int) -> tuple[Tensor, Tensor]:
    """Rows, and `extra` of them taken out, spread over all."""
    picked = {int((i + 0.5) * len(found) / extra) for i in range(extra)}
    kept = [i for i in range(len(found)) if i not in picked]
    return found[kept].contiguous(), found[sorted(picked)].contiguous()


def split_rows(encoder: Tokenizer, text: str, *, rows: int, extra: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Calibration rows, and rows for the report from other places of the same text, spread over it too.

    Returns:
        int32 `(rows, length)` and `(extra, length)`, no token in both; fewer extra rows, down to none, where the text is short.

    Raises:
        OptionError: the text has too few tokens for `rows`.
    """
    for more in dict.fromkeys((extra, min(extra, 2), 0)):
        try:
            found = calibration_rows(encoder, text, rows=rows + more, length=length, seed=seed)
        except OptionError:
            if more:
                continue
            raise
        return take_spread_rows(found, more)
    raise AssertionError("unreachable: zero extra rows either work or raise")


def tuning_rows(
    encoder: Tokenizer,
    text: str,
    *,
    rows: int,
    tuning: int,
    choosing: int,
    extra: int,
    length: int,
    seed: int = 0,
    least: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows for a conversion that is tuned: as many for tuning as the text gives, up to `tuning` and at least `least`.

    Args:
        least: of `rows`, where the text has fewer; None: all of them.

    Returns:
        int32 `(n, length)` each: calibration rows, which are among the next; rows for tuning, for choosing, for the report.

    Raises:
        OptionError: the text has too few tokens for `least` and those for choosing.
    """
    needed = rows if least is None else least
    choosing = min(choosing, max(2, needed // 4))
    wanted, least = max(rows, tuning) + choosing + extra, needed + choosing
    found = calibration_rows(encoder, text, rows=wanted, length=length, seed=seed, at_least=least, spare=choosing)
    extra = min(extra, len(found) - least)
    kept, report = take_spread_rows(found, extra)
    kept, chosen = take_spread_rows(kept, choosing)
    return take_spread_rows(kept, rows)[1] if rows < len(kept) else kept, kept, chosen, report


AT_ONCE = 32  # sequences that are written together


def write_text(
    directory: str | os.PathLike[str], encoder: Tokenizer, *, rows: int, length: int, seed: int, sink: Sink | None = None
) -> Tensor:
    """Samples at temperature 1, nothing filtered, each beginning with what the tokenizer puts in front of a text, or with any token.

    Args:
        directory: the model; it is loaded as it is.
        rows, length: how many samples, of how many tokens.
        sink: takes the events of stage "write text".

    Returns:
        int32 `(rows, length)`; the same for the same arguments on the same machine.
    """
    generator = torch.Generator().manual_seed(seed)
    found = []
    with closing(load_model(directory, context=length)) as model, Meter("write text", total=rows, unit="rows", sink=sink) as meter:
        begin, pages = encoder.encode("")[:1], model.cache_spec(length).num_pages
        for first in range(0, rows, AT_ONCE):
            count = min(AT_ONCE, rows - first)
            cache = model.new_cache(model.cache_spec(pages * PAGE_SIZE * count))
            ids = [list(begin) or torch.randint(model.config.vocab_size, (1,), generator=generator).tolist() for _ in range(count)]
            for start in range(length - 1):
                spans = [SequenceSlice(ids=[row[start]], start=start, pages=range(b * pages, (b + 1) * pages)) for b, row in enumerate(ids)]
                logits = model.forward(Batch.build(spans, device=model.device), cache)
                picked = torch.multinomial(logits.float().cpu().softmax(-1), 1, generator=generator)
                for row, token in zip(ids, picked[:, 0].tolist()):
                    row.append(token)
            found += ids
            meter.step(count)
    return torch.tensor(found, dtype=torch.int32)
