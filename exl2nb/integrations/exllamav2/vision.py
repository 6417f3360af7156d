"""exllamav2's vision tower and embeddings: a picture is a range of ids of its own, from 10**9 on, until the job places it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from exl2nb.core.errors import OptionError
from exl2nb.integrations.exllamav2.absent import Documented, table
from exl2nb.io import hub
from exl2nb.model.loader import read_model_config
from exl2nb.model.vision.encoder import VisionEncoder, load_encoder
from exl2nb.model.vision.pictures import Picture
from exl2nb.model.vision.prompt import PromptPictures
from exl2nb.ops.placement import pick_device

if TYPE_CHECKING:
    from exl2nb.integrations.exllamav2.loading import ExLlamaV2, ExLlamaV2Config, ExLlamaV2Tokenizer

FIRST_ID = 1_000_000_000


class ExLlamaV2VisionTower(Documented):
    """The tower of a model that sees.

    Args:
        config: prepared.
    """

    absent: ClassVar = table(
        layers="archparams modules pre_project pre_project_idx position_emb_func preprocess_func postprocess_func video_preprocess_func"
        " video_postprocess_func rope_cos rope_sin p_maxedge",
        forward="forward forward_chunk process",
        devices="load_autosplit load_autosplit_gen",
        parallel="load_tp load_tp_gen tp_context",
    )

    def __init__(self, config: ExLlamaV2Config) -> None:
        self.config, self._encoder = config, None

    def load(self, progress: bool = False, callback: Any = None, **_: Any) -> None:
        """Read its weights. Arguments: ignored.

        Raises:
            OptionError: the model has no tower.
        """
        folder = hub.resolve(self.config.model_dir)
        self._encoder = load_encoder(folder, read_model_config(folder), device=pick_device(None))
        if self._encoder is None:
            raise OptionError(f"ExLlamaV2VisionTower: {folder} has no vision tower; the model reads text alone")

    def unload(self) -> None:
        """Give the memory back."""
        if self._encoder is not None:
            self._encoder.close()
        self._encoder = None

    @property
    def encoder(self) -> VisionEncoder:
        """The loaded tower.

        Raises:
            OptionError: it is not loaded.
        """
        if self._encoder is None:
            raise OptionError("ExLlamaV2VisionTower: not loaded; call load() first")
        return self._encoder

    def get_image_embeddings(
        self, model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer, image: Any, text_alias: str | None = None, embeddings_cpu: bool = True
    ) -> ExLlamaV2MMEmbedding:
        """A picture for a prompt, which holds its `text_alias` where the picture is to stand. embeddings_cpu: ignored."""
        return ExLlamaV2MMEmbedding(self.encoder, tokenizer, Picture.of(image), text_alias)

    def get_video_embeddings(
        self, model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer, video: Any, text_alias: str | None = None, embeddings_cpu: bool = True
    ) -> ExLlamaV2MMEmbedding:
        """The same of a video: a list of pictures, two per second."""
        return ExLlamaV2MMEmbedding(self.encoder, tokenizer, Picture.video(video), text_alias)


class ExLlamaV2MMEmbedding(Documented):
    """A picture in a prompt.

    Attributes:
        text_alias: what stands for it in texts. first_index: its first id; mm_length: how many ids it has.
    """

    absent: ClassVar = table(pictures="embeddings model pre_tokens post_tokens thw_grid get_size_in_bytes")
    _next = FIRST_ID

    def __init__(self, encoder: VisionEncoder, tokenizer: ExLlamaV2Tokenizer, picture: Picture, text_alias: str | None) -> None:
        self.encoder, self.picture = encoder, picture
        self.metadata: dict[str, Any] = {}  # for the caller
        self.mm_length = encoder.tokens(picture)
        self.first_index = ExLlamaV2MMEmbedding._next
        ExLlamaV2MMEmbedding._next += self.mm_length
        self.text_alias = text_alias or f"<$EMB_{self.first_index}$>"
        mark = encoder.mark(tokenizer.inner.piece, video=picture.is_video)
        self.expanded = encoder.expanded(mark, [picture], tokenizer.inner.piece)

    @property
    def length(self) -> int:
        """How many ids it has."""
        return self.mm_length

    def get_ids(self) -> list[int]:
        """Its ids."""
        return list(range(self.first_index, self.first_index + self.mm_length))

    def get_ids_tensor(self) -> Tensor:
        """Its ids as int64 `(1, n)`."""
        return torch.tensor([self.get_ids()], dtype=torch.int64)

    def get_vision_token_range(self) -> tuple[int, int]:
        """Its first id, and the one behind its last."""
        return self.first_index, self.first_index + self.mm_length

    @property
    def _token(self) -> int:
        marks = self.encoder.vision.marks
        return marks.video if self.picture.is_video and marks.video is not None else marks.image


def encode_with(tokenizer: Any, text: str, embeddings: Sequence[ExLlamaV2MMEmbedding], **options: Any) -> list[int]:
    """Ids of a text in which aliases stand for pictures.

    Raises:
        OptionError: an alias is missing, or occurs twice.
    """
    for one in embeddings:
        if text.count(one.text_alias) != 1:
            raise OptionError(f"encode: the text holds {one.text_alias!r} {text.count(one.text_alias)} times; expected once per embedding")
    order = sorted(embeddings, key=lambda one: text.index(one.text_alias))
    for one in order:
        text = text.replace(one.text_alias, one.expanded)
    ids = tokenizer.encode(text, add_special=False, parse_special=True)
    at = 0
    for one in order:
        for number in range(one.mm_length):
            at = ids.index(one._token, at)
            ids[at] = one.first_index + number
    return ids


def placed_prompt(
    prompt: Sequence[int], embeddings: Sequence[ExLlamaV2MMEmbedding], *, whole: bool, axes: bool
) -> tuple[list[int], PromptPictures]:
    """The prompt with the ids of its pictures as the model has them, and where they are.

    Raises:
        OptionError: an id of a picture that is not among the embeddings.
    """
    ids, order = list(prompt), list[ExLlamaV2MMEmbedding]()
    for at, token in enumerate(ids):
        if token < FIRST_ID:
            continue
        one = next((one for one in embeddings if one.first_index <= token < one.first_index + one.mm_length), None)
        if one is None:
            raise OptionError(
                f"ExLlamaV2DynamicJob: id {token} is a picture's that is not in embeddings; give those the prompt was encoded with"
            )
        if one not in order:
            order.append(one)
        ids[at] = one._token
    if len(order) != len(embeddings):
        raise OptionError(f"ExLlamaV2DynamicJob: {len(embeddings)} embeddings, {len(order)} of them in input_ids; encode with embeddings=")
    return ids, order[0].encoder.placed(ids, [one.picture for one in order], whole=whole, axes=axes)
