"""How a model wants its pictures: size, cut, normalisation, as preprocessor_config.json says. The arithmetic is Transformers'."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exl2nb.core.errors import PictureError
from exl2nb.io.hf_config import read_json
from exl2nb.model.config_fields import Fields
from exl2nb.model.vision.pictures import MAX_PIXELS, MAX_TOTAL

if TYPE_CHECKING:
    from PIL.Image import Image

    from exl2nb.model.vision.pictures import Picture

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF_PER_CHANNEL = (0.5, 0.5, 0.5)
BILINEAR_FILTER = 2  # Pillow's number
BICUBIC_FILTER = 3  # Pillow's number


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Preprocessing of one model.

    fit: "pixels" (sides are multiples of `unit`, the number of pixels from `low` to `high`), "longest" (no side above `longest`, then up to
    multiples of `unit`), "exact" (`height` x `width`), "shortest" (the shorter side becomes `shortest`, then the middle `height` x `width`
    is cut out). square: padded to a square with the mean first. unit: pixels that the sides must be multiples of. temporal: frames of a
    patch. mean, std: of the normalisation. scale: factor on the 8-bit values. resample: Pillow's number of the filter. whole: "pixels"
    counts those of all frames of a video together.
    """

    fit: str
    unit: int
    temporal: int = 1
    low: int = 0
    high: int = 0
    longest: int = 0
    shortest: int = 0
    height: int = 0
    width: int = 0
    square: bool = False
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD
    scale: float = 1 / 255
    resample: int = BICUBIC_FILTER
    whole: bool = False

    def read(self, fields: Fields | None) -> Rules:
        """These rules with what a preprocessor_config.json says."""
        if fields is None:
            return self
        size, crop = fields.child("size") or Fields({}, fields.where), fields.child("crop_size") or Fields({}, fields.where)
        side = {"low": 1, "high": 4096}
        found: dict[str, Any] = {
            "mean": _three_numbers(fields, "image_mean", self.mean),
            "std": _three_numbers(fields, "image_std", self.std),
            "scale": fields.number("rescale_factor", low=1e-6, high=1.0, default=self.scale),
            "resample": fields.integer("resample", low=0, high=5, default=self.resample),
        }
        if self.fit == "pixels":
            many = {"low": 1, "high": 1 << 34}
            found["low"] = size.integer("shortest_edge", **many, default=None) or self.low
            found["high"] = size.integer("longest_edge", **many, default=None) or self.high
            found["low"] = fields.integer("min_pixels", **many, default=found["low"])
            found["high"] = fields.integer("max_pixels", **many, default=found["high"])
        elif self.fit == "longest":
            found["longest"] = size.integer("longest_edge", **side, default=self.longest)
        elif "shortest_edge" in size.raw:
            found |= {"fit": "shortest", "shortest": size.integer("shortest_edge", **side)}
            found["height"] = crop.integer("height", **side, default=found["shortest"])
            found["width"] = crop.integer("width", **side, default=found["shortest"])
        elif "height" in size.raw:
            found |= {"fit": "exact", "height": size.integer("height", **side), "width": size.integer("width", **side)}
        if self.fit in ("exact", "shortest"):
            found["square"] = fields.flag("do_pad", default=self.square)
        made = replace(self, **found)
        if made.low > made.high:
            raise fields.refuse("size", size.raw, "a least number of pixels that is not above the largest")
        return made

    def size_for(self, width: int, height: int, frames: int = 1) -> tuple[int, int]:
        """Width and height of what the tower sees of a picture of this size.

        Raises:
            PictureError: more pixels than any tower needs: the model's settings enlarge pictures without bound.
        """
        across, down = self._size_for(width, height, frames)
        _check_pixels(across * down)
        return across, down

    def _size_for(self, width: int, height: int, frames: int) -> tuple[int, int]:
        unit = self.unit
        if self.fit == "exact" or self.fit == "shortest":
            return self.width, self.height
        if self.fit == "longest":
            ratio = max(height, width) / self.longest
            if ratio > 1:
                height, width = max(1, math.floor(height / ratio)), max(1, math.floor(width / ratio))
            return -(-width // unit) * unit, -(-height // unit) * unit
        count = 1
        if self.whole:
            count = round(frames / self.temporal) * self.temporal
            if min(width, height) < unit:
                grown = max(unit / height, unit / width)
                height, width = int(height * grown), int(width * grown)
        across, down = round(width / unit) * unit, round(height / unit) * unit
        pixels = (frames if self.whole else 1) * height * width
        if count * across * down > self.high:
            shrink = math.sqrt(pixels / self.high)
            return max(unit, math.floor(width / shrink / unit) * unit), max(unit, math.floor(height / shrink / unit) * unit)
        if count * across * down < self.low:
            grow = math.sqrt(self.low / pixels)
            return math.ceil(width * grow / unit) * unit, math.ceil(height * grow / unit) * unit
        return across, down

    def frames(self, picture: Picture) -> Tensor:
        """What the tower sees: f32 `(T, 3, H, W)`; T is a multiple of `temporal`, the last frame repeated where there are too few."""
        import numpy as np

        _check_pixels(math.prod(self.size_for(*picture.size, len(picture.frames))) * len(picture.frames), MAX_TOTAL)
        made = [self.fitted(frame, len(picture.frames)) for frame in picture.frames]
        made += [made[-1]] * (-len(made) % self.temporal)
        pixels = torch.from_numpy(np.stack(made)).permute(0, 3, 1, 2).float() * self.scale
        mean, std = (torch.tensor(values, dtype=torch.float32)[:, None, None] for values in (self.mean, self.std))
        return ((pixels - mean) / std).contiguous()

    def fitted(self, picture: Image, frames: int) -> Any:
        """The 8-bit pixels `(H, W, 3)` of one frame after resizing."""
        import numpy as np
        import PIL.Image

        if self.square and picture.width != picture.height:
            side = max(picture.size)
            _check_pixels(side * side)
            whole = PIL.Image.new("RGB", (side, side), tuple(int(x * 255) for x in self.mean))  # pyright: ignore[reportArgumentType]
            whole.paste(picture, ((side - picture.width) // 2, (side - picture.height) // 2))
            picture = whole
        size = self.size_for(*picture.size, frames)
        if self.fit != "shortest":
            return np.asarray(picture if picture.size == size else picture.resize(size, self.resample))
        short, long = sorted(picture.size)
        other = int(self.shortest * long / short)
        size = (self.shortest, other) if picture.width <= picture.height else (other, self.shortest)
        _check_pixels(math.prod(size))
        made = np.asarray(picture.resize(size, self.resample))
        up, left = max(0, self.height - made.shape[0]), max(0, self.width - made.shape[1])
        made = np.pad(made, ((-(-up // 2), up // 2), (-(-left // 2), left // 2), (0, 0))) if up or left else made
        top, left = (made.shape[0] - self.height) // 2, (made.shape[1] - self.width) // 2
        return made[top : top + self.height, left : left + self.width]


def _check_pixels(pixels: int, most: int = MAX_PIXELS) -> None:
    if pixels > most:
        raise PictureError(
            f"the model's preprocessor_config.json makes {pixels / 1e6:.0f} million pixels of the picture; expected at most "
            f"{most / 1e6:.0f}: give a smaller one, or correct its sizes"
        )


def _three_numbers(fields: Fields, key: str, default: tuple[float, ...]) -> tuple[float, ...]:
    value = fields.raw.get(key)
    if value is None:
        return default
    if not isinstance(value, list) or len(value) != 3 or any(type(x) not in (int, float) or not 0 <= x <= 255 for x in value):
        raise fields.refuse(key, value, "a list of three numbers")
    if key == "image_std" and min(value) <= 0:
        raise fields.refuse(key, value, "a list of three numbers above 0")
    return tuple(float(x) for x in value)


def read_rules(directory: Path, kind: str = "image") -> Fields | None:
    """The preprocessing settings of a model directory for "image" or "video"; None where it has none.

    Raises:
        ConfigError: a file that is no JSON object.
    """
    own = {"image": "preprocessor_config.json", "video": "video_preprocessor_config.json"}[kind]
    if (directory / own).is_file():
        return Fields(read_json(directory / own), str(directory / own))
    shared = directory / "processor_config.json"
    found: Mapping[str, Any] = read_json(shared) if shared.is_file() else {}
    return Fields(found, str(shared)).child(f"{kind}_processor")
