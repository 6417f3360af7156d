"""A path or a Hugging Face hub id -> a local model directory. Fetches the files a model needs and never any code."""

from __future__ import annotations

import io
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, TimeoutError
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from exl2nb.core.errors import Exl2Error, Interrupted, ModelNotFound, OptionError
from exl2nb.core.options import check_path
from exl2nb.core.progress import Progress, SilentSink, Sink

NEEDED_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "LICENSE*", "README.md"]
# no subfolder but additional_chat_templates
SKIPPED_FILES = ["[!a]*/*", "a/*", "a[!d]*/*", "ad/*", "ad[!d]*/*", "consolidated*", "*.bin.index.json", "adapter_*"]
PACKAGED_MODELS = {"demo": "demo_model", "demo:seeing": "seeing_model"}
ADAPTER_FILES = ["adapter_config.json", "adapter_model.safetensors"]
TICK_S = 1.0  # without a byte, until the progress says so
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


def resolve(
    path_or_id: str | os.PathLike[str], revision: str | None = None, progress: Sink | None = None, *, adapter: bool = False
) -> Path:
    """Find a model directory: an existing folder as it is, anything that looks like `owner/name` through the hub's local cache.

    Args:
        path_or_id: a folder, or a hub id such as "owner/name".
        revision: branch, tag or commit on the hub (EXL2 models often keep one branch per bitrate, "4.0bpw"); None means "main".
        progress: takes the events of stage "download", in bytes. While nothing arrives they say that they wait.
        adapter: what is wanted is a LoRA adapter.

    Returns:
        The folder. From the hub it is a snapshot in the hub's cache: nothing is fetched twice, and without a network a complete earlier
        download is used as it stands.

    Raises:
        ModelNotFound: no such folder; no such model or revision on the hub; no access; no network and nothing cached.
        OptionError: a revision for a local folder; as `name_of`.
    """
    text = name_of(path_or_id)
    path = Path(text).expanduser()
    if text and path.is_dir():
        if revision is not None:
            raise OptionError(f"revision is {revision!r} for the local directory {path}; expected none: revisions are for hub ids")
        return path
    if text and path.exists():
        raise ModelNotFound(f"{path}: is a file; give the directory that holds config.json and the .safetensors files")
    return _download(check_id(text), revision, progress, adapter=adapter)


def packaged(name: str) -> Path | None:
    """Directory of a model that comes with the package, by its name on the command line: `demo` or `demo:seeing`; None = no such name."""
    folder = PACKAGED_MODELS.get(name)
    return None if folder is None or Path(name).is_dir() else Path(__file__).resolve().parents[1] / folder


def name_of(path_or_id: str | os.PathLike[str]) -> str:
    """A folder or a hub id as text.

    Raises:
        OptionError: it is neither a text nor a path.
    """
    check_path("the model", path_or_id, "a directory, or a hub id such as 'owner/name'")
    return os.fspath(path_or_id)


def display_name(folder: Path, revision: str | None = None) -> str:
    """What a model directory is called for people: its last part, or "owner/name@revision" for a snapshot in the hub's cache.

    Args:
        folder: of the model. revision: that was asked for; None = the one that the cache knows for this snapshot ("main" is not written).

    Example:
        >>> display_name(Path("hub/models--owner--name/snapshots/" + "0" * 40), "4.0bpw"), display_name(Path("models/name-exl2"))
        ('owner/name@4.0bpw', 'name-exl2')
    """
    if folder.name in ("", ".."):  # ".", "..", "a/.." name the folder by its place; a link keeps its own name
        folder = folder.resolve()
    if not folder.name:  # the root of a drive
        return str(folder)
    commit, snapshots, place = folder.name, folder.parent, folder.parent.parent
    if snapshots.name != "snapshots" or not place.name.startswith("models--"):
        return folder.name
    refs = place / "refs"
    known = [str(ref.relative_to(refs)) for ref in sorted(refs.rglob("*")) if ref.is_file() and ref.read_text("utf-8").strip() == commit]
    asked = revision or ("main" if "main" in known else known[0] if known else commit)
    shown = asked[:12] if re.fullmatch("[0-9a-f]{40}", asked) else asked
    return place.name.removeprefix("models--").replace("--", "/") + ("" if shown == "main" else f"@{shown}")


def label(path_or_id: str | os.PathLike[str]) -> str:
    """The last part of a folder's path or of a hub id, for titles and default names.

    Example:
        >>> label("owner/name"), label("models/name-exl2/")
        ('name', 'name-exl2')
    """
    path = Path(name_of(path_or_id)).expanduser()
    return display_name(path) if path.name in ("", "..") else path.name


def check_id(text: str) -> str:
    """Return `text` where it can be a hub id.

    Raises:
        ModelNotFound: it cannot.
    """
    if not _HUB_ID.fullmatch(text) or ".." in text or "--" in text:
        raise ModelNotFound(
            f"{text}: no such directory, and not a hub id either; expected an existing folder or an id such as 'owner/name'"
        )
    return text


@contextmanager
def hub_errors(repo_id: str, revision: str | None = None) -> Iterator[None]:
    """Turn what the hub's client raises into a ModelNotFound that says what to do."""
    from huggingface_hub import errors

    where = f"{repo_id}{f' (revision {revision})' if revision else ''}"
    try:
        yield
    except Exl2Error:
        raise
    except errors.GatedRepoError as error:
        raise ModelNotFound(f"{where}: access is restricted; accept its terms on its hub page, then log in with `hf auth login`") from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFound(f"{where}: the hub has the model but not this revision; {_existing(repo_id)}") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"{where}: no such folder here and no such public model on the hub; check the name, or log in with `hf auth login` for a "
            "private one"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise ModelNotFound(
            f"{where}: the hub cannot be reached and the local cache has no complete copy; connect, or give a local folder"
        ) from error
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError, ValueError, *network_errors()) as error:
        raise ModelNotFound(
            f"{where}: the download failed ({type(error).__name__}: {str(error)[:200]}); nothing was loaded, try again: complete "
            "files are kept"
        ) from error


def unreachable(error: ModelNotFound) -> bool:
    """Whether a ModelNotFound of `hub_errors` says that there is no network, rather than no model."""
    from huggingface_hub import errors

    cause = error.__cause__
    if isinstance(cause, errors.OfflineModeIsEnabled):
        return True
    answered = isinstance(cause, errors.HfHubHTTPError)
    return not answered and isinstance(cause, (ConnectionError, TimeoutError, *network_errors()))


def no_config(repo_id: str, revision: str | None) -> str:
    """The message for a repository that has no config.json."""
    where = f"{repo_id}{f' (revision {revision})' if revision else ''}"
    return (
        f"{where}: no config.json at its top level, so it is not a model of this kind; EXL2 models may keep it in other revisions: "
        f"{_existing(repo_id)}"
    )


def network_errors() -> tuple[type[Exception], ...]:
    """What the client's HTTP library raises when a connection fails (older clients use requests, whose errors are OSErrors)."""
    from huggingface_hub import errors

    kind = getattr(errors, "HTTPError", None)
    return (kind,) if isinstance(kind, type) and issubclass(kind, Exception) else ()


@contextmanager
def time_limits(stop: threading.Event | None = None) -> Iterator[None]:
    """Connect and read timeouts for requests to the hub whose client sets none: those that ask for names, branches and lists of files.

    The limit is the client's own for files, $HF_HUB_DOWNLOAD_TIMEOUT seconds without a byte.

    Args:
        stop: while it is set, requests raise Interrupted before they are sent.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    session: Any = get_session()
    limit_s = constants.HF_HUB_DOWNLOAD_TIMEOUT

    def limit(request: Any) -> None:
        if stop is not None and stop.is_set():
            raise Interrupted("the download was cancelled; complete files are kept")
        given = request.extensions.get("timeout") or {}
        request.extensions["timeout"] = {kind: given.get(kind) or limit_s for kind in ("connect", "read", "write", "pool")}

    if hasattr(session, "event_hooks"):
        hooks = session.event_hooks["request"]
        for other in [hook for hook in hooks if (stopped := getattr(hook, "stop", None)) is not None and stopped.is_set()]:
            hooks.remove(other)  # of a download that was cancelled and still waits for its last bytes
        limit.stop = stop  # type: ignore[attr-defined]
        hooks.append(limit)
        try:
            yield
        finally:
            with suppress(ValueError):  # the client was closed and made anew
                hooks.remove(limit)
    else:  # clients before 1.0 use requests, one session for each thread
        adapter: Any = session.get_adapter(constants.ENDPOINT)
        send = adapter.send
        adapter.send = lambda request, **options: send(request, **{**options, "timeout": options.get("timeout") or limit_s})
        try:
            yield
        finally:
            adapter.send = send


def _existing(repo_id: str) -> str:
    """The revisions there are, for a message."""
    import huggingface_hub

    try:
        with time_limits():
            refs = huggingface_hub.HfApi().list_repo_refs(repo_id)
    except Exception:  # the message is about something else
        return "see the branch list on its page"
    names = [ref.name for ref in (*refs.branches, *refs.tags)]
    return f"it has {', '.join(names[:40])}{' ...' if len(names) > 40 else ''}"


def _download(repo_id: str, revision: str | None, progress: Sink | None, *, adapter: bool = False) -> Path:
    import huggingface_hub

    report = _Report(repo_id, progress)

    def work() -> Path:
        with time_limits(report.stop):
            return Path(
                huggingface_hub.snapshot_download(
                    repo_id,
                    revision=revision,
                    allow_patterns=ADAPTER_FILES if adapter else NEEDED_FILES,
                    ignore_patterns=None if adapter else SKIPPED_FILES,
                    tqdm_class=_bars(report),
                )
            )

    with report, hub_errors(repo_id, revision):
        folder = report.wait_for(work)
    if adapter and not (folder / ADAPTER_FILES[0]).is_file():
        raise ModelNotFound(f"{repo_id}: has no {ADAPTER_FILES[0]}; expected a LoRA adapter as PEFT saves it")
    if not adapter and not (folder / "config.json").is_file():
        raise ModelNotFound(no_config(repo_id, revision))
    return folder


class _Report:
    """Sums up what several download threads report into events of one stage.

    stop: set where the caller is interrupted; the threads then end at their next piece of data or request.
    """

    def __init__(self, name: str, sink: Sink | None) -> None:
        self._name, self._sink = name, sink or SilentSink()
        self._bars: dict[int, tuple[float, float]] = {}
        self._lock, self._start = threading.Lock(), time.monotonic()
        self._heard = self._start
        self.stop = threading.Event()

    def wait_for(self, work: Callable[[], Path]) -> Path:
        """Run `work` in a thread, so that an interrupt takes effect at once and not when a server answers."""
        future: Future[Path] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="exl2nb-download", daemon=True).start()
        try:
            while True:
                try:
                    return future.result(TICK_S)
                except TimeoutError:
                    if future.done():  # the work's own
                        raise
                with self._lock:
                    silent_s = time.monotonic() - self._heard
                    if silent_s >= TICK_S:
                        self._emit("running", f": waiting for the server, nothing received for {silent_s:.0f} s")
        except BaseException:
            self.stop.set()
            raise

    def update(self, bar: int, done: float, total: float) -> None:
        with self._lock:
            if self.stop.is_set():
                raise Interrupted("the download was cancelled; complete files are kept")
            self._bars[bar], self._heard = (done, total), time.monotonic()
            self._emit("running")

    def __enter__(self) -> _Report:
        self._emit("running")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._emit("done" if kind is None else "cancelled" if kind in (KeyboardInterrupt, Interrupted) else "error")

    def _emit(self, state: str, note: str = "") -> None:
        # the hub shows one bar for bytes received and one for bytes written: the fuller one is the truth
        done, total = max(self._bars.values(), key=lambda pair: (pair[1], pair[0]), default=(0.0, 0.0))
        elapsed = time.monotonic() - self._start
        eta = elapsed / done * (total - done) if 0 < done <= total and state == "running" else None
        detail = self._name + note
        self._sink(
            Progress(stage="download", done=done, total=total, unit="bytes", detail=detail, elapsed_s=elapsed, eta_s=eta, state=state)
        )


def _bars(report: _Report) -> Any:
    """A tqdm class that draws nothing and passes byte counts on."""
    from tqdm.auto import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            kwargs.update(file=io.StringIO(), disable=False)
            super().__init__(*args, **kwargs)

        def display(self, *args: Any, **kwargs: Any) -> None:
            return

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            if self.unit == "B":
                report.update(id(self), self.n, self.total or 0)
            return shown

    return Bar
