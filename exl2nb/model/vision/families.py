"""Which tower, projector, picture rules and marks each class of model has: one function per class, from its config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from exl2nb.core.errors import ConfigError
from exl2nb.core.options import Registry
from exl2nb.model.config_fields import REQUIRED_FIELD, Fields, Keys, check_keys, known_words
from exl2nb.model.vision.rules import BILINEAR_FILTER, HALF_PER_CHANNEL, Rules, read_rules
from exl2nb.model.vision.tower import ACTIVATION_FUNCTIONS, BlockNames, Grid, TowerConfig, Weights, linear, norm

Project = Callable[[Weights, Sequence[Tensor], Grid], "Features"]


@dataclass(frozen=True, eq=False)
class Features:
    """What a picture becomes. rows: `(n, H)`, one per token. deep: `(n, H)` each, added to the stream after layer 0, 1, ..."""

    rows: Tensor
    deep: tuple[Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        """Memory of all of them."""
        return sum(part.nbytes for part in (self.rows, *self.deep))


@dataclass(frozen=True, kw_only=True)
class Marks:
    """How pictures stand in a prompt, as token ids.

    image, video: what a picture's rows replace.
    mark: what the chat template writes for a picture, where that is not `image`. style: "plain"
    (the id, repeated), "framed" (between two blank lines and the ids `mark` and `end`), "rows" (`rest` after each row of patches, `end`
    after the last), "frames" (a video as frames between `start` and `end`, each after its time).
    """

    image: int
    video: int | None = None
    mark: int | None = None
    start: int | None = None
    end: int | None = None
    rest: int | None = None
    style: str = "plain"


@dataclass(frozen=True, kw_only=True)
class Vision:
    """One class's way of seeing.

    tower, project: pixels to features. merge: patches per token and side. rules, video_rules: what pictures and videos are made into; None:
    no videos. marks: see there. seconds: steps of time per second of a video in M-RoPE; 0 = a step per frame.
    """

    tower: TowerConfig
    project: Project
    merge: int
    rules: Rules
    marks: Marks
    video_rules: Rules | None = None
    seconds: float = 0.0
    added: int = 0

    def tokens(self, grid: Grid) -> int:
        """Rows that a grid of patches becomes."""
        return grid[0] * (grid[1] // self.merge) * (grid[2] // self.merge) + self.added


VISION_FAMILIES: Registry[Callable[[Fields, Path], Vision]] = Registry("class of vision model", ConfigError)

# What is known about the keys of `vision_config`, by the class that the model_type names. Sizes that the tensors show are listed as
# ignored: a wrong one is found when the tensors are loaded.
_ROPE_KEYS = Keys(used=known_words("rope_theta"), neutral={"rope_type": ("default", "axial"), "type": ("default", "axial")})
_SIGLIP_KEYS = Keys(
    used=known_words("hidden_size num_hidden_layers num_attention_heads image_size patch_size hidden_act layer_norm_eps"),
    neutral={"num_channels": (3,)},
    ignored=known_words("intermediate_size projection_dim vocab_size vision_use_head"),
)
_QWEN2_VISION = Keys(
    used=known_words("depth embed_dim hidden_size num_heads hidden_act patch_size temporal_patch_size spatial_merge_size rope_theta"),
    neutral={"in_channels": (3,), "in_chans": (3,)},
    ignored=known_words("mlp_ratio intermediate_size out_hidden_size num_position_embeddings spatial_patch_size"),
    nested={"rope_parameters": _ROPE_KEYS},
)
VISION_KEYS = {
    "clip_vision_model": _SIGLIP_KEYS,
    "siglip_vision_model": _SIGLIP_KEYS,
    "pixtral": Keys(
        used=known_words("hidden_size num_hidden_layers num_attention_heads image_size patch_size hidden_act rope_theta head_dim"),
        neutral={"num_channels": (3,)},
        ignored=known_words("intermediate_size vocab_size"),
        nested={"rope_parameters": _ROPE_KEYS},
    ),
    "qwen2_vl": _QWEN2_VISION,
    "qwen2_5_vl": replace(_QWEN2_VISION, used=_QWEN2_VISION.used | known_words("fullatt_block_indexes window_size tokens_per_second")),
    "qwen3_vl": replace(_QWEN2_VISION, used=_QWEN2_VISION.used | known_words("deepstack_visual_indexes")),
}

IMAGE_SIDE_RANGE = {"low": 1, "high": 1 << 16}


def _read_size(fields: Fields, key: str, default: Any = REQUIRED_FIELD, high: int = 1 << 16) -> int:
    return fields.integer(key, low=1, high=high, default=default)


def _activation(fields: Fields, default: str, key: str = "hidden_act") -> str:
    name = fields.text(key, default=default)
    if name not in ACTIVATION_FUNCTIONS:
        raise fields.refuse(key, name, f"one of {', '.join(sorted(ACTIVATION_FUNCTIONS))}")
    return name


def _check_heads(fields: Fields, width: int, heads: int, unit: int = 2) -> None:
    if width % heads or width // heads % unit:
        raise fields.refuse("hidden_size", width, f"a multiple of {heads} heads, each of a multiple of {unit}")


def _vision_config(fields: Fields, *kinds: str) -> tuple[Fields, str]:
    """The encoder's keys, checked, and which of `kinds` its `model_type` names; the first one if the key is absent.

    Raises:
        ConfigError: The encoder is of another type, or has a key that changes the result and is not implemented.
    """
    found = fields.child("vision_config")
    if found is None:
        raise ConfigError(f"{fields.where}: key 'vision_config' is missing; this model's tower needs it")
    kind = found.text("model_type", default=kinds[0]).removesuffix("_vision")  # Qwen writes both qwen2_vl and qwen2_vl_vision
    if kind not in kinds:
        raise found.refuse("model_type", kind, " or ".join(kinds))
    check_keys(found, VISION_KEYS[kind], f"a vision encoder of type {kind}")
    return found, kind


def _read_token_id(fields: Fields, *keys: str, default: Any = REQUIRED_FIELD) -> int:
    """A token id under the first of these keys that is there."""
    for key in keys[:-1]:
        if fields.raw.get(key) is not None:
            return fields.integer(key, low=0, high=1 << 22)
    return fields.integer(keys[-1], low=0, high=1 << 22, default=default)


def _read_theta(fields: Fields) -> float:
    own = fields.child("rope_parameters") or fields
    return own.number("rope_theta", low=1.001, high=1e12, default=None) or fields.number(
        "rope_theta", low=1.001, high=1e12, default=10000.0
    )


# ---- CLIP, SigLIP, Pixtral: towers under `vision_tower`, behind several classes

VIT_NAMES = BlockNames(
    layer="vision_tower.encoder.layers.{}",
    norm1="layer_norm1",
    norm2="layer_norm2",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.out_proj",
    up=("mlp.fc1",),
    down="mlp.fc2",
)
PIXTRAL_NAMES = BlockNames(
    layer="vision_tower.transformer.layers.{}",
    norm1="attention_norm",
    norm2="ffn_norm",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    out="attention.o_proj",
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
)


def _read_vit(vision: Fields, *, clip: bool) -> TowerConfig:
    width, heads = (
        _read_size(vision, "hidden_size", 1024 if clip else 768),
        _read_size(vision, "num_attention_heads", 16 if clip else 12, 1024),
    )
    _check_heads(vision, width, heads, 1)
    size, patch = _read_size(vision, "image_size", 336 if clip else 224, 8192), _read_size(vision, "patch_size", 14 if clip else 16, 256)
    if size < patch:
        raise vision.refuse("image_size", size, f"at least patch_size {patch}")
    return TowerConfig(
        layers=_read_size(vision, "num_hidden_layers", 24 if clip else 12, 1024),
        width=width,
        heads=heads,
        patch=patch,
        names=VIT_NAMES,
        embed="vision_tower.embeddings.patch_embedding",
        eps=vision.number("layer_norm_eps", low=0.0, high=1.0, default=1e-5 if clip else 1e-6),
        activation=_activation(vision, "quick_gelu" if clip else "gelu_pytorch_tanh"),
        positions="table",
        position_name="vision_tower.embeddings.position_embedding",
        class_token="vision_tower.embeddings.class_embedding" if clip else "",
        norm_before="vision_tower.pre_layrnorm" if clip else "",
    )


def _read_pixtral(vision: Fields) -> TowerConfig:
    width, heads = _read_size(vision, "hidden_size", 1024), _read_size(vision, "num_attention_heads", 16, 1024)
    _check_heads(vision, width, heads, 4)
    if vision.integer("head_dim", low=1, high=1 << 16, default=width // heads) != width // heads:
        raise vision.refuse("head_dim", vision.raw["head_dim"], f"hidden_size over num_attention_heads, {width // heads}")
    return TowerConfig(
        layers=_read_size(vision, "num_hidden_layers", 24, 1024),
        width=width,
        heads=heads,
        patch=_read_size(vision, "patch_size", 16, 256),
        names=PIXTRAL_NAMES,
        embed="vision_tower.patch_conv",
        norm="rms",
        eps=1e-5,
        activation=_activation(vision, "gelu"),
        rope="alternate",
        theta=_read_theta(vision),
        norm_before="vision_tower.ln_pre",
    )


def _feature_layers(fields: Fields, layers: int, default: int) -> tuple[int, ...]:
    """`vision_feature_layer` counted from 0, the embedding, to `layers`."""
    raw = fields.raw.get("vision_feature_layer", default)
    given = raw if isinstance(raw, list) else [raw]
    if not given or any(type(i) is not int or not -layers - 1 <= i <= layers for i in given):
        raise fields.refuse("vision_feature_layer", raw, f"layers from {-layers - 1} to {layers}")
    return tuple(i % (layers + 1) for i in given)


def _square_rules(vision: Fields, tower: TowerConfig, **changes: Any) -> Rules:
    side = _read_size(vision, "image_size", 224, 8192)
    return Rules(fit="exact", unit=tower.patch, height=side, width=side, **changes)


def _check_square(rules: Rules, vision: Fields, where: str) -> None:
    side = _read_size(vision, "image_size", 224, 8192)
    if (rules.width, rules.height) != (side, side):
        raise ConfigError(f"{where}: pictures become {rules.width}x{rules.height} pixels; expected image_size {side} of the tower, squared")


def _project_rows(weights: Weights, x: Tensor, activation: str) -> Tensor:
    inner = ACTIVATION_FUNCTIONS[activation](linear(weights, "multi_modal_projector.linear_1", x))
    return linear(weights, "multi_modal_projector.linear_2", inner)


@VISION_FAMILIES.register("LlavaForConditionalGeneration")
def llava(fields: Fields, directory: Path) -> Vision:
    """Llava: a CLIP or SigLIP tower, one token per patch. Pixtral: its own tower, a mark after each row of patches."""
    vision, kind = _vision_config(fields, "clip_vision_model", "siglip_vision_model", "pixtral")
    activation = _activation(fields, "gelu", "projector_hidden_act")
    image = _read_token_id(fields, "image_token_id", "image_token_index", default=32000)
    given = read_rules(directory)
    if kind == "pixtral":
        tower = _read_pixtral(vision)
        tower = replace(tower, taken=_feature_layers(fields, tower.layers, -1))
        longest = _read_size(vision, "image_size", 1024, 8192)
        rules = Rules(fit="longest", unit=tower.patch, longest=longest).read(given)
        marks = Marks(image=image, style="rows")
        return Vision(
            tower=tower,
            project=lambda w, x, grid: Features(_project_rows(w, torch.cat([*x], -1), activation)),
            merge=1,
            rules=rules,
            marks=marks,
        )
    clip = kind == "clip_vision_model"
    tower = _read_vit(vision, clip=clip)
    tower = replace(tower, taken=_feature_layers(fields, tower.layers, -2))
    strategy = fields.text("vision_feature_select_strategy", default="default")
    if strategy not in ("default", "full"):
        raise fields.refuse("vision_feature_select_strategy", strategy, "default or full")
    first = 1 if strategy == "default" else 0
    rules = _square_rules(vision, tower).read(given)
    _check_square(rules, vision, given.where if given else str(directory))
    return Vision(
        tower=tower,
        project=lambda w, x, grid: Features(_project_rows(w, torch.cat([part[first:] for part in x], -1), activation)),
        merge=1,
        rules=rules,
        marks=Marks(image=image),
        added=int(clip) - first,
    )


@VISION_FAMILIES.register("Mistral3ForConditionalGeneration")
def mistral3(fields: Fields, directory: Path) -> Vision:
    """Pixtral's tower, squares of patches merged into one token."""
    vision, _ = _vision_config(fields, "pixtral")
    tower, merge = _read_pixtral(vision), _read_size(fields, "spatial_merge_size", 2, 16)
    tower = replace(tower, taken=_feature_layers(fields, tower.layers, -1))
    if len(tower.taken) > 1:
        raise fields.refuse("vision_feature_layer", fields.raw["vision_feature_layer"], "one layer")
    text, activation = fields.child("text_config") or Fields({}, fields.where), _activation(fields, "gelu", "projector_hidden_act")
    eps = text.number("rms_norm_eps", low=0.0, high=1.0, default=1e-6)

    def project(weights: Weights, x: Sequence[Tensor], grid: Grid) -> Features:
        h = norm(weights, "multi_modal_projector.norm", x[0], eps, "rms")
        squares = h.view(grid[1] // merge, merge, grid[2] // merge, merge, -1).permute(0, 2, 4, 1, 3)
        h = linear(weights, "multi_modal_projector.patch_merger.merging_layer", squares.flatten(2).flatten(0, 1))
        return Features(_project_rows(weights, h, activation))

    longest = _read_size(vision, "image_size", 1540, 8192)
    rules = Rules(fit="longest", unit=tower.patch * merge, longest=longest).read(read_rules(directory))
    image = _read_token_id(fields, "image_token_id", "image_token_index", default=10)
    return Vision(tower=tower, project=project, merge=merge, rules=rules, marks=Marks(image=image, style="rows"))


@VISION_FAMILIES.register("Gemma3ForConditionalGeneration")
def gemma3(fields: Fields, directory: Path) -> Vision:
    """SigLIP, its square of patches averaged down to `mm_tokens_per_image` tokens."""
    vision, _ = _vision_config(fields, "siglip_vision_model")
    tower = _read_vit(vision, clip=False)
    tower = replace(tower, taken=(tower.layers,), norm_after="vision_tower.post_layernorm")
    across = _read_size(vision, "image_size", 224, 8192) // tower.patch
    count = _read_size(fields, "mm_tokens_per_image", 256)
    side = round(count**0.5)
    if side * side != count or side > across or across % side:
        raise fields.refuse("mm_tokens_per_image", count, f"the square of a divisor of the {across} patches of a side")

    def project(weights: Weights, x: Sequence[Tensor], grid: Grid) -> Features:
        square = x[0].T.reshape(1, -1, grid[1], grid[2])
        pooled = F.avg_pool2d(square, across // side).flatten(2)[0].T
        wide = pooled.float()
        h = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + tower.eps)
        h = (h * (1.0 + weights["multi_modal_projector.mm_soft_emb_norm.weight"].float())).to(pooled.dtype)
        return Features(h @ weights["multi_modal_projector.mm_input_projection.weight"])

    given = read_rules(directory)
    rules = _square_rules(vision, tower, mean=HALF_PER_CHANNEL, std=HALF_PER_CHANNEL, resample=BILINEAR_FILTER).read(given)
    _check_square(rules, vision, given.where if given else str(directory))
    marks = Marks(
        image=_read_token_id(fields, "image_token_id", "image_token_index", default=262144),
        mark=_read_token_id(fields, "boi_token_id", "boi_token_index", default=255999),
        end=_read_token_id(fields, "eoi_token_id", "eoi_token_index", default=256000),
        style="framed",
    )
    return Vision(tower=tower, project=project, merge=across // side, rules=rules, marks=marks)


# ---- Qwen: towers under `visual`, which read videos too

QWEN2_NAMES = BlockNames(
    layer="visual.blocks.{}", norm1="norm1", norm2="norm2", qkv=("attn.qkv",), out="attn.proj", up=("mlp.fc1",), down="mlp.fc2"
)
QWEN25_NAMES = replace(QWEN2_NAMES, up=("mlp.gate_proj", "mlp.up_proj"), down="mlp.down_proj")
QWEN3_NAMES = replace(QWEN2_NAMES, up=("mlp.linear_fc1",), down="mlp.linear_fc2")


def _qwen_tower(
    vision: Fields, width_key: str, width: int, heads: int, depth: int, patch: int, names: BlockNames, **more: Any
) -> TowerConfig:
    width, heads = _read_size(vision, width_key, width), _read_size(vision, "num_heads", heads, 1024)
    _check_heads(vision, width, heads, 4)
    layers = _read_size(vision, "depth", depth, 1024)
    return TowerConfig(
        layers=layers,
        width=width,
        heads=heads,
        patch=_read_size(vision, "patch_size", patch, 256),
        temporal=_read_size(vision, "temporal_patch_size", 2, 16),
        merge=_read_size(vision, "spatial_merge_size", 2, 16),
        names=names,
        embed="visual.patch_embed.proj",
        rope="halves",
        theta=_read_theta(vision),
        **{"taken": (layers,), **more},
    )


def _qwen_marks(fields: Fields, base: int, style: str = "plain") -> Marks:
    return Marks(
        image=_read_token_id(fields, "image_token_id", default=base + 3),
        video=_read_token_id(fields, "video_token_id", default=base + 4),
        start=_read_token_id(fields, "vision_start_token_id", default=base),
        end=_read_token_id(fields, "vision_end_token_id", default=base + 1),
        style=style,
    )


def _read_qwen(fields: Fields, directory: Path, tower: TowerConfig, project: Project, rules: Rules, video: Rules, **more: Any) -> Vision:
    marks = more.pop("marks", None) or _qwen_marks(fields, 151652)
    made, given = rules.read(read_rules(directory)), read_rules(directory, "video")
    return Vision(tower=tower, project=project, merge=tower.merge, rules=made, video_rules=video.read(given), marks=marks, **more)


def _qwen_rules(tower: TowerConfig) -> tuple[Rules, Rules]:
    unit = tower.patch * tower.merge
    image = Rules(fit="pixels", unit=unit, temporal=tower.temporal, low=56 * 56, high=28 * 28 * 1280)
    return image, replace(image, low=128 * 28 * 28, high=28 * 28 * 768)


def _merger_projector(tower: TowerConfig, kind: str) -> Project:
    """Squares of patches, normed one by one, through an MLP."""

    def project(weights: Weights, x: Sequence[Tensor], grid: Grid) -> Features:
        h = norm(weights, "visual.merger.ln_q", x[0], 1e-6, kind).view(-1, tower.width * tower.merge**2)
        return Features(linear(weights, "visual.merger.mlp.2", F.gelu(linear(weights, "visual.merger.mlp.0", h))))

    return project


@VISION_FAMILIES.register("Qwen2VLForConditionalGeneration")
def qwen2_vl(fields: Fields, directory: Path) -> Vision:
    """LayerNorms, an ungated MLP, every block sees the whole frame."""
    vision, _ = _vision_config(fields, "qwen2_vl")
    activation = _activation(vision, "quick_gelu")
    tower = _qwen_tower(vision, "embed_dim", 1280, 16, 32, 14, QWEN2_NAMES, activation=activation)
    return _read_qwen(fields, directory, tower, _merger_projector(tower, "layer"), *_qwen_rules(tower))


@VISION_FAMILIES.register("Qwen2_5_VLForConditionalGeneration")
def qwen2_5_vl(fields: Fields, directory: Path) -> Vision:
    """RMS norms, a gated MLP, most blocks see windows; time in a video counts in steps per second."""
    vision, _ = _vision_config(fields, "qwen2_5_vl")
    whole = vision.raw.get("fullatt_block_indexes", [7, 15, 23, 31])
    if not isinstance(whole, list) or any(type(i) is not int for i in whole):
        raise vision.refuse("fullatt_block_indexes", whole, "a list of blocks")
    activation = _activation(vision, "silu")
    window = _read_size(vision, "window_size", 112, 1 << 14)
    tower = _qwen_tower(
        vision, "hidden_size", 1280, 16, 32, 14, QWEN25_NAMES, norm="rms", activation=activation, window=window, whole=tuple(whole)
    )
    if window < tower.patch * tower.merge:
        raise vision.refuse("window_size", window, f"at least {tower.patch * tower.merge}, one merged square of patches")
    seconds = vision.number("tokens_per_second", low=0.0, high=1e4, default=4.0)
    return _read_qwen(fields, directory, tower, _merger_projector(tower, "rms"), *_qwen_rules(tower), seconds=seconds)


@VISION_FAMILIES.register("Qwen3VLForConditionalGeneration")
def qwen3_vl(fields: Fields, directory: Path) -> Vision:
    """A learned square of positions besides RoPE; features of some blocks go to the decoder's first layers; videos as dated frames."""
    vision, _ = _vision_config(fields, "qwen3_vl")
    deep = vision.raw.get("deepstack_visual_indexes", [8, 16, 24])
    tower = _qwen_tower(
        vision, "hidden_size", 1152, 16, 27, 16, QWEN3_NAMES, activation=_activation(vision, "gelu_pytorch_tanh"), positions="resampled",
        position_name="visual.pos_embed",
    )  # fmt: skip
    if not isinstance(deep, list) or any(type(i) is not int or not 0 <= i < tower.layers for i in deep):
        raise vision.refuse("deepstack_visual_indexes", deep, f"a list of blocks from 0 to {tower.layers - 1}")
    tower = replace(tower, taken=(tower.layers, *(i + 1 for i in deep)))
    merged = tower.width * tower.merge**2

    def merger(weights: Weights, name: str, x: Tensor, *, after: bool) -> Tensor:
        h = norm(weights, f"{name}.norm", x.view(-1, merged) if after else x, 1e-6).view(-1, merged)
        return linear(weights, f"{name}.linear_fc2", F.gelu(linear(weights, f"{name}.linear_fc1", h)))

    def project(weights: Weights, x: Sequence[Tensor], grid: Grid) -> Features:
        deeper = [merger(weights, f"visual.deepstack_merger_list.{i}", part, after=True) for i, part in enumerate(x[1:])]
        return Features(merger(weights, "visual.merger", x[0], after=False), tuple(deeper))

    image = Rules(
        fit="pixels",
        unit=tower.patch * tower.merge,
        temporal=tower.temporal,
        low=256 * 256,
        high=4096 * 4096,
        mean=HALF_PER_CHANNEL,
        std=HALF_PER_CHANNEL,
    )
    video = replace(image, low=128 * 32 * 32, high=32 * 32 * 768, whole=True)
    return _read_qwen(fields, directory, tower, project, image, video, marks=_qwen_marks(fields, 151652, "frames"))


def read_vision(name: str, raw: Mapping[str, Any], directory: Path) -> Vision | None:
    """How the class `name` sees; None for a class of text models, or one whose config has no tower.

    Raises:
        ConfigError: a value that cannot be used.
    """
    if name not in VISION_FAMILIES or not raw.get("vision_config"):
        return None
    return VISION_FAMILIES[name](Fields(raw, str(directory / "config.json")), directory)
