"""What is worth knowing of a model before loading it: sizes, what is unusual, requests that are not honoured. Reads no weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exl2nb.core.errors import TokenizerError
from exl2nb.quant.gptq_format import GptqSpec

if TYPE_CHECKING:
    from exl2nb.model.config import ModelConfig

SIZE_FIELDS = {
    "context": "max_position_embeddings",
    "vocabulary": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "head_dim": "head_dim",
}  # name -> field of ModelConfig


@dataclass(frozen=True)
class Facts:
    """Words about a model.

    sizes: name -> number (context, vocabulary, hidden size, heads ...); empty where the architecture is unknown. unusual: what sets it
    apart from a plain Llama, one short phrase each. chat_templates: names of its chat templates. quantization: how its weights were
    quantised, as its settings say; empty for a plain model. notes: requests of the files that are not honoured.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    unusual: tuple[str, ...] = ()
    chat_templates: tuple[str, ...] = ()
    quantization: str = ""
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "sizes": dict(self.sizes),
            "unusual": list(self.unusual),
            "chat_templates": list(self.chat_templates),
            "quantization": self.quantization,
            "notes": list(self.notes),
        }


def facts_of(directory: Path, raw: Mapping[str, Any], config: ModelConfig | None) -> Facts:
    """Collect them.

    Args:
        raw: the content of config.json, `quantization_config` completed.
        config: the same as the architecture reads it, None where that is unknown.
    """
    templates, notes = _template_facts(directory)
    return Facts(
        sizes={name: getattr(config, field) for name, field in SIZE_FIELDS.items()} if config else {},
        unusual=tuple(unusual_features(config)) if config else (),
        chat_templates=templates,
        quantization=_quantization_facts(raw.get("quantization_config") or {}, config),
        notes=(*remote_code(directory, raw), *notes),
    )


def remote_code(directory: Path, raw: Mapping[str, Any]) -> tuple[str, ...]:
    """A note for every file that names code of the repository (`auto_map`): such code is never run."""
    from exl2nb.core.files import read_object

    try:
        tokenizer = read_object(directory / "tokenizer_config.json")
    except TokenizerError:  # loading the tokenizer reports it
        tokenizer = {}
    found = []
    for file, content in (("config.json", raw), ("tokenizer_config.json", tokenizer)):
        asked = content.get("auto_map")
        if asked:
            classes = ", ".join(sorted(map(str, asked))) if isinstance(asked, Mapping) else str(asked)
            found.append(f"{file} names code of the repository (auto_map: {classes[:80]}): it is never run; exl2nb has its own")
    return tuple(found)


def unusual_features(config: ModelConfig) -> list[str]:
    """What sets a model apart from a plain Llama."""
    found = [*_attention_facts(config), *_rope_facts(config), *_block_facts(config), *_embedding_head_facts(config)]
    if config.moe is not None:
        moe, sparse = config.moe, sum(config.moe.layers)
        shared = " and a shared one" if moe.shared_size else ""
        layers = "" if sparse == config.num_layers else f" in {sparse} of {config.num_layers} layers"
        found.insert(0, f"mixture of experts: {moe.top_k} of {moe.num_experts} per token{shared}{layers}")
    return found


def _attention_facts(config: ModelConfig) -> list[str]:
    found = []
    for window, count in sorted(Counter(w for w in config.windows if w).items()):
        layers = "all layers" if count == config.num_layers else f"{count} of {config.num_layers} layers"
        found.append(f"sliding window of {window} tokens on {layers}")
    if config.attention_softcap:
        found.append(f"attention softcap {config.attention_softcap:g}")
    if config.qk_norm:
        found.append("norms on queries and keys" + (" (all heads together)" if config.qk_norm == "full" else ""))
    if config.clip_qkv:
        found.append(f"queries, keys and values clipped to {config.clip_qkv:g}")
    if abs(config.attention_scale * config.head_dim**0.5 - 1) > 1e-3:
        found.append(f"attention scale {config.attention_scale:g}")
    return found


def _rope_facts(config: ModelConfig) -> list[str]:
    if config.learned_positions:
        return ["learned positions instead of RoPE"]
    found, rope = [], config.rope
    if rope.type != "default":
        factor = f", factor {rope.factor:g}" if rope.factor != 1 else ""
        start = f" from {rope.original_positions}" if rope.original_positions != rope.max_positions else ""
        found.append(f"RoPE type {rope.type}{factor}{start}")
    if rope.rotary_dim != config.head_dim:
        found.append(f"RoPE on {rope.rotary_dim} of {config.head_dim} dimensions")
    kinds = Counter(config.rope_kinds)
    if kinds["none"]:
        found.append(f"no RoPE on {kinds['none']} of {config.num_layers} layers")
    if kinds["local"] and config.local_rope:
        found.append(f"RoPE base {config.local_rope.theta:g} on {kinds['local']} local layers, {config.rope.theta:g} on the others")
    if config.interleaved:
        found.append("interleaved RoPE")
    if config.context_limit:
        found.append(f"context limited to {config.context_limit} tokens")
    return found


def _block_facts(config: ModelConfig) -> list[str]:
    biases = [name for name, has in (("q, k, v", config.qkv_bias), ("o", config.o_bias), ("MLP", config.mlp_bias)) if has]
    parts = {
        "LayerNorm": config.norm == "layer",
        "norms after attention and MLP" + ("" if config.pre_norm else " only"): config.post_norm,
        "attention and MLP in parallel": config.parallel,
        "ungated MLP": not config.gated,
        f"activation {config.activation}": config.activation != "silu",
        f"biases on {', '.join(biases)}": bool(biases),
        f"residual scale {config.residual_scale:g}": config.residual_scale != 1,
    }
    return [text for text, holds in parts.items() if holds]


def _embedding_head_facts(config: ModelConfig) -> list[str]:
    parts = {
        "head tied to the embedding": config.tie_word_embeddings,
        f"embedding scale {config.embed_scale:g}": config.embed_scale != 1,
        f"logit scale {config.logit_scale:g}": config.logit_scale != 1,
        f"logit softcap {config.logit_softcap:g}": bool(config.logit_softcap),
    }
    return [text for text, holds in parts.items() if holds]


def _quantization_facts(block: Mapping[str, Any], config: ModelConfig | None) -> str:
    method = block.get("quant_method")
    if method == "exl2":
        head = block.get("head_bits")
        return "EXL2" + (f", head at {head} bits" if isinstance(head, (int, float)) else "")
    if method != "gptq":
        return ""
    spec = (config.gptq if config else None) or GptqSpec()
    size = {None: "group size not stated", -1: "one group per column"}.get(spec.group_size, f"groups of {spec.group_size}")
    words = [f"GPTQ{f' {spec.bits}-bit' if spec.bits else ''}", size]
    words += ["symmetric" if spec.sym else "asymmetric"] if spec.sym is not None else []
    words += ["act-order"] if spec.act_order else []
    words += [f"format {spec.checkpoint_format}"] + (["some matrices differ"] if spec.overrides else [])
    return ", ".join(words) + (f", by {spec.quantizer.strip(chr(91) + chr(93) + chr(39))}" if spec.quantizer else "")


def _template_facts(directory: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the chat templates, and a note where they cannot be read."""
    from exl2nb.core.files import read_object
    from exl2nb.tokenizer.template import ChatTemplates

    try:
        found = ChatTemplates.load(directory, read_object(directory / "tokenizer_config.json"))
    except TokenizerError as error:
        return (), (str(error),)
    return tuple(sorted(found.templates)), ()
