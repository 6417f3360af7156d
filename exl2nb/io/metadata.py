"""What the hub says of a model without its weights: branches and tags, and a folder of small files and headers."""

from __future__ import annotations

import fnmatch
import html
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from exl2nb.core.errors import FormatError, ModelNotFound
from exl2nb.io.hub import SKIPPED_FILES, check_id, hub_errors, name_of, no_config, resolve, time_limits, unreachable
from exl2nb.io.safetensors import HEADER_LIMIT_BYTES, SafetensorsFile

SMALL_FILES = (
    "config.json", "generation_config.json", "quantize_config.json", "quant_config.json", "tokenizer_config.json", "chat_template.j*",
    "additional_chat_templates/*.jinja", "model.safetensors.index.json",
)  # fmt: skip
TABLE_SUFFIX = ".q_groups"  # of EXL2 matrices: what their headers do not say
FIRST_BYTES = 1 << 17  # of a weight file: holds most headers
GAP_BYTES = 1 << 16  # between two tables that are fetched together
MAX_CONNECTIONS = 8


@contextmanager
def metadata_folder(path_or_id: str | os.PathLike[str], revision: str | None = None, *, adapter: bool = False) -> Iterator[Path]:
    """A folder with a model's metadata: all but the data of its weights. It exists for the length of the `with`.

    Args:
        path_or_id, revision, adapter: as `hub.resolve`; a local folder is itself.

    Yields:
        The folder. For a model of the hub a temporary one with sparse weight files: their size, header and group tables are right.
        Nothing goes into the hub's cache. Without a network, a complete earlier download is used.

    Raises:
        ModelNotFound, OptionError: as `hub.resolve`. FormatError: a header that breaks a rule.
    """
    text = name_of(path_or_id)
    if not text or Path(text).expanduser().exists():
        yield resolve(path_or_id, revision, adapter=adapter)
        return
    repo_id = check_id(text)
    with tempfile.TemporaryDirectory(prefix="exl2nb-") as folder:
        try:
            with hub_errors(repo_id, revision), time_limits():
                _Repository(repo_id, revision).copy_into(Path(folder))
        except ModelNotFound as error:
            if not unreachable(error):
                raise
            stored = resolve(path_or_id, revision, adapter=adapter)
        else:
            stored = Path(folder)
        yield stored


class _Repository:
    """One revision of a repository, read by byte ranges."""

    def __init__(self, repo_id: str, revision: str | None) -> None:
        import huggingface_hub

        self.repo_id, self.revision = repo_id, revision
        info = huggingface_hub.HfApi().model_info(repo_id, revision=revision)
        self.commit = info.sha or revision or "main"
        names = [item.rfilename for item in info.siblings or ()]
        self.names = [name for name in names if name.count("/") <= 1 and ".." not in name.split("/")]
        self.headers = huggingface_hub.utils.build_hf_headers()

    def copy_into(self, folder: Path) -> None:
        """Everything but the weights' data."""
        small = [name for name in self.names if any(fnmatch.fnmatchcase(name, pattern) for pattern in SMALL_FILES)]
        if "config.json" not in small:
            raise ModelNotFound(no_config(self.repo_id, self.revision))
        weights = [name for name in self.names if name.endswith(".safetensors") and "/" not in name and not _skipped(name)]
        pool = ThreadPoolExecutor(MAX_CONNECTIONS, thread_name_prefix="exl2nb-metadata")
        try:
            jobs = [pool.submit(self._small, name, folder) for name in small] + [pool.submit(self._weights, n, folder) for n in weights]
            for job in jobs:
                job.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # an interrupt does not wait for requests under way

    def _small(self, name: str, folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(self._get(name).content)

    def _weights(self, name: str, folder: Path) -> None:
        first, size = self._range(name, 0, FIRST_BYTES)
        length = 8 + int.from_bytes(first[:8], "little")
        if length > HEADER_LIMIT_BYTES:
            raise FormatError(f"{name}: header: found a length of {length - 8} bytes, expected at most {HEADER_LIMIT_BYTES}")
        if len(first) < min(length, size):
            first += self._range(name, len(first), length - len(first))[0]
        path = folder / name
        with path.open("wb") as file:
            file.write(first[:length])
            file.truncate(size)
        with SafetensorsFile(path) as opened:
            infos = [opened.info(tensor) for tensor in opened.names() if tensor.endswith(TABLE_SUFFIX)]
        spans = _joined([(info.start, info.end) for info in infos])
        with path.open("r+b") as file:
            for start, end in spans:
                file.seek(start)
                file.write(self._range(name, start, end - start)[0])

    def _range(self, name: str, start: int, count: int) -> tuple[bytes, int]:
        """Bytes of a file from `start` on, at most `count`, and the file's size."""
        answer = self._get(name, Range=f"bytes={start}-{start + count - 1}")
        size = answer.headers.get("content-range", "").rpartition("/")[2]
        if answer.status_code != 206 or not size.isdigit():
            raise OSError(f"{name}: asked for a range of bytes, got status {answer.status_code}")
        return answer.content, int(size)

    def _get(self, name: str, **headers: str) -> Any:
        import huggingface_hub
        from huggingface_hub import constants
        from huggingface_hub.utils import get_session, hf_raise_for_status

        url = huggingface_hub.hf_hub_url(self.repo_id, name, revision=self.commit)
        limit_s = constants.HF_HUB_DOWNLOAD_TIMEOUT
        answer = get_session().get(url, headers={**self.headers, "Accept-Encoding": "identity", **headers}, timeout=limit_s)
        hf_raise_for_status(answer)
        return answer


def _skipped(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in SKIPPED_FILES)


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans with small gaps closed, in order."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if joined and start - joined[-1][1] <= GAP_BYTES:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


# "4.0bpw", "4.25bpw_h6", "gptq-4bit-32g", and "6_5" as some publishers write it
_NAMED_BITRATE = re.compile(r"(?<![\d._])(\d{1,2}(?:[._]\d{1,3})?)[ _-]?(?:bpw|bits?)(?![a-z])", re.IGNORECASE)
_BARE_BITRATE = re.compile(r"(\d)[._](\d{1,3})")


@dataclass(frozen=True)
class Revision:
    """One branch or tag. bpw: bits per weight in its name, or None. commit: hash. cached: it was downloaded before."""

    name: str
    kind: str
    bpw: float | None
    commit: str
    cached: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"name": self.name, "kind": self.kind, "bpw": self.bpw, "commit": self.commit, "cached": self.cached}


@dataclass(frozen=True)
class Revisions(Sequence[Revision]):
    """What `revisions` found: a sequence, in order of bitrate, which shows itself as a table.

    repo_id: "owner/name". offline: the hub could not be asked, these are the ones in the local cache.
    """

    repo_id: str
    items: tuple[Revision, ...]
    offline: bool = False

    @property
    def names(self) -> list[str]:
        """What `load(..., revision=)` takes."""
        return [revision.name for revision in self.items]

    @overload
    def __getitem__(self, index: int) -> Revision: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Revision]: ...
    def __getitem__(self, index: int | slice) -> Revision | Sequence[Revision]:
        """By position."""
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Revision]:
        return iter(self.items)

    def to_frame(self) -> Any:
        """A pandas DataFrame, one row per revision."""
        import pandas as pd

        return pd.DataFrame([revision.to_dict() for revision in self.items], columns=["name", "kind", "bpw", "commit", "cached"])

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"repo_id": self.repo_id, "offline": self.offline, "revisions": [revision.to_dict() for revision in self.items]}

    def __repr__(self) -> str:
        rows = [("revision", "bits per weight", "kind", "commit", "")]
        rows += [(r.name, _bpw(r), r.kind, r.commit[:10], "downloaded" if r.cached else "") for r in self.items]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows]
        return "\n".join([self._title(), *lines])

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><td style='text-align:left'><code>{html.escape(r.name)}</code></td><td>{_bpw(r)}</td><td>{r.kind}</td>"
            f"<td><code>{html.escape(r.commit[:10])}</code></td><td>{'downloaded' if r.cached else ''}</td></tr>"
            for r in self.items
        )
        head = "<tr><th style='text-align:left'>revision</th><th>bits per weight</th><th>kind</th><th>commit</th><th></th></tr>"
        return f"<table><caption>{html.escape(self._title())}</caption>{head}{cells}</table>"

    def _title(self) -> str:
        where = " in the local cache (the hub was not asked)" if self.offline else ""
        return f"{self.repo_id}: {len(self)} revision{'' if len(self) == 1 else 's'}{where}"


def revisions(repo_id: str) -> Revisions:
    """List a model's branches and tags on the hub; EXL2 models often have one branch per bitrate.

    Args:
        repo_id: hub id such as "owner/name".

    Returns:
        Those with a bitrate in their name first, rising, then the others by name. Without a network: what was downloaded before.

    Raises:
        ModelNotFound: no such model, no access, or no network and nothing downloaded.

    Example:
        >>> bitrate("4.25bpw_h6"), bitrate("6_5"), bitrate("gptq-4bit-128g-actorder_True"), bitrate("main")
        (4.25, 6.5, 4.0, None)
    """
    import huggingface_hub
    from huggingface_hub import errors

    check_id(repo_id)
    cached = _cached(repo_id)
    try:
        with hub_errors(repo_id), time_limits():
            refs = huggingface_hub.HfApi().list_repo_refs(repo_id)
    except ModelNotFound as error:
        asked = isinstance(error.__cause__, (errors.RepositoryNotFoundError, errors.GatedRepoError))
        if asked or not cached:
            raise
        return Revisions(repo_id, _ordered([_revision(name, "branch", commit, cached) for name, commit in cached.items()]), offline=True)
    found = [_revision(ref.name, kind, ref.target_commit, cached) for kind, refs in _kinds(refs) for ref in refs]
    return Revisions(repo_id, _ordered(found))


def bitrate(name: str) -> float | None:
    """Bits per weight in the name of a branch, or None."""
    match = _NAMED_BITRATE.search(name)
    text = match[1].replace("_", ".") if match else ".".join(bare.groups()) if (bare := _BARE_BITRATE.fullmatch(name)) else None
    return float(text) if text is not None and 1 <= float(text) <= 16 else None


def _kinds(refs: Any) -> list[tuple[str, Any]]:
    return [("branch", refs.branches), ("tag", refs.tags)]


def _revision(name: str, kind: str, commit: str, cached: dict[str, str]) -> Revision:
    return Revision(name, kind, bitrate(name), commit, commit in cached.values())


def _ordered(found: list[Revision]) -> tuple[Revision, ...]:
    return tuple(sorted(found, key=lambda r: (r.bpw is None, r.bpw or 0.0, r.name)))


def _bpw(revision: Revision) -> str:
    return "-" if revision.bpw is None else f"{revision.bpw:g}"


def _cached(repo_id: str) -> dict[str, str]:
    """Revision -> commit of the snapshots in the hub's local cache that have weights."""
    from huggingface_hub import constants

    root = Path(constants.HF_HUB_CACHE) / f"models--{repo_id.replace('/', '--')}"
    found = {}
    for ref in sorted((root / "refs").rglob("*")):
        commit = ref.read_text(encoding="utf-8", errors="replace").strip() if ref.is_file() else ""
        if re.fullmatch(r"[0-9a-f]{40}", commit) and any((root / "snapshots" / commit).glob("*.safetensors")):
            found[ref.relative_to(root / "refs").as_posix()] = commit
    return found
