"""InternLM2: Llama under other names, its q, k and v fused and interleaved per KV head."""

from exl2nb.model.archs.base import ARCHS, Architecture
from exl2nb.model.names import Files, Names

ARCHS.register("InternLM2ForCausalLM")(
    Architecture(
        model_type="internlm2",
        qkv_bias="bias",
        o_bias="bias",
        defaults={"max_position_embeddings": 2048, "bias": True},
        names=Names(
            attention_norm="attention_norm",
            mlp_norm="ffn_norm",
            gate="feed_forward.w1",
            up="feed_forward.w3",
            down="feed_forward.w2",
        ),
        files=Files(
            renames=(
                ("model.tok_embeddings.", "model.embed_tokens."),
                ("output.", "lm_head."),
                (".attention.", ".self_attn."),
                (".wo.", ".o_proj."),
            ),
            fused=(("self_attn.wqkv", ("q", "k", "v")),),
            grouped=True,
        ),
    )
)
