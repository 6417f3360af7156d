"""What every loaded model offers to the code that runs steps: one protocol, and a record of what it can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from exl2nb.core.errors import OptionError
from exl2nb.ops.placement import Placement

if TYPE_CHECKING:
    from torch import Tensor

    from exl2nb.cache.pool import KVCache
    from exl2nb.cache.spec import CacheSpec
    from exl2nb.model.batch import Batch
    from exl2nb.model.model import Ahead

Feature = Literal["adapters", "hidden states", "matrices", "pictures", "the logit lens", "trace and patch"]


@dataclass(frozen=True, kw_only=True)
class ChunkPolicy:
    """How the scheduler cuts prompts into steps.

    Attributes:
        max_tokens: prompt tokens of one step, at most.
        first_tokens: prompt tokens of the first step, before the time of a step was measured.
        share_tokens: what each prompt of a step gets at least. Chunks beside decodes are multiples of it.
        timed: chunks follow the measured speed, so that a step ends soon. False: steps of prompts
            alone take `max_tokens`, whatever their time.
    """

    max_tokens: int
    first_tokens: int
    share_tokens: int
    timed: bool


HOST_CHUNKS = ChunkPolicy(max_tokens=512, first_tokens=64, share_tokens=32, timed=True)
# A GPU unpacks all weights for every chunk, however short it is: smaller chunks leave its multipliers idle.
GPU_CHUNKS = ChunkPolicy(max_tokens=2048, first_tokens=2048, share_tokens=1024, timed=False)


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a model can do, and where. It never changes.

    Attributes:
        placement: the device of every layer and of its cache.
        draw_device: a GPU: decode steps are captured as CUDA graphs, and tokens are drawn there.
            "cpu": the host draws.
        fused_draw: `StepRunner.step_draw` runs a step and draws its tokens in one call.
        draws_ahead: `StepRunner.draw_ahead` begins a step that draws its tokens, and returns at once.
        captures_drafts: captured steps may hold several tokens of one sequence.
        rope_switch: sequences of more tokens than this use other RoPE factors; None: all use the same.
        chunks: how prompts are cut.
        missing: features that the model refuses.
        missing_why: the reason, for messages.
    """

    placement: Placement
    draw_device: str = "cpu"
    fused_draw: bool = False
    draws_ahead: bool = False
    captures_drafts: bool = False
    rope_switch: int | None = None
    chunks: ChunkPolicy = HOST_CHUNKS
    missing: frozenset[Feature] = frozenset()
    missing_why: str = ""

    @property
    def captures(self) -> bool:
        """Whether decode steps run as captured graphs on `draw_device`."""
        return self.draw_device != "cpu"

    def require(self, feature: Feature) -> None:
        """Raise OptionError if the model refuses a feature."""
        if feature in self.missing:
            raise OptionError(f"{feature}: {self.missing_why}, which this does not know yet; load it on one device")


class StepRunner(Protocol):
    """Runs steps: what engine, executors and draft models need of a model.

    Models on the CPU, on a GPU, split over devices and divided among ranks all implement it. One thread
    at a time may call it.
    """

    @property
    def capabilities(self) -> Capabilities:
        """What the model can do."""
        ...

    def new_cache(self, spec: CacheSpec, /) -> KVCache:
        """Allocate a cache where the layers are."""
        ...

    def forward(self, batch: Batch, cache: KVCache, /) -> Tensor:
        """Run a step; returns logits f32 `(R, V)` of the batch's logit rows."""
        ...

    def step_draw(self, batch: Batch, cache: KVCache, settings: Tensor, top: int, columns: int | None = None, /) -> tuple[Tensor, Tensor]:
        """Run a step and draw its tokens in one call, if `Capabilities.fused_draw`; see `Model.step_draw`."""
        ...

    def draw_ahead(
        self,
        batch: Batch,
        cache: KVCache,
        draw: tuple[Tensor, int, int | None],
        sources: tuple[Tensor, Tensor] | None = None,
        /,
    ) -> Ahead:
        """Begin a step that draws its tokens, if `Capabilities.draws_ahead`; see `Model.draw_ahead`."""
        ...

    def close(self) -> None:
        """Free the memory."""
        ...
