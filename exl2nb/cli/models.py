"""What several commands need of a model: its options, where it is, loading it, and weighing its files."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exl2nb.core.options import OptionField
from exl2nb.core.progress import Sink
from exl2nb.llm.load_keywords import LOAD_OPTIONS_BY_NAME, PARALLEL_MODES

if TYPE_CHECKING:
    from exl2nb.llm.llm import LLM
    from exl2nb.model.model import Model


def locate(name: str, progress: Sink | None = None, *, revision: str | None = None) -> Path:
    """A model directory: "demo" and "demo:seeing" are packaged ones, anything else a path or a hub id."""
    from exl2nb.io.hub import resolve

    place = locate_demo(name)
    return place if isinstance(place, Path) else resolve(name, revision, progress)


def locate_demo(name: str) -> str | Path:
    """A packaged model's directory for "demo" and "demo:seeing", everything else as it is."""
    from exl2nb.io.hub import packaged

    return packaged(name) or name


def demo_directory() -> Path:
    """Directory of the packaged demo model."""
    return Path(__file__).resolve().parent.parent / "demo_model"


def add_flag(group: argparse._ActionsContainer, option: OptionField, **changes: Any) -> None:
    """Add the flag of an option; `changes` are arguments of `add_argument` that replace those that follow from the option."""
    how: dict[str, Any] = (
        {"action": "store_const", "const": True} if option.kind is bool else {"type": option.kind, "metavar": option.metavar}
    )
    group.add_argument(str(option.flag), **{"dest": option.name, "help": option.flag_help or option.help, **how, **changes})


def add_model(parser: argparse.ArgumentParser, *, cache: str = "", revision: bool = False) -> None:
    """The argument `model`; `--revision` on request; `--cache` with this default, where there is one."""
    parser.add_argument("model", help="model directory, hub id, `demo` or `demo:seeing`")
    if revision:
        parser.add_argument("--revision", help="branch, tag or commit on the hub")
    if cache:
        add_cache_option(parser, cache)


OTHER_LOAD_OPTIONS = ("cache", "context", "cache_tokens", "max_sequences", "generation_config")
"""Keywords of `exl2nb.load` that the commands add where they mean something."""
LOAD_OPTIONS = tuple(name for name, one in LOAD_OPTIONS_BY_NAME.items() if one.flag is not None and name not in OTHER_LOAD_OPTIONS)
"""Keywords of `exl2nb.load` that `add_load_options` adds."""


def add_load_options(parser: argparse.ArgumentParser, *, draft: bool = True, device: str = "auto") -> None:
    """Add the group "loading".

    Args:
        parser: of a command.
        draft: whether the command can use a draft model.
        device: the default, named in the help.
    """
    group = parser.add_argument_group("loading")
    changes = {
        "device": {"type": _device, "help": f"{LOAD_OPTIONS_BY_NAME['device'].help} (default {device})"},
        "rope_scaling": {"type": _json_object},
    }
    for name in LOAD_OPTIONS:
        if name == "devices":
            add_devices_options(group)
        elif name not in DEVICE_OPTIONS and (draft or name != "draft"):
            add_flag(group, LOAD_OPTIONS_BY_NAME[name], **changes.get(name, {}))


DEVICE_OPTIONS = ("devices", "gpu_layers", "parallel")


def add_devices_options(group: argparse._ActionsContainer) -> None:
    """--devices, --gpu-layers, --parallel."""
    changes = {"devices": {"type": _devices}, "parallel": {"choices": PARALLEL_MODES}}
    for name in DEVICE_OPTIONS:
        add_flag(group, LOAD_OPTIONS_BY_NAME[name], **changes.get(name, {}))


def _devices(text: str) -> str | list[str] | dict[str, str | int]:
    from exl2nb.core.errors import OptionError
    from exl2nb.llm.plan import read_devices

    pairs = [part.partition("=") for part in text.split(",")]
    sized = any(equals for _, equals, _ in pairs)
    try:
        if sized:
            found = {name.strip(): int(size) if size.isdecimal() else size for name, _, size in pairs}
            read_devices(found, where="--devices")
            return found
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text if text == "auto" else [name.strip() for name, _, _ in pairs]


def load_options(args: argparse.Namespace) -> dict[str, Any]:
    """What was given of `add_load_options`, as keywords of `exl2nb.load`."""
    found = {name: value for name in LOAD_OPTIONS if (value := getattr(args, name, None)) is not None}
    if "draft" in found:
        found["draft"] = locate_demo(found["draft"])
    return found


def open_llm(args: argparse.Namespace, progress: Sink | None, **options: Any) -> LLM:
    """Load the model of a command that has `add_load_options`, and the adapters of `add_lora_option`."""
    from exl2nb.llm.load import load

    llm = load(locate_demo(args.model), progress=progress, **load_options(args), **options)
    try:
        load_loras(llm, getattr(args, "lora", None), progress)
    except BaseException:
        llm.close()
        raise
    return llm


def add_lora_option(parser: argparse.ArgumentParser, text: str) -> None:
    """--lora, as often as you like."""
    parser.add_argument("--lora", action="append", type=_lora, metavar="DIR[=SCALE]", help=text)


def _lora(text: str) -> tuple[str, float]:
    path, equals, scale = text.rpartition("=")
    try:
        return (path, float(scale)) if equals else (text, 1.0)
    except ValueError:
        raise argparse.ArgumentTypeError(f"found {text[:80]!r}; expected a directory or hub id, then perhaps = and a number") from None


def load_loras(llm: LLM, adapters: list[tuple[str, float]] | None, progress: Sink | None) -> None:
    """Load what `--lora` names."""
    for path, scale in adapters or ():
        llm.loras.load(path, scale=scale, progress=progress)


def lora_options(llm: LLM) -> dict[str, Any]:
    """All adapters that were loaded, together, as an option of a request."""
    loaded = llm.loras.list()
    return {"lora": {lora.name: lora.scale for lora in loaded}} if loaded else {}


def _device(text: str) -> str:
    if not re.fullmatch("auto|cpu|cuda(:[0-9]{1,3})?", text):
        raise argparse.ArgumentTypeError(f"device is {text!r}; expected auto, cpu, cuda or cuda:N")
    return text


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'found {text[:80]!r}; expected a JSON object such as \'{{"rope_type": "yarn", "factor": 2}}\'')
    return value


def add_generation_config_option(parser: argparse.ArgumentParser) -> None:
    """--no-generation-config."""
    add_flag(parser, LOAD_OPTIONS_BY_NAME["generation_config"], const=False)


def add_cache_option(parser: argparse.ArgumentParser, default: str) -> None:
    """--cache, checked before anything is loaded."""
    add_flag(
        parser,
        LOAD_OPTIONS_BY_NAME["cache"],
        type=_cache_mode,
        default=default,
        help=f"{LOAD_OPTIONS_BY_NAME['cache'].help} (default {default})",
    )


def _cache_mode(text: str) -> str:
    from exl2nb.cache.spec import parse_mode
    from exl2nb.core.errors import OptionError

    try:
        return parse_mode(text, where="--cache")
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


@contextmanager
def loaded(directory: Path, progress: Sink | None = None, *, options: dict[str, Any] | None = None) -> Iterator[Model]:
    """A model for the length of a `with`; options: of `load_options`, device and RoPE."""
    from exl2nb.model.loader import load_model
    from exl2nb.model.rope import RopeOverride
    from exl2nb.ops.placement import pick_device

    options = options or {}
    rope = RopeOverride(**{name.removeprefix("rope_"): options.get(name) for name in LOAD_OPTIONS_BY_NAME if name.startswith("rope_")})
    model = load_model(directory, device=pick_device(options.get("device", "cpu")), rope=rope, progress=progress)
    try:
        yield model
    finally:
        model.close()


def file_bytes(directory: Path) -> int:
    """Bytes of all .safetensors files of a model."""
    return sum(path.stat().st_size for path in directory.glob("*.safetensors") if path.is_file())
