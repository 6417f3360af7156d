"""Pictures and videos from whatever a notebook holds: files, bytes, arrays, figures. Everything is untrusted: sizes are checked first."""

from __future__ import annotations

import base64
import binascii
import io
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exl2nb.core.errors import MissingDependency, PictureError

if TYPE_CHECKING:
    from PIL.Image import Image as Pixels

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_BYTES = 64 << 20  # of a file
MAX_SIDE = 16384  # pixels
MAX_PIXELS = 1 << 26  # of a picture
MAX_RATIO = 200  # of the longer side to the shorter
MAX_FRAMES = 768
MAX_TOTAL = 1 << 28  # pixels of all frames of a video, and of all pictures of a conversation: 768 MiB
MAX_DECODED = 1 << 36  # pixels of a video file up to its last frame that is taken: minutes of work


@dataclass(frozen=True, eq=False)
class Picture:
    """What a model is to see: one picture, or the frames of a video.

    frames: RGB. times_s: of each frame of a video, in seconds; empty for a picture. digest: of all pixels and times, 32 bytes; equal for
    equal pictures.
    """

    frames: tuple[Pixels, ...]
    times_s: tuple[float, ...]
    digest: bytes

    @property
    def is_video(self) -> bool:
        """Whether there are frames with times."""
        return bool(self.times_s)

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        return self.frames[0].size

    @property
    def pixels(self) -> int:
        """Of all frames."""
        return math.prod(self.size) * len(self.frames)

    @property
    def data_url(self) -> str:
        """The picture, or a video's first frame, as the data URL of a PNG file, which gives the same pixels again."""
        return f"data:image/png;base64,{base64.b64encode(self._repr_png_()).decode()}"

    def _repr_png_(self) -> bytes:
        """The picture, or a video's first frame, for a notebook."""
        held = io.BytesIO()
        self.frames[0].save(held, "PNG")
        return held.getvalue()

    def __repr__(self) -> str:
        width, height = self.size
        return f"{type(self).__name__}({width}x{height}{f', {len(self.frames)} frames' if self.is_video else ''})"

    @classmethod
    def of(cls, source: Any, *, where: str = "image") -> Picture:
        """One picture.

        Args:
            source: a path, the bytes of a PNG, JPEG, WebP, GIF or BMP file, a data URL, a PIL image, an array `(H, W)`, `(H, W, 3)` or
                `(H, W, 4)` of uint8 or of floats from 0 to 1, or a figure of matplotlib. Transparent parts become white; the rotation that
                a camera noted is carried out; of a GIF the first frame counts.

        Raises:
            PictureError: it is none of these, is damaged, or is too large. MissingDependency: Pillow is not installed.
        """
        check_pillow()
        return source if isinstance(source, Picture) else Picture((_to_rgb(source, where),), (), b"")._named()

    @classmethod
    def video(cls, source: Any, *, fps: float = 2.0, max_frames: int = 64, where: str = "video") -> Picture:
        """A video as frames.

        Args:
            source: a sequence of pictures, `fps` of them per second; or a path or bytes of a video file, of which `fps` frames per second
                are taken (needs PyAV: `pip install 'exl2nb[vision]'`). fps: frames per second. max_frames: fewer per second are taken where
                there would be more.

        Raises:
            PictureError: it cannot be read, has no frame, or its frames differ in size. MissingDependency: PyAV is not installed.
        """
        check_pillow()
        if isinstance(source, Picture):
            return source
        if isinstance(fps, bool) or not isinstance(fps, (int, float)) or not 0.001 <= fps <= 1000:
            raise PictureError(f"{where}: fps is {str(fps)[:40]!r}; expected frames per second from 0.001 to 1000")
        if isinstance(max_frames, bool) or not isinstance(max_frames, int) or not 1 <= max_frames <= MAX_FRAMES:
            raise PictureError(f"{where}: max_frames is {str(max_frames)[:40]!r}; expected a whole number from 1 to {MAX_FRAMES}")
        if isinstance(source, (str, os.PathLike, bytes, bytearray)):
            frames, times = _decode_video(source, float(fps), max_frames, where)
        else:
            given = list(source) if isinstance(source, Sequence) or hasattr(source, "shape") else []
            if not given:
                raise PictureError(f"{where}: is a {type(source).__name__}; expected a video file, or a sequence of at least one picture")
            step = max(1, math.ceil(len(given) / max_frames))
            frames = []
            for i, one in enumerate(given[::step]):
                frames.append(_to_rgb(one, f"{where}, frame {i * step}"))
                check_total(math.prod(frames[0].size) * len(frames), where)
            times = [i * step / fps for i in range(len(frames))]
        if len({frame.size for frame in frames}) > 1:
            raise PictureError(f"{where}: frames of {sorted({frame.size for frame in frames})[:4]}; expected one size for all")
        return Picture(tuple(frames), tuple(times), b"")._named()

    def _named(self) -> Picture:
        digest = blake2b(repr((self.size, self.times_s)).encode(), digest_size=32)
        for frame in self.frames:
            digest.update(frame.tobytes())
        return Picture(self.frames, self.times_s, digest.digest())


class Image(Picture):
    """A picture as a part of a message: checked where it is made, shown in a notebook, read once however often it is sent.

    Args:
        source: as for `Picture.of`: a path, bytes, a data URL, a PIL image, an array or a figure.

    Raises:
        PictureError: it is none of these, is damaged, or is too large. MissingDependency: Pillow is not installed.

    Example:
        >>> import exl2nb as ex
        >>> import numpy as np
        >>> ex.Image(np.zeros((32, 48, 3), np.uint8))
        Image(48x32)
    """

    def __init__(self, source: Any) -> None:
        made = Picture.of(source)
        super().__init__(made.frames, made.times_s, made.digest)


def check_pillow() -> None:
    """Say what to install where Pillow is not there.

    Raises:
        MissingDependency: it is not.
    """
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise MissingDependency("pictures need Pillow: pip install 'exl2nb[vision]'") from None


def check_size(width: int, height: int, where: str) -> None:
    """Refuse what is empty, absurdly large or absurdly long.

    Raises:
        PictureError: says the size and the limits.
    """
    if min(width, height) < 1 or max(width, height) > MAX_SIDE or width * height > MAX_PIXELS:
        raise PictureError(
            f"{where}: the picture is {width}x{height} pixels; expected at least 1x1, sides of at most {MAX_SIDE} and at most "
            f"{MAX_PIXELS / 1e6:.0f} million pixels: make it smaller first"
        )
    if max(width, height) > MAX_RATIO * min(width, height):
        raise PictureError(
            f"{where}: the picture is {width}x{height} pixels; expected a longer side of at most {MAX_RATIO} times the other"
        )


def check_total(pixels: int, where: str) -> None:
    """Refuse what each is small enough and all together are not.

    Raises:
        PictureError: says the limit.
    """
    if pixels > MAX_TOTAL:
        raise PictureError(
            f"{where}: its pictures or frames have more than {MAX_TOTAL / 1e6:.0f} million pixels together; give fewer, or smaller ones"
        )


def from_data_url(url: str, where: str) -> bytes:
    """The bytes in a `data:` URL.

    Raises:
        PictureError: it is another kind of URL, not base64, or too long.
    """
    head, comma, body = url.partition(",")
    if not head.startswith("data:") or not comma:
        raise PictureError(f"{where}: {url[:40]!r} is no data URL; expected 'data:image/png;base64,...'")
    if not head.endswith(";base64") or len(body) > MAX_BYTES * 4 // 3 + 4:
        raise PictureError(f"{where}: {head[:40]!r} with {len(body)} characters; expected base64 of at most {MAX_BYTES >> 20} MiB")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise PictureError(f"{where}: the data URL is not base64 ({error})") from None


def _to_rgb(source: Any, where: str) -> Pixels:
    import PIL.Image

    if isinstance(source, str) and source.startswith("data:"):
        source = from_data_url(source, where)
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        raise PictureError(f"{where}: {source[:60]!r} is an address; nothing is fetched from there: download it, and give the file's path")
    if isinstance(source, PIL.Image.Image):
        check_size(*source.size, where)
        return _flatten_image(source, where)
    if isinstance(source, (str, os.PathLike)):
        return _open_image(_file_bytes(Path(source), where), str(source)[-80:])
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _open_image(bytes(source), where)
    if hasattr(source, "savefig"):  # a figure of matplotlib
        held = io.BytesIO()
        source.savefig(held, format="png", facecolor="white")
        return _open_image(held.getvalue(), where)
    if hasattr(source, "__array__") or hasattr(source, "numpy"):
        return _from_array(source, where)
    kind = "a mapping" if isinstance(source, Mapping) else f"a {type(source).__name__}"
    raise PictureError(f"{where}: is {kind}; expected a path, bytes, a data URL, a PIL image, an array or a figure")


def _file_bytes(path: Path, where: str) -> bytes:
    if not path.is_file():
        raise PictureError(f"{where}: {str(path)[-80:]!r} is no file")
    if (size := path.stat().st_size) > MAX_BYTES:
        raise PictureError(f"{where}: {path.name[:80]!r} has {size >> 20} MiB; expected at most {MAX_BYTES >> 20} MiB")
    return path.read_bytes()


def _open_image(data: bytes, where: str) -> Pixels:
    import PIL.Image
    from PIL import UnidentifiedImageError

    if len(data) > MAX_BYTES:
        raise PictureError(f"{where}: the file has {len(data) >> 20} MiB; expected at most {MAX_BYTES >> 20} MiB")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)  # our own limit is lower, and is checked next
            opened = PIL.Image.open(io.BytesIO(data), formats=IMAGE_FORMATS)
        check_size(*opened.size, where)
        opened.load()
        return _flatten_image(opened, where)
    except PIL.Image.DecompressionBombError:
        raise PictureError(f"{where}: the picture has more than {MAX_PIXELS / 1e6:.0f} million pixels: make it smaller first") from None
    except UnidentifiedImageError:
        raise PictureError(f"{where}: no picture is in these {len(data)} bytes; expected {', '.join(IMAGE_FORMATS)}") from None
    except PictureError:
        raise
    except Exception as error:  # decoders raise whatever they like
        raise PictureError(f"{where}: the picture is damaged: {type(error).__name__}: {str(error)[:120]}") from None


def _flatten_image(picture: Pixels, where: str) -> Pixels:
    """RGB, upright, transparent parts white."""
    import PIL.Image
    from PIL import ImageOps

    try:
        picture = ImageOps.exif_transpose(picture)
        if picture.mode.startswith("I;16"):
            import numpy as np

            picture = PIL.Image.fromarray((np.asarray(picture) >> 8).astype("uint8"))
        if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
            picture = picture.convert("RGBA")
            picture = PIL.Image.alpha_composite(PIL.Image.new("RGBA", picture.size, "white"), picture)
        return picture.convert("RGB")
    except Exception as error:
        raise PictureError(f"{where}: the picture is damaged: {type(error).__name__}: {str(error)[:120]}") from None


def _from_array(source: Any, where: str) -> Pixels:
    import numpy as np
    import PIL.Image

    array = np.asarray(source.detach().cpu() if hasattr(source, "detach") else source)
    shape = array.shape
    if array.ndim == 3 and shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim not in (2, 3) or (array.ndim == 3 and shape[2] not in (3, 4)) or array.dtype.kind not in "uifb" or not array.size:
        raise PictureError(
            f"{where}: an array {shape} of {array.dtype}; expected (H, W), (H, W, 3) or (H, W, 4) of uint8, or floats 0 to 1"
        )
    check_size(shape[1], shape[0], where)
    low, high = array.min(), array.max()
    if array.dtype.kind == "f":
        if not (low >= 0 and high <= 1):
            raise PictureError(f"{where}: an array of floats from {low:g} to {high:g}; expected 0 to 1, or uint8 from 0 to 255")
        array = (array * 255).round()
    elif low < 0 or high > 255:
        raise PictureError(f"{where}: an array of numbers from {low} to {high}; expected 0 to 255")
    elif array.dtype.kind == "b":
        array = array * np.uint8(255)
    return _flatten_image(PIL.Image.fromarray(np.ascontiguousarray(array.astype(np.uint8))), where)


def _decode_video(source: Any, fps: float, max_frames: int, where: str) -> tuple[list[Pixels], list[float]]:
    """Frames of a video file, and their times."""
    try:
        import av  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise MissingDependency(
            f"{where}: video files need PyAV: pip install 'exl2nb[vision]'; a list of pictures works without it"
        ) from None

    data = _file_bytes(Path(source), where) if isinstance(source, (str, os.PathLike)) else bytes(source)
    if len(data) > MAX_BYTES:
        raise PictureError(f"{where}: the file has {len(data) >> 20} MiB; expected at most {MAX_BYTES >> 20} MiB")
    frames: list[Pixels] = []
    times: list[float] = []
    decoded = 0
    try:
        with av.open(io.BytesIO(data)) as held:
            stream = held.streams.video[0]
            length = float(stream.duration * stream.time_base) if stream.duration and stream.time_base else 0.0
            step = max(1 / fps, length / max_frames)
            for frame in held.decode(stream):
                check_size(frame.width, frame.height, where)
                decoded += frame.width * frame.height
                if decoded > MAX_DECODED:
                    raise PictureError(
                        f"{where}: the video has more than {MAX_DECODED / 1e9:.0f} billion pixels; give a shorter or smaller one"
                    )
                at = float(frame.time or 0.0)
                if at + 1e-6 >= len(frames) * step:
                    check_total(frame.width * frame.height * (len(frames) + 1), where)
                    frames.append(frame.to_image().convert("RGB"))
                    times.append(at)
                if len(frames) >= max_frames:
                    break
    except PictureError:
        raise
    except Exception as error:
        raise PictureError(f"{where}: the video cannot be read: {type(error).__name__}: {str(error)[:120]}") from None
    if not frames:
        raise PictureError(f"{where}: the video has no frame")
    return frames, times
