"""A draft model for speculation, from a path or from a model that is loaded already."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

from exl2nb.core.errors import OptionError
from exl2nb.core.progress import Sink
from exl2nb.generator.draft import DraftModel, check_same_tokenizer
from exl2nb.generator.engine import Engine
from exl2nb.io import hub
from exl2nb.model.loader import load_model
from exl2nb.model.model import Model
from exl2nb.tokenizer.tokenizer import Tokenizer

BUSY_S = 0.05  # what a step waits for a draft model that is in use elsewhere, before it goes on without guesses


class Loaded(Protocol):
    """What is needed of an `LLM`."""

    model: Model
    tokenizer: Tokenizer
    engine: Engine


def make_drafter(target: Loaded, draft: Loaded | str | os.PathLike[str], *, cache: str, progress: Sink | None) -> DraftModel:
    """Make the draft model of `target`.

    Args:
        target: the model that verifies. draft: a directory, a hub id, or a loaded model, which stays its owner's. cache: mode of the
        draft's KV cache. progress: takes the events of loading.

    Raises:
        TokenizerError: its tokenizer is another one; names the first difference. Otherwise as `load`.
    """
    if not isinstance(draft, (str, os.PathLike)):
        if not hasattr(draft, "engine"):
            raise OptionError(f"load: draft is {str(draft)[:80]!r}; expected a directory, a hub id or a loaded model")
        return _drafter(
            target, draft.model, draft.tokenizer, cache, run=lambda function: draft.engine.call(function, timeout_s=BUSY_S)
        )  # keeps it loaded
    folder = hub.resolve(Path(draft) if isinstance(draft, os.PathLike) else draft, progress=progress)
    tokenizer = Tokenizer.load(folder)
    model = load_model(folder, device=target.model.device, context=None, progress=progress)
    try:
        return _drafter(target, model, tokenizer, cache, on_close=model.close)
    except BaseException:
        model.close()
        raise


def _drafter(target: Loaded, model: Model, tokenizer: Tokenizer, cache: str, **options: Any) -> DraftModel:
    size = target.model.config.vocab_size
    check_same_tokenizer(target.tokenizer, tokenizer, target_size=size, draft_size=model.config.vocab_size)
    return DraftModel(
        model,
        model.cache_spec(target.engine.spec.num_tokens, mode=cache),
        context=model.context,
        vocab_size=size,
        device=model.device,
        **options,
    )
