"""Tiny models with real tokenizers, which say what a test tells them to."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import exl2nb as ex
from exl2nb.tokenizer.tokenizer import Tokenizer

from .families import EXTRACTED, TEMPLATES, model_config, tokenizer_folder

PADDING_ROWS = 5  # of the embedding beyond the tokenizer, as real models have


@dataclass
class Scripted:
    """A loaded model of one family, and how its answers are forced."""

    name: str
    llm: Any
    template: str | None
    end: int

    def ids(self, text: str) -> list[int]:
        """The tokens that the model would write for a text, and the end of its turn."""
        return [*self.llm.tokenizer.encode(text, add_special=False), self.end]

    def chat(self, messages: Any, answer: str, **options: Any) -> Any:
        """Chat; the model answers with `answer` and ends its turn. A token that the mask forbids is an error."""
        return self.llm.chat(messages, **self._options(answer, options))

    def deltas(self, messages: Any, answer: str, **options: Any) -> list[Any]:
        """The same, streamed."""
        with self.llm.chat(messages, stream=True, **self._options(answer, options)) as handle:
            return list(handle.deltas())

    def _options(self, answer: str, options: dict[str, Any]) -> dict[str, Any]:
        ids = self.ids(answer)
        if self.template is not None:
            options.setdefault("template", self.template)
        return {"max_tokens": len(ids) + 8, "post_sampling": lambda draw: ids[draw.index] if draw.index < len(ids) else None, **options}


def make_model(folder: Any, name: str) -> Any:
    """Write a tiny random model with the tokenizer of a family."""
    source = tokenizer_folder(name)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / file, folder / file)
    tokenizer = Tokenizer.load(folder)
    size = tokenizer.highest_id + 1 + PADDING_ROWS
    (folder / "config.json").write_text(model_config(size, sorted(tokenizer.eos_ids)))
    torch.manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (size, 32),
        "model.norm.weight": (32,),
        "model.layers.0.input_layernorm.weight": (32,),
        "model.layers.0.post_attention_layernorm.weight": (32,),
        "model.layers.0.self_attn.q_proj.weight": (32, 32),
        "model.layers.0.self_attn.k_proj.weight": (16, 32),
        "model.layers.0.self_attn.v_proj.weight": (16, 32),
        "model.layers.0.self_attn.o_proj.weight": (32, 32),
        "model.layers.0.mlp.gate_proj.weight": (32, 32),
        "model.layers.0.mlp.up_proj.weight": (32, 32),
        "model.layers.0.mlp.down_proj.weight": (32, 32),
    }
    save_file({key: (torch.randn(shape) * 0.1).half() for key, shape in shapes.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session", params=EXTRACTED)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Each family in turn."""
    folder = make_model(tmp_path_factory.mktemp(request.param), request.param)
    with ex.load(folder, device="cpu", progress=None) as llm:
        yield Scripted(request.param, llm, TEMPLATES.get(request.param), min(llm.tokenizer.eos_ids))
