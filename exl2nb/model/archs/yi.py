"""Yi as first published: Llama whose norms are called ln1 and ln2 (later files are plain Llama)."""

from exl2nb.model.archs.base import ARCHS, Architecture
from exl2nb.model.names import Files, Names

ARCHS.register("YiForCausalLM")(
    Architecture(
        model_type="yi",
        defaults={"max_position_embeddings": 4096},
        names=Names(attention_norm="ln1", mlp_norm="ln2"),
        files=Files(renames=((".input_layernorm.", ".ln1."), (".post_attention_layernorm.", ".ln2."))),
    )
)
