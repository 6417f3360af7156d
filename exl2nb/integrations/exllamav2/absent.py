"""Names of exllamav2 that are not offered: each is an error that says why, where Python would only say that there is no such attribute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn

from exl2nb.core.errors import OptionError


class NotOffered(OptionError, AttributeError):
    """An attribute or method of exllamav2 that is not offered here. `hasattr` is False for it."""


class NotOfferedImport(OptionError, ImportError):
    """A class or module of exllamav2 that is not offered here."""


def table(**reasons: str) -> dict[str, str]:
    """Names, separated by spaces, by the reason's key in ABSENCE_REASONS."""
    return {name: ABSENCE_REASONS[reason] for reason, names in reasons.items() for name in names.split()}


ABSENCE_REASONS = {
    "layers": "the model's layers are operations of one program here; use exl2nb.load(...).trace or .patch to look inside",
    "devices": "the engine places the model itself; use device=, devices= or gpu_layers= of exl2nb.load",
    "parallel": "use parallel='tensor' of exl2nb.load",
    "forward": "use a generator, or exl2nb.integrations.transformers.Exl2ForCausalLM, whose forward keeps a cache",
    "states": "keys and values are pages that all sequences share; use LLM.cache.save and LLM.cache.load to keep prompts",
    "loop": "it is a part of exllamav2's own loop; the engine of exl2nb has another one",
    "results": "read it in the results of a dynamic job",
    "vision": "ExLlamaV2VisionTower reads the settings of its tower itself",
    "tensors": "ExLlamaV2Lora holds no tensors; LLM.loras.load returns what an adapter changes",
    "sampling": "the engine draws the tokens; use a generator with Settings, or exl2nb.SamplingParams",
    "pictures": "the engine computes the embeddings when the prompt runs; use the text_alias and mm_length",
    "masks": "filters say by next() which tokens may follow; the engine makes the mask",
    "tables": "the checkpoint's layout is read by exl2nb.inspect",
}


class Documented:
    """Base of the compatibility classes.

    Attributes:
        absent: names that exllamav2's class has and this one does not, with the reasons.
    """

    absent: ClassVar[Mapping[str, str]] = {}

    def __getattr__(self, name: str) -> Any:
        """Explain a missing attribute.

        Raises:
            NotOffered: exllamav2 has it. AttributeError: it does not have it either.
        """
        kind = type(self).__name__
        for one in type(self).__mro__:
            if name in one.__dict__.get("absent", ()):
                raise NotOffered(f"{kind}.{name} is not offered here: {one.__dict__['absent'][name]}")
        raise AttributeError(f"{kind!r} object has no attribute {name!r}")


def refuse(name: str, reason: str) -> NoReturn:
    """Raise NotOffered for a function."""
    raise NotOffered(f"{name} is not offered here: {ABSENCE_REASONS[reason]}")


MODULE_NAMES = {
    "SeqTensor": "it is a part of exllamav2's own loop",
    "Intervention": "use exl2nb.load(...).patch",
    "ExLlamaV2MultimodalProjector": "ExLlamaV2VisionTower holds the projector as well",
    "model_init": "make ExLlamaV2Config, ExLlamaV2, a cache and ExLlamaV2Tokenizer as the guide shows",
}


def refuse_import(module: str, name: str) -> NoReturn:
    """Explain a missing name of a module, as a module's `__getattr__`.

    Raises:
        NotOfferedImport: exllamav2 has it. AttributeError: it does not have it either.
    """
    if name in MODULE_NAMES:
        raise NotOfferedImport(f"exllamav2.{name} is not offered here: {MODULE_NAMES[name]}")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")
