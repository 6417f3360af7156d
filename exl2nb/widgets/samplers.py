"""The folded samplers as traits and keywords of a widget."""

from __future__ import annotations

import traitlets as t

from exl2nb.widgets.protocol_samplers import SAMPLERS


def _trait(default: float | bool) -> t.TraitType:
    made = t.Bool(default) if isinstance(default, bool) else t.Int(default) if isinstance(default, int) else t.Float(default)
    return made.tag(sync=True, option=True)


class SamplerTraits(t.HasTraits):
    """One synced trait, also a keyword, for each of `SAMPLERS`, under the names of `SamplingParams`."""

    vars().update({one.name: _trait(one.neutral) for one in SAMPLERS})
