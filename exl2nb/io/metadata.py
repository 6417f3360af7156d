"""The metadata of a model on the hub as a folder: its small files, and weight files with their headers only."""

from __future__ import annotations

import fnmatch
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from exl2nb.core.errors import FormatError, ModelNotFound
from exl2nb.io.hub import SKIPPED, check_id, hub_errors, name_of, no_config, resolve, time_limits, unreachable
from exl2nb.io.safetensors import HEADER_LIMIT_BYTES, SafetensorsFile

SMALL = (
    "config.json", "generation_config.json", "quantize_config.json", "quant_config.json", "tokenizer_config.json", "chat_template.j*",
    "additional_chat_templates/*.jinja", "model.safetensors.index.json",
)  # fmt: skip
TABLES = ".q_groups"  # of EXL2 matrices: what their headers do not say
FIRST_BYTES = 1 << 17  # of a weight file: holds most headers
GAP_BYTES = 1 << 16  # between two tables that are fetched together
CONNECTIONS = 8


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
        small = [name for name in self.names if any(fnmatch.fnmatchcase(name, pattern) for pattern in SMALL)]
        if "config.json" not in small:
            raise ModelNotFound(no_config(self.repo_id, self.revision))
        weights = [name for name in self.names if name.endswith(".safetensors") and "/" not in name and not _skipped(name)]
        pool = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="exl2nb-metadata")
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
            infos = [opened.info(tensor) for tensor in opened.names() if tensor.endswith(TABLES)]
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
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in SKIPPED)


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans with small gaps closed, in order."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if joined and start - joined[-1][1] <= GAP_BYTES:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined
