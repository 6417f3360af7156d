"""`exl2nb.evaluate`: tasks of EleutherAI's evaluation harness as one call. Imports the harness when it is called."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exl2nb.core.errors import OptionError

if TYPE_CHECKING:
    from exl2nb.llm.llm import LLM


@dataclass(frozen=True)
class Evaluation:
    """What the harness found.

    scores: for each task its metrics: "acc", "acc_norm", "exact_match", "word_perplexity" and so on. errors: the standard error of each,
    where it has one. raw: everything the harness returned.
    """

    model: str
    scores: dict[str, dict[str, float]]
    errors: dict[str, dict[str, float]]
    raw: dict[str, Any] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"model": self.model, "scores": self.scores, "errors": self.errors}

    def to_frame(self) -> Any:
        """A pandas DataFrame, one row per task and metric."""
        import pandas as pd

        return pd.DataFrame(self._rows(), columns=["task", "metric", "value", "stderr"])

    def __repr__(self) -> str:
        lines = [f"{self.model}"]
        for task, metric, value, error in self._rows():
            lines.append(f"  {task:24} {metric:20} {value:10.4f}" + ("" if error is None else f" ± {error:.4f}"))
        return "\n".join(lines)

    def _rows(self) -> list[tuple[str, str, float, float | None]]:
        return [
            (task, name, value, self.errors[task].get(name)) for task, metrics in self.scores.items() for name, value in metrics.items()
        ]


def evaluate(
    model: LLM | str | os.PathLike[str],
    tasks: str | Sequence[Any],
    *,
    num_fewshot: int | None = None,
    limit: int | float | None = None,
    include: str | os.PathLike[str] | None = None,
    apply_chat_template: bool = False,
    **options: Any,
) -> Evaluation:
    """Run tasks of the evaluation harness on a model.

    Args:
        model: a loaded model, a directory, a hub id, or "demo".
        tasks: names such as "hellaswag", or the harness's task dicts. Public tasks fetch their data from the hub.
        num_fewshot: examples before each question; None = what the task says.
        limit: questions of each task, or their share below 1.
        include: folder with tasks of your own (YAML).
        apply_chat_template: questions as the user's messages.
        options: of `exl2nb.load`, for a model that is loaded here; it is closed afterwards.

    Raises:
        OptionError: no such task, or an option that is not known. MissingDependency: the harness is not installed. Otherwise as
        `exl2nb.load`.
    """
    from exl2nb.integrations.lm_eval import Exl2LM

    simple_evaluate = import_module("lm_eval.evaluator").simple_evaluate
    wanted: list[Any] = [tasks] if isinstance(tasks, (str, dict)) else list(tasks)

    manager = _tasks(wanted, None if include is None else str(Path(include)))
    if missing := [task for task in wanted if not _known(task, manager)]:
        raise OptionError(
            f"evaluate: no task {missing[0]!r}; the harness has {len(manager.all_tasks)}, see `lm_eval ls tasks`, or give include="
        )
    made: Any = Exl2LM  # registering hides its type
    lm = made(model, **options) if isinstance(model, (str, os.PathLike)) else made(llm=model, **options)
    state = random.getstate()
    try:
        # the harness would seed the generators of random, numpy and torch, which belong to the caller, and uses the first all the same
        seeds: Any = {"random_seed": None, "numpy_random_seed": None, "torch_random_seed": None}
        raw = simple_evaluate(
            lm, tasks=wanted, num_fewshot=num_fewshot, limit=limit, task_manager=manager, log_samples=False, bootstrap_iters=1000,
            apply_chat_template=apply_chat_template, **seeds,
        )  # fmt: skip
        name = lm.llm.name
    finally:
        random.setstate(state)
        lm.close()
    assert raw is not None, "one process"
    results: dict[str, Any] = dict(raw.get("results", {}))
    scores: dict[str, dict[str, float]] = {}
    errors: dict[str, dict[str, float]] = {}
    for task, metrics in results.items():
        scores[task], errors[task] = {}, {}
        for key, value in metrics.items():
            metric = key.partition(",")[0]
            if "," not in key or isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            if metric.endswith("_stderr"):
                errors[task][metric.removesuffix("_stderr")] = float(value)
            else:
                scores[task][metric] = float(value)
    return Evaluation(model=name, scores=scores, errors=errors, raw=dict(raw))


def _known(task: Any, manager: Any) -> bool:
    return not isinstance(task, str) or bool(manager.match_tasks([task]))


def _tasks(wanted: Sequence[Any], include: str | None) -> Any:
    """The tasks of a folder, and the harness's own where they are needed: looking through those takes seconds."""
    TaskManager = import_module("lm_eval.tasks").TaskManager
    if include is not None:
        manager = TaskManager(include_path=include, include_defaults=False)
        if all(_known(task, manager) for task in wanted):
            return manager
    return TaskManager(include_path=include)
