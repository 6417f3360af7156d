"""A loaded tower: pictures in, rows of the decoder's residual stream out; the rows of the latest pictures are kept."""

from __future__ import annotations

import math
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exl2nb.core.errors import FormatError, PictureError
from exl2nb.io.hf_config import read_config
from exl2nb.model.config import ModelConfig
from exl2nb.model.store import ModelStore, open_store
from exl2nb.model.vision.families import VISION_FAMILIES, Features, Vision, read_vision
from exl2nb.model.vision.pictures import Picture
from exl2nb.model.vision.prompt import Piece, PromptPictures, assign_picture_tokens, expand_placeholders, mark_of
from exl2nb.model.vision.rules import Rules
from exl2nb.model.vision.tower import Grid, forward, grid_of
from exl2nb.quant.exl2 import EXL2_SUFFIXES, Exl2Tensors, check_headers

if TYPE_CHECKING:
    from PIL.Image import Image

    from exl2nb.io.safetensors import TensorInfo

KEPT_BYTES = 256 << 20  # of the rows of pictures that were seen


class VisionEncoder:
    """The tower and projector of one model. Any thread may use it; pictures are encoded one after the other.

    Attributes:
        vision: what it is. weight_bytes: memory of its weights. device, dtype: where and in what it computes.

    Args:
        weights: by name, of one dtype, on one device.
    """

    def __init__(self, vision: Vision, weights: dict[str, Tensor], *, hidden: int, where: str = "vision tower") -> None:
        self.vision, self._weights = vision, weights
        first = weights.get(f"{vision.tower.embed}.weight")
        if first is None:
            raise FormatError(f"{where}: tensor {vision.tower.embed + '.weight'!r} is missing; the tower needs it")
        self.device, self.dtype = first.device, first.dtype
        self.weight_bytes = sum(tensor.nbytes for tensor in weights.values())
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, tuple[Features, Grid]] = OrderedDict()
        self._kept_bytes = 0
        self.runs = 0  # pictures that went through the tower
        self._check(hidden, where)

    def grid(self, picture: Any) -> Grid:
        """Patches in time, height and width that a picture, or what `Picture.of` takes, becomes; from its size alone."""
        given = Picture.of(picture)
        rules, tower = self._rules(given), self.vision.tower
        width, height = rules.size_for(*given.size, len(given.frames))
        frames = -(-len(given.frames) // rules.temporal) * rules.temporal
        return frames // tower.temporal, height // tower.patch, width // tower.patch

    def tokens(self, picture: Any) -> int:
        """Tokens of the prompt that a picture, or what `Picture.of` takes, needs; its marks left out."""
        return self.vision.tokens(self.grid(picture))

    def seen(self, picture: Any) -> Image:
        """The picture, or a video's first frame, as the tower sees it: after resizing and cutting."""
        import PIL.Image

        given = Picture.of(picture)
        return PIL.Image.fromarray(self._rules(given).fitted(given.frames[0], len(given.frames)))

    def mark(self, piece: Piece, *, video: bool = False) -> str:
        """What stands in a prompt for one picture before it is expanded. piece: the text of a token."""
        return mark_of(self.vision, video, piece)

    def expanded(self, text: str, pictures: Sequence[Picture], piece: Piece) -> str:
        """A prompt with marks as the text that the model reads: each mark becomes as many tokens as its picture takes.

        Raises:
            PictureError: other marks than pictures, or a video, and the model reads none.
        """
        return expand_placeholders(text, self.vision, pictures, [self.grid(picture) for picture in pictures], piece)

    def placed(self, ids: Sequence[int], pictures: Sequence[Picture], *, whole: bool, axes: bool) -> PromptPictures:
        """The pictures of an expanded prompt, encoded; arguments and errors as of `prompt.assign_picture_tokens`."""
        return assign_picture_tokens(ids, self.vision, pictures, [self(picture) for picture in pictures], whole=whole, axes=axes)

    @property
    def largest(self) -> int:
        """Tokens of the largest picture, where all have one size."""
        rules, tower = self.vision.rules, self.vision.tower
        return self.vision.tokens((1, rules.height // tower.patch, rules.width // tower.patch))

    def __call__(self, picture: Picture) -> tuple[Features, Grid]:
        """Encode a picture, or take what is kept of it.

        Raises:
            PictureError: a video, and the model reads none.
        """
        with self._lock:
            if picture.digest in self._kept:
                self._kept.move_to_end(picture.digest)
                return self._kept[picture.digest]
            made = self.encode(self._rules(picture).frames(picture))
            self.runs += 1
            self._kept[picture.digest] = made
            self._kept_bytes += made[0].nbytes
            while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
                self._kept_bytes -= self._kept.popitem(last=False)[1][0].nbytes
            return made

    def encode(self, frames: Tensor) -> tuple[Features, Grid]:
        """Frames f32 `(T, 3, H, W)`, normalised, through tower and projector; the rows are f32."""
        with torch.inference_mode():
            grid = grid_of(self.vision.tower, frames)
            found = self.vision.project(self._weights, forward(self.vision.tower, self._weights, frames.to(self.device)), grid)
            made = Features(found.rows.float(), tuple(part.float() for part in found.deep))
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()  # the engine reads them on a stream of its own
        return made, grid

    def __repr__(self) -> str:
        tower, size = self.vision.tower, f"{self.weight_bytes / 2**20:.1f} MiB on {self.device}"
        return f"VisionEncoder({tower.layers} layers of {tower.width}, patches of {tower.patch} pixels, {size})"

    def close(self) -> None:
        """Give the memory back."""
        self._weights, self._kept = {}, OrderedDict()

    def _rules(self, picture: Picture) -> Rules:
        if not picture.is_video:
            return self.vision.rules
        if self.vision.video_rules is None:
            raise PictureError("this model reads pictures and no videos; give single frames as pictures")
        return self.vision.video_rules

    def _check(self, hidden: int, where: str) -> None:
        """Run the shapes once, without numbers."""
        tower, rules = self.vision.tower, self.vision.rules
        weights = {name: torch.empty_like(tensor, device="meta") for name, tensor in self._weights.items()}
        side = rules.height or rules.unit * max(1, tower.window // rules.unit)
        try:
            frames = torch.empty(tower.temporal, 3, side, side, device="meta")
            grid = grid_of(tower, frames)
            found = self.vision.project(weights, forward(tower, weights, frames), grid)
        except KeyError as error:
            raise FormatError(f"{where}: tensor {str(error.args[0])!r} is missing; config.json says that the tower has it") from None
        except (RuntimeError, ValueError, IndexError) as error:
            raise FormatError(f"{where}: the tower's tensors do not fit each other or config.json: {str(error)[:160]}") from None
        want = (self.vision.tokens(grid), hidden)
        if tuple(found.rows.shape) != want:
            raise FormatError(f"{where}: a picture becomes rows {tuple(found.rows.shape)}; expected {want} for this config.json")


def load_encoder(
    directory: str | os.PathLike[str], config: ModelConfig, *, device: str = "cpu", dtype: torch.dtype | None = None
) -> VisionEncoder | None:
    """Load the tower of a model directory.

    Args:
        config: of the decoder. dtype: to compute in; None = f32 on the CPU, what is stored on a GPU.

    Returns:
        None where the class has no tower, or the files hold none (only the text model was kept).

    Raises:
        ConfigError, FormatError: the tower cannot be used; says why.
    """
    folder = Path(directory)
    if config.architecture not in VISION_FAMILIES:
        return None
    with open_store(config, folder) as store:
        if not store.untouched():
            return None
        vision = read_vision(config.architecture, read_config(folder), folder)
        return None if vision is None else _loaded(vision, store, config, device, dtype)


def _loaded(vision: Vision, store: ModelStore, config: ModelConfig, device: str, dtype: torch.dtype | None) -> VisionEncoder:
    weights: dict[str, Tensor] = {}
    for name, tensor in _dense(store):
        if not tensor.dtype.is_floating_point:
            continue
        stored = torch.float16 if tensor.dtype == torch.float32 and device != "cpu" else tensor.dtype
        wanted = dtype or (torch.float32 if device == "cpu" else stored)
        weights[tower_name(name)] = tensor.to(device, wanted)
    return VisionEncoder(vision, weights, hidden=config.hidden_size, where=str(store.directory))


def _dense(store: ModelStore) -> Iterator[tuple[str, Tensor]]:
    """The tower's tensors; matrices that are stored as EXL2 as `(N, K)` fp16 weights."""
    for name in store.untouched():
        stem, _, suffix = name.rpartition(".")
        if suffix == "q_weight":
            infos = {part: store.info_untouched(f"{stem}.{part}") for part in EXL2_SUFFIXES if f"{stem}.{part}" in store.untouched()}
            if len(infos) < len(EXL2_SUFFIXES):
                missing = next(part for part in EXL2_SUFFIXES if part not in infos)
                raise FormatError(f"{store.directory}: tensor {f'{stem}.{missing}'!r} is missing; an EXL2 matrix has it")
            check_headers(infos, stem, file=infos[suffix].path)
            packed = Exl2Tensors(**{part: store.read_untouched(f"{stem}.{part}") for part in EXL2_SUFFIXES})
            yield f"{stem}.weight", packed.validate(stem, file=infos[suffix].path).reconstruct().T.contiguous()
        elif suffix not in EXL2_SUFFIXES:
            yield name, store.read_untouched(name)


def _numbers(infos: Mapping[str, TensorInfo]) -> int:
    """Weights of a tower once it is loaded."""
    total = 0
    for name, info in infos.items():
        stem, _, suffix = name.rpartition(".")
        if suffix == "q_weight" and f"{stem}.q_invperm" in infos:
            total += infos[f"{stem}.q_invperm"].shape[0] * info.shape[-1]
        elif suffix not in EXL2_SUFFIXES:
            total += math.prod(info.shape)
    return total


@dataclass(frozen=True)
class EncoderPlan:
    """A tower before it is loaded. nbytes: memory of its weights. tokens: of a picture of 1024 x 1024 pixels, marks left out."""

    nbytes: int = 0
    tokens: int = 0


def plan_encoder(directory: str | os.PathLike[str], config: ModelConfig, *, device: str = "cpu") -> EncoderPlan:
    """What the tower of a model directory will take, from headers alone; arguments and errors as of `load_encoder`."""
    folder = Path(directory)
    if config.architecture not in VISION_FAMILIES:
        return EncoderPlan()
    with open_store(config, folder) as store:
        infos = {name: store.info_untouched(name) for name in store.untouched()}
        vision = read_vision(config.architecture, read_config(folder), folder) if infos else None
    if vision is None:
        return EncoderPlan()
    width, height = vision.rules.size_for(1024, 1024)
    grid = (1, height // vision.tower.patch, width // vision.tower.patch)
    each = 4 if device == "cpu" else 2
    return EncoderPlan(each * _numbers(infos), vision.tokens(grid))


def tower_name(name: str) -> str:
    """A tensor's name as `families` has it; older files have one level more."""
    return name.replace("vision_tower.vision_model.", "vision_tower.")
