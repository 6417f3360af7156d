"""Where calibration text may come from: tables, lines of JSON, conversations, data sets on the hub. Knows nothing of tokens.

Every reader gives texts; a record that holds a conversation is rendered by the model's chat template.
"""

from __future__ import annotations

import fnmatch
import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from exl2nb.core.errors import OptionError
from exl2nb.io import hub

Render = Callable[[Sequence[Mapping[str, Any]]], str]
HUB = "dataset:"
MAX_CHARS = 64 << 20  # of text taken from one source; more than any calibration uses
TEXT_COLUMNS = ("text", "content", "body", "completion")
TALK_COLUMNS = ("messages", "conversations", "conversation")
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}
_OPENERS: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open}


def read_path(path: Path, render: Render | None) -> str:
    """Text of a file: `.parquet`, `.jsonl`, `.json` (a list of records), or text, each of the last three also as `.xz` or `.gz`.

    Raises:
        OptionError: missing, unreadable, damaged, not UTF-8, or without text; says what was found and what to do.
    """
    kind = path.with_suffix("").suffix if path.suffix in _OPENERS else path.suffix
    if not path.is_file():
        what = "a directory" if path.is_dir() else "no such file"
        raise OptionError(
            f"calibration {path}: {what}; expected a text file (.txt, .jsonl, .json, .xz, .gz) or a .parquet file; check the path"
        )
    if kind == ".parquet":
        return _joined(_parquet(path, render), path)
    try:
        with _OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8") as file:
            if kind == ".jsonl":
                return _joined(_json_lines(file, path, render), path)
            text = file.read(MAX_CHARS)
    except OSError as error:
        raise OptionError(
            f"calibration {path}: {error.strerror or error}; expected a text file (.txt, .jsonl, .xz, .gz); check the path"
        ) from error
    except (UnicodeDecodeError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise OptionError(f"calibration {path}: {str(error)[:120]}; expected UTF-8 text, plain or compressed as the name says") from error
    if kind == ".json":
        return _joined(_records(_parsed(text, str(path)), str(path), render), path)
    if not text.strip():
        raise OptionError(f"calibration {path}: found no text; expected a UTF-8 text file; give another one")
    return text


def read_list(items: Sequence[Any], render: Render | None) -> str:
    """Text of a list of strings, records (as lines of JSON hold them) or conversations (lists of messages).

    Raises:
        OptionError: something else, or no text.
    """
    texts = list(_records(list(items), "calibration", render))
    text = "\n".join(texts)
    if not text.strip():
        raise OptionError("calibration: found no text; expected a path, or a list of strings or conversations with text in them")
    return text


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
        files = huggingface_hub.HfApi().list_repo_files(repo, repo_type="dataset", revision=revision or None)
        wanted = [file for file in sorted(files) if _readable(file) and (not pattern or fnmatch.fnmatchcase(file, pattern))]
        wanted.sort(key=lambda file: "train" not in file)
        if not wanted:
            raise OptionError(
                f"calibration {HUB}{name}: none of its {len(files)} files is a .parquet, .jsonl or .txt"
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
            f"calibration {HUB}{name}: cannot be fetched ({str(error).splitlines()[0][:160]}); expected a public data set, or access; "
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


def _json_lines(file: IO[str], path: Path, render: Render | None) -> Iterator[str]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            where = f"{path}, line {number}"
            yield from _records([_parsed(line, where)], where, render)


def _parsed(text: str, where: str) -> Any:
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
            yield _talk(value[next(c for c in TALK_COLUMNS if c in value)], where, render)
        elif isinstance(value, dict) and any(isinstance(value.get(c), str) for c in TEXT_COLUMNS):
            yield next(value[c] for c in TEXT_COLUMNS if isinstance(value.get(c), str))
        elif isinstance(value, dict) and any(value.get(c, 0) is None for c in TEXT_COLUMNS):
            continue  # a table's empty cell
        elif isinstance(value, list):
            yield _talk(value, where, render)
        elif isinstance(value, dict) and len(value) == 1 and isinstance(next(iter(value.values())), str):
            yield next(iter(value.values()))
        else:
            found = f"an object with {', '.join(map(str, value))[:120]}" if isinstance(value, dict) else f"a {type(value).__name__}"
            raise OptionError(
                f"calibration {where}: found something that is not a string: {found}; expected text, an object with one of "
                f"{', '.join((*TEXT_COLUMNS, *TALK_COLUMNS))}, or a list of messages"
            )


def _talk(messages: Any, where: str, render: Render | None) -> str:
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
        made.append({"role": _ROLES.get(role, role), "content": content})
    return render(made)


def _joined(texts: Iterable[str], path: Path) -> str:
    kept, size = [], 0
    for text in texts:
        kept.append(text)
        size += len(text) + 1
        if size >= MAX_CHARS:
            break
    joined = "\n".join(kept)
    if not joined.strip():
        raise OptionError(f"calibration {path}: found no text; expected records with text in them; give another file")
    return joined
