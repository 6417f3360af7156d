"""The branches and tags of a model on the hub, with the bitrates in their names."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from exl2nb.core.errors import ModelNotFound
from exl2nb.io.hub import check_id, hub_errors, time_limits

# "4.0bpw", "4.25bpw_h6", "gptq-4bit-32g", and "6_5" as some publishers write it
_NAMED = re.compile(r"(?<![\d._])(\d{1,2}(?:[._]\d{1,3})?)[ _-]?(?:bpw|bits?)(?![a-z])", re.IGNORECASE)
_BARE = re.compile(r"(\d)[._](\d{1,3})")


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
    match = _NAMED.search(name)
    text = match[1].replace("_", ".") if match else ".".join(bare.groups()) if (bare := _BARE.fullmatch(name)) else None
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
