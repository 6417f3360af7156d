"""Where the pictures of a prompt are: the text a placeholder becomes, the tokens that take its rows, and every token's positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from exl2nb.core.errors import PictureError
from exl2nb.model.batch import PictureRows
from exl2nb.model.vision.families import Features, Vision
from exl2nb.model.vision.pictures import Picture
from exl2nb.model.vision.tower import Grid

MAX_TOKENS = 1 << 22  # of all pictures of a prompt: 256 of Qwen2-VL's largest
Piece = Callable[[int], str]


@dataclass(frozen=True, eq=False)
class Placed:
    """A picture's tokens in a prompt. digest: of its content. tokens: their indices, rising. grid: in patches."""

    digest: bytes
    tokens: tuple[int, ...]
    grid: Grid
    is_video: bool = False


@dataclass(frozen=True, eq=False)
class PromptPictures:
    """The pictures of one prompt of N tokens.

    rows: int64 `(n,)`, the tokens that are pictures', rising. values: f32 `(n, H)`, in place of the embedding's rows. deep: f32 `(n, H)`
    each, added to the stream after layer 0, 1, ... axes: int32 `(N, 3)`, positions in time, height and width, of models that have three;
    else None. delta: what is added to a later token's index to give its position. page_ids: the prompt with each picture token replaced by
    a negative number of its content, by which pages are known. blocks: (first, last + 1) of runs whose tokens see each other; empty: none
    do. images: each picture.
    """

    rows: np.ndarray
    values: Tensor
    deep: tuple[Tensor, ...]
    axes: np.ndarray | None
    delta: int
    page_ids: tuple[int, ...]
    blocks: tuple[tuple[int, int], ...]
    images: tuple[Placed, ...]

    @property
    def end(self) -> int:
        """The token after the last one of a picture."""
        return int(self.rows[-1]) + 1

    @property
    def highest(self) -> int:
        """The highest position of the prompt."""
        return int(self.axes.max()) if self.axes is not None else len(self.page_ids) - 1

    def positions(self, start: int, count: int) -> np.ndarray:
        """Positions int32 `(count,)` of tokens from `start` on; of a picture's tokens those in time."""
        at = np.arange(start, start + count, dtype=np.int32)
        if self.axes is None:
            return at
        known = max(0, min(count, len(self.axes) - start))
        at[known:] += self.delta
        at[:known] = self.axes[start : start + known, 0]
        return at

    def within(self, start: int, count: int, at: int) -> PictureRows | None:
        """The pictures' part of tokens `start` to `start + count`, which are rows `at` and later of a step; None: there is none."""
        first, last = np.searchsorted(self.rows, (start, start + count)).tolist()
        if first == last:
            return None
        rows = self.rows[first:last]
        blocks = tuple(
            (at + max(a, start) - start, at + min(b, start + count) - start) for a, b in self.blocks if a < start + count and b > start
        )
        return PictureRows(
            rows=torch.from_numpy(rows - start + at),
            values=self.values[first:last],
            deep=tuple(part[first:last] for part in self.deep),
            axes=None if self.axes is None else torch.from_numpy(self.axes[rows].astype(np.int64)),
            blocks=blocks,
        )

    def block_end(self, token: int) -> int:
        """The token after the block that holds `token`, or `token` itself where none holds it: where a prompt may be cut."""
        return next((b for a, b in self.blocks if a < token < b), token)


def mark_of(vision: Vision, picture_is_video: bool, piece: Piece) -> str:
    """What stands in a prompt for one picture before it is expanded."""
    marks = vision.marks
    if picture_is_video:
        assert marks.video is not None, "asked only of models that read videos"
        bare = piece(marks.video)
        return f"{piece(marks.start)}{bare}{piece(marks.end)}" if marks.start is not None and marks.end is not None else bare
    bare = piece(marks.image if marks.mark is None else marks.mark)
    return f"{piece(marks.start)}{bare}{piece(marks.end)}" if marks.start is not None and marks.end is not None else bare


def expand_placeholders(text: str, vision: Vision, pictures: Sequence[Picture], grids: Sequence[Grid], piece: Piece) -> str:
    """The prompt with every placeholder replaced by its picture's tokens, as text.

    Raises:
        PictureError: there are more or fewer placeholders than pictures, or pictures of millions of tokens.
    """
    marks, count = vision.marks, sum(map(vision.tokens, grids))
    if count > MAX_TOKENS:
        raise PictureError(f"the pictures take {count} tokens; expected at most {MAX_TOKENS}: give fewer, or smaller ones")
    image = piece(marks.image if marks.mark is None else marks.mark)
    video = piece(marks.video) if marks.video is not None else None
    queues = {image: [i for i, one in enumerate(pictures) if not one.is_video]}
    if video is not None:
        queues[video] = [i for i, one in enumerate(pictures) if one.is_video]
    for mark, wanted in queues.items():
        if (found := text.count(mark)) != len(wanted):
            raise PictureError(
                f"the prompt holds {mark!r} {found} times, and {len(wanted)} pictures or videos are to stand there; the chat template "
                "leaves pictures out, or a message holds that text itself: leave it out of the text"
            )
    for mark, wanted in queues.items():
        parts = text.split(mark)
        for at, i in enumerate(wanted):
            parts[at] += _tokens_text(vision, pictures[i], grids[i], mark, piece)
            if marks.style == "frames" and pictures[i].is_video:  # the start and end marks belong to each frame
                start, end = piece(_require_token(marks.start)), piece(_require_token(marks.end))
                before = parts[at].removesuffix(_tokens_text(vision, pictures[i], grids[i], mark, piece))
                if before.endswith(start) and parts[at + 1].startswith(end):
                    parts[at] = before.removesuffix(start) + _tokens_text(vision, pictures[i], grids[i], mark, piece)
                    parts[at + 1] = parts[at + 1].removeprefix(end)
        text = "".join(parts)
    return text


def _require_token(token: int | None) -> int:
    assert token is not None, "this style of marks has all of them"
    return token


def _tokens_text(vision: Vision, picture: Picture, grid: Grid, mark: str, piece: Piece) -> str:
    marks, count = vision.marks, vision.tokens(grid)
    if marks.style == "rows":
        across = grid[2] // vision.merge
        row = piece(marks.image) * across
        return (row + "[IMG_BREAK]") * (grid[1] // vision.merge - 1) + row + "[IMG_END]"
    if marks.style == "framed":
        return f"\n\n{mark}{piece(marks.image) * count}{piece(_require_token(marks.end))}\n\n"
    if marks.style == "frames" and picture.is_video:
        start, end, each = piece(_require_token(marks.start)), piece(_require_token(marks.end)), count // grid[0]
        return "".join(f"<{at:.1f} seconds>{start}{mark * each}{end}" for at in _middle_times(picture.times_s, vision.tower.temporal))
    return mark * count


def _middle_times(times: Sequence[float], temporal: int) -> list[float]:
    """The middle of the first and the last time of each patch in time."""
    padded = [*times, *[times[-1]] * (-len(times) % temporal)]
    return [(padded[i] + padded[i + temporal - 1]) / 2 for i in range(0, len(padded), temporal)]


def assign_picture_tokens(
    ids: Sequence[int], vision: Vision, pictures: Sequence[Picture], encoded: Sequence[tuple[Features, Grid]], *, whole: bool, axes: bool
) -> PromptPictures:
    """Give the picture tokens of a prompt to its pictures, in order.

    Args:
        ids: the expanded prompt. encoded: of each picture. whole: the tokens of a picture see each other. axes: three positions per token.

    Raises:
        PictureError: the prompt has another number of picture tokens than the pictures have rows.
    """
    marks, known = vision.marks, np.asarray(ids)
    kinds = {marks.image: False, **({marks.video: True} if marks.video is not None else {})}
    rows = np.flatnonzero(np.isin(known, list(kinds)))
    need = sum(len(features.rows) for features, _ in encoded)
    if len(rows) != need:
        raise PictureError(f"the prompt has {len(rows)} picture tokens; its pictures need {need}: a message holds such a token itself")
    images, page_ids, at = [], list(ids), 0
    for picture, (features, grid) in zip(pictures, encoded):
        mine = rows[at : at + len(features.rows)].tolist()
        at += len(mine)
        if any(kinds[ids[token]] != picture.is_video for token in mine):
            raise PictureError("pictures and videos are not in the order in which they stand in the prompt")
        images.append(Placed(picture.digest, tuple(mine), grid, picture.is_video))
        for token, number in zip(mine, picture_key_numbers(picture.digest, len(mine))):
            page_ids[token] = number
    places = None
    delta = 0
    if axes:
        places = three_positions(len(ids), images, vision, [picture.times_s for picture in pictures])
        delta = int(places.max()) + 1 - len(ids)
    return PromptPictures(
        rows=rows.astype(np.int64),
        values=torch.cat([features.rows for features, _ in encoded]),
        deep=tuple(torch.cat(parts) for parts in zip(*(features.deep for features, _ in encoded))),
        axes=places,
        delta=delta,
        page_ids=tuple(page_ids),
        blocks=tuple(run for image in images for run in contiguous_runs(image.tokens)) if whole else (),
        images=tuple(images),
    )


def picture_key_numbers(digest: bytes, count: int) -> list[int]:
    """Negative numbers that stand for a picture's tokens in page keys: 31 bits each of a hash of its content and the token's number."""
    stream = b"".join(blake2b(digest + block.to_bytes(4, "little"), digest_size=64).digest() for block in range(-(-count // 16)))
    return (np.frombuffer(stream, np.uint32)[:count].astype(np.int64) % (2**31) - 2**31).tolist()


def contiguous_runs(tokens: Sequence[int]) -> list[tuple[int, int]]:
    """(first, last + 1) of the parts without a gap."""
    cuts = [i for i in range(1, len(tokens)) if tokens[i] != tokens[i - 1] + 1]
    return [(tokens[a], tokens[b - 1] + 1) for a, b in zip([0, *cuts], [*cuts, len(tokens)])]


def three_positions(count: int, images: Sequence[Placed], vision: Vision, times: Sequence[Sequence[float]]) -> np.ndarray:
    """Positions in time, height and width int32 `(count, 3)` of a prompt's tokens.

    A text's three are equal and go on by one. A picture's patches count from the position where it begins, and the text behind it goes on
    at the larger of its sides. Frames of a video that is split into frames are pictures of their own.
    """
    where = np.zeros((count, 3), np.int32)
    at = token = 0
    for image, seconds in zip(images, times):
        t, h, w = image.grid[0], image.grid[1] // vision.merge, image.grid[2] // vision.merge
        step = 1.0
        if image.is_video and vision.seconds:
            step = vision.seconds * _step_seconds(seconds, vision.tower.temporal)
        parts = [image.tokens]
        if image.is_video and vision.marks.style == "frames":
            parts, t = [image.tokens[i : i + h * w] for i in range(0, len(image.tokens), h * w)], 1
        for part in parts:
            text = part[0] - token
            where[token : part[0]] = (at + np.arange(text))[:, None]
            at += text
            grid = np.stack(np.meshgrid((np.arange(t) * step).astype(np.int64), np.arange(h), np.arange(w), indexing="ij"), -1)
            where[list(part)] = at + grid.reshape(-1, 3)
            at, token = at + max(h, w), part[-1] + 1
    where[token:] = (at + np.arange(count - token))[:, None]
    return where


def _step_seconds(times: Sequence[float], temporal: int) -> float:
    """Seconds between two patches in time, at the video's rate."""
    return temporal * (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else float(temporal)
