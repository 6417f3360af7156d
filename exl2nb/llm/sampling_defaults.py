"""The sampling defaults that generation_config.json recommends, and how they complete the options of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exl2nb.core.errors import OptionError
from exl2nb.core.files import read_object
from exl2nb.core.log import warn
from exl2nb.core.options import check_flag, shown
from exl2nb.sampling.defaults import CHAT_DEFAULTS, DEFAULT_NAMES, LIBRARY_SOURCE, NEEDS_DRAW, SamplingDefaults

DEFAULTS_FILE = "generation_config.json"


def read_defaults(folder: Path) -> SamplingDefaults:
    """Read the sampling defaults of a model directory.

    Only keys that the file holds count, as in vLLM. `"do_sample": false` means greedy. A value that cannot be used gives a RuntimeWarning
    with file, key and value, and this key is ignored: one wrong number should not keep a model from loading.

    Returns:
        The values of generation_config.json, or `CHAT_DEFAULTS` if there is no such file or it names none of them.

    Raises:
        TokenizerError: the file is not a JSON object.
    """
    path = folder / DEFAULTS_FILE
    config = read_object(path)
    values: dict[str, Any] = {}
    for name in DEFAULT_NAMES:
        value = config.get(name)
        if name == "top_k" and type(value) is int and value == -1:
            value = 0  # vLLM writes -1 for all tokens
        if value is None:
            continue
        one: dict[str, Any] = {name: value}
        try:
            SamplingDefaults(**one)
        except OptionError as error:
            warn(f"{path}: {error}; this key is ignored")
        else:
            values |= one
    sampled = config.get("do_sample")
    if not isinstance(sampled, (bool, type(None))):
        warn(f"{path}: do_sample is {shown(sampled)}; expected true or false; this key is ignored")
    if sampled is False:
        values["temperature"] = 0.0
    if values.get("temperature") == 0:
        values = {name: value for name, value in values.items() if name == "temperature" or name not in NEEDS_DRAW}
    return SamplingDefaults(**values, source=DEFAULTS_FILE) if values else CHAT_DEFAULTS


def with_defaults(
    options: Mapping[str, Any], defaults: SamplingDefaults, *, where: str, fallback: SamplingDefaults = CHAT_DEFAULTS
) -> dict[str, Any]:
    """Complete the options of a request by sampling defaults.

    Args:
        options: options of the request. An option that is given always wins. `generation_config=False` among them leaves out the values
            of generation_config.json for this request.
        defaults: sampling defaults of the model.
        where: the public call, for messages.
        fallback: defaults in place of the library's own, and for `generation_config=False`.

    Returns:
        Options of a `Request`; `sampling_defaults` among them holds the values that were added.

    Raises:
        OptionError: generation_config is not True or False.
    """
    options = dict(options)
    wanted = options.pop("generation_config", True)
    check_flag(f"{where}: generation_config", wanted)
    if defaults.source == LIBRARY_SOURCE or (defaults.source == DEFAULTS_FILE and not wanted):
        defaults = fallback
    added = defaults.beside(options)
    return {**options, **added.values, "sampling_defaults": added}
