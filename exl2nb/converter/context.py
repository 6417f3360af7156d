"""What every stage of a run is given. Knows nothing of what stages do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from exl2nb.converter.weights import DenseWeights
from exl2nb.converter.work import Work
from exl2nb.core.progress import Meter, Sink


@dataclass(frozen=True)
class Context:
    """weights: the dense model's tensors. work: where work in progress is filed. sink: takes the events. check: raises to stop."""

    weights: DenseWeights
    work: Work
    sink: Sink | None
    check: Callable[[], None]

    def meter(self, stage: str, *, total: int, unit: str) -> Meter:
        """The progress of one stage."""
        return Meter(stage, total=total, unit=unit, sink=self.sink)
