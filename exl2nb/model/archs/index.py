"""Index: Llama whose head's rows are normalised (`norm_head`); EXL2 files hold them normalised already."""

from collections.abc import Mapping
from typing import Any

from exl2nb.model.archs.base import ARCHS, Architecture
from exl2nb.model.fields import Fields
from exl2nb.model.names import Files


def features(fields: Fields, sizes: Mapping[str, int]) -> Mapping[str, Any]:
    """`norm_head`, true or 1 where it is absent."""
    value = fields.raw.get("norm_head", True)
    if value not in (0, 1):
        raise fields.refuse("norm_head", value, "true or false")
    return {"files": Files(unit_head=bool(value))}


ARCHS.register("IndexForCausalLM")(Architecture(model_type="index", defaults={"max_position_embeddings": 4096}, read=features))
