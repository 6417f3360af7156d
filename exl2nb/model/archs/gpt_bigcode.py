"""StarCoder 1 (GPT-BigCode): GPT-2 with one KV head for all query heads, its matrices the usual way round."""

from dataclasses import replace

from exl2nb.model.archs import gpt2
from exl2nb.model.archs.base import ARCHS

ARCHS.register("GPTBigCodeForCausalLM")(
    replace(
        gpt2.ARCH,
        model_type="gpt_bigcode",
        defaults={**gpt2.ARCH.defaults, "num_key_value_heads": 1, "activation_function": "gelu_pytorch_tanh"},
        files=replace(
            gpt2.ARCH.files,
            renames=(
                ("transformer.ln_f.", "model.norm."),
                ("transformer.", "model."),
                (".h.", ".layers."),
                (".attn.c_proj.", ".self_attn.o_proj."),
                (".attn.", ".self_attn."),
                (".wte.", ".embed_tokens."),
            ),
            transposed=False,
        ),
    )
)
