"""From a request to the sequences that run it. Knows no threads."""

from __future__ import annotations

from exl2nb.generator.beams import Beams
from exl2nb.generator.cfg import Guided
from exl2nb.generator.request import Request
from exl2nb.generator.sequence import Sequence
from exl2nb.tokenizer.tokenizer import Tokenizer


def sequences_for(request: Request, tokenizer: Tokenizer, *, context: int) -> list[Sequence]:
    """The sequences of a request; the first one has the channel that the caller listens to."""
    if request.beams > 1:
        return Beams.of(request, tokenizer, context=context).members
    if request.guided:
        return Guided.of(request, tokenizer, context=context).members
    return [Sequence(request, tokenizer, context=context)]
