"""Converted models to the hub and back: one revision per bitrate, a model card that says what was measured. Knows nothing of conversion."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exl2nb.converter.result import Conversion
from exl2nb.core.errors import ConversionError, FormatError, ModelNotFound, OptionError
from exl2nb.core.progress import Meter, Sink
from exl2nb.io import hub
from exl2nb.io.hf_config import read_json

Model = Conversion | str | os.PathLike[str]
_REPORT_FILE = "conversion.json"


@dataclass(frozen=True)
class Published:
    """One revision on the hub."""

    repo_id: str
    revision: str
    url: str


def push(
    models: Model | Sequence[Model],
    repo_id: str,
    *,
    revisions: Sequence[str] | None = None,
    source: str | None = None,
    private: bool = False,
    progress: Sink | None = None,
) -> list[Published]:
    """Upload converted models, each as a revision of one repository, with a model card in every revision and on its main page.

    Args:
        models: conversions, or their directories.
        repo_id: "owner/name"; made where it does not exist. You must be logged in (`hf auth login`).
        revisions: branch names; None = "4.0bpw" and so on, by bitrate.
        source: hub id of the model that was converted, for the card.
        private: whether a new repository is.
        progress: takes the events of stage "push".

    Returns:
        What was uploaded. Files that the hub has already are not sent again, so an interrupted push may be repeated.

    Raises:
        OptionError: no models, names that do not fit them. FormatError: a directory that is no conversion. ConversionError: the hub
        refuses; says why.
    """
    listed: list[Any] = list(models) if isinstance(models, (list, tuple)) else [models]
    folders = [model.path if isinstance(model, Conversion) else Path(model) for model in listed]
    hub.check_id(repo_id)
    if not folders:
        raise OptionError("push: found no models, expected at least one")
    reports = [_read_report(folder) for folder in folders]
    by_rate = (f"{report['target_bpw']:.2f}".rstrip("0").ljust(3, "0") + "bpw" for report in reports)
    names = list(revisions if revisions is not None else by_rate)
    if len(names) != len(folders) or len(set(names)) != len(names):
        raise OptionError(f"push: revisions are {names} for {len(folders)} models; expected a name of its own for each")
    text = card(repo_id, reports, names, source=source).encode()
    import huggingface_hub

    api, made = huggingface_hub.HfApi(), []
    with _hub_errors(repo_id), Meter("push", total=len(folders) + 1, unit="revisions", sink=progress) as meter:
        api.create_repo(repo_id, private=private, exist_ok=True)
        readme = huggingface_hub.CommitOperationAdd("README.md", text)
        api.create_commit(repo_id, [readme], commit_message="Model card")
        meter.step(detail="model card")
        for folder, name, report in zip(folders, names, reports):
            api.create_branch(repo_id, branch=name, exist_ok=True)
            files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name != "README.md" and path.name[0] != "."]
            operations = [huggingface_hub.CommitOperationAdd(path.name, path) for path in files]
            operations.append(huggingface_hub.CommitOperationAdd("README.md", text))
            api.create_commit(repo_id, operations, commit_message=f"EXL2 at {report['bpw']:.4f} bits per weight", revision=name)
            made.append(Published(repo_id, name, f"{api.endpoint}/{repo_id}/tree/{name}"))
            meter.step(detail=name)
    return made


def pull(repo_id: str, revision: str | None = None, *, progress: Sink | None = None) -> Path:
    """Download one revision into the hub's cache: what `load(repo_id, revision=...)` does first.

    Returns:
        The folder.

    Raises:
        ModelNotFound: no such repository or revision; the message lists those there are.
    """
    return hub.resolve(repo_id, revision, progress)


def card(repo_id: str, reports: Sequence[dict[str, Any]], revisions: Sequence[str], *, source: str | None = None) -> str:
    """The model card of a repository: front matter, table of revisions, how to load one, how they were made."""
    base = [f"base_model: {source}", "base_model_relation: quantized"] if source else []
    front = ["---", *base, "library_name: exl2nb", "tags:", "- exl2", "- quantized", "---"]
    lines = [
        "| revision | bits per weight | head | bytes | KL to the source | top-1 | perplexity (source) |",
        "|---|---|---|---|---|---|---|",
    ]
    for report, name in zip(reports, revisions):
        quality = report.get("quality")
        judged = "not measured | | "
        if quality:
            low, high = quality["kl_low"], quality["kl_high"]
            spread = "" if low is None else f" ({low:.5f} to {high:.5f})"
            judged = f"{quality['kl']:.5f}{spread} | {100 * quality['top1']:.2f} % | {quality['ppl']:.3f} ({quality['source_ppl']:.3f})"
        lines.append(f"| `{name}` | {report['bpw']:.4f} | {report['matrices'][-1]['bpw']:.2f} | {report['bytes']:,} | {judged} |")
    calibration = reports[0]["calibration"]
    origin = f"[{source}](https://huggingface.co/{source})" if source else "its source model"
    return "\n".join(
        [
            *front,
            "",
            f"# {repo_id.rpartition('/')[2]}",
            "",
            f"EXL2 quantisations of {origin}, one per revision, made with exl2nb. They load in exl2nb and in exllamav2.",
            "",
            *lines,
            "",
            "KL in nats per token with its 95 % confidence interval, on rows of the calibration text that were not calibrated on.",
            f"Calibration: {calibration['rows']} rows of {calibration['length']} tokens, {calibration['dataset']}.",
            "",
            "```python",
            "import exl2nb as ex",
            "",
            f'llm = ex.load("{repo_id}", revision="{revisions[0]}")',
            "```",
            "",
            f"Made by `{_convert_command(reports[0], source)}`; every revision has its bits per matrix in `{_REPORT_FILE}`.",
            "",
        ]
    )


def _convert_command(report: dict[str, Any], source: str | None) -> str:
    """The command line that repeats the conversion of a report."""
    asked, calibration = dict(report.get("asked") or {"bpw": report["target_bpw"]}), report["calibration"]
    words = ["exl2nb convert", source or "SOURCE", "OUT"]
    for name, rule in dict(asked.pop("overrides", {})).items():
        low, high = rule if isinstance(rule, (list, tuple)) and len(rule) == 2 else (rule, rule)
        if isinstance(low, (int, float)) and isinstance(high, (int, float)):
            words.append(f'--override "{name}={low:g}{f"-{high:g}" if high != low else ""}"')
    words += ["--frozen CHOICES"] if asked.pop("frozen", None) else []
    words += [
        f"--{name.replace('_', '-')} {value:g}" if isinstance(value, float) else f"--{name.replace('_', '-')} {value}"
        for name, value in asked.items()
    ]
    return " ".join([*words, f"--rows {calibration['rows']} --length {calibration['length']}"])


def _read_report(folder: Path) -> dict[str, Any]:
    if not (folder / _REPORT_FILE).is_file():
        raise FormatError(f"{folder}: found no {_REPORT_FILE}, expected a directory that a conversion made; convert the model again")
    found = read_json(folder / _REPORT_FILE, error=FormatError)
    fields = ("target_bpw", "bpw", "bytes", "calibration", "matrices")
    if any(name not in found for name in fields) or not isinstance(found["matrices"], list) or not found["matrices"]:
        raise FormatError(
            f"{folder / _REPORT_FILE}: found {', '.join(found)[:120]}, expected a conversion's report; convert the model again"
        )
    return found


@contextmanager
def _hub_errors(repo_id: str) -> Any:
    from huggingface_hub import errors

    try:
        yield
    except (errors.HfHubHTTPError, errors.OfflineModeIsEnabled, OSError, ValueError, *hub.network_errors()) as error:
        if isinstance(error, ModelNotFound):
            raise
        raise ConversionError(
            f"push to {repo_id}: {str(error).strip().splitlines()[0][:200]}; log in with `hf auth login` and an account that may write "
            "there, then push again: what has arrived is not sent twice"
        ) from error
