"""llama.cpp's side of compare_llamacpp.py. Runs in an environment of its own that holds llama-cpp-python and gguf, and nothing of exl2nb.

peer_llamacpp.py make SHAPE.json OUT.gguf      write a random Llama at that shape, as `llama-quantize Q4_0` lays it out
peer_llamacpp.py convert MODEL OUT.gguf        a Llama directory in fp16 with a byte-level BPE as F16, its own weights and tokenizer
peer_llamacpp.py serve MODEL.gguf THREADS      answer one JSON request per line with one JSON result per line
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np


def make(shape: dict, out: str) -> None:
    """All matrices and the embedding Q4_0, the head Q6_K, norms f32: what llama.cpp's own quantiser writes for Q4_0."""
    import gguf

    rng = np.random.default_rng(0)
    h, inner, head_dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    q, kv = shape["num_attention_heads"] * head_dim, shape["num_key_value_heads"] * head_dim
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_name("random")
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(h)
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_feed_forward_length(inner)
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(shape["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)

    def q4_0(name: str, rows: int, cols: int, std: float) -> None:
        """Blocks of 32: one f16 step, 16 bytes of nibbles; a nibble's standard deviation about its zero is 4.6 steps."""
        data = rng.integers(0, 256, (rows, cols // 32, 18), dtype=np.uint8)
        data[:, :, :2] = np.frombuffer(np.float16(std / 4.6).tobytes(), np.uint8)
        writer.add_tensor(name, data.reshape(rows, -1), raw_dtype=gguf.GGMLQuantizationType.Q4_0)

    def q6_k(name: str, rows: int, cols: int, std: float) -> None:
        """Blocks of 256: 128 bytes low nibbles, 64 bytes high pairs, 16 int8 scales, one f16 step."""
        data = rng.integers(0, 256, (rows, cols // 256, 210), dtype=np.uint8)
        data[:, :, 192:208] = rng.integers(32, 64, (rows, cols // 256, 16), dtype=np.uint8)
        data[:, :, 208:] = np.frombuffer(np.float16(std / 18.5 / 48).tobytes(), np.uint8)
        writer.add_tensor(name, data.reshape(rows, -1), raw_dtype=gguf.GGMLQuantizationType.Q6_K)

    def ones(name: str) -> None:
        writer.add_tensor(name, np.ones(h, np.float32))

    depth = (2 * shape["num_hidden_layers"]) ** 0.5
    q4_0("token_embd.weight", shape["vocab_size"], h, 0.5)
    for i in range(shape["num_hidden_layers"]):
        ones(f"blk.{i}.attn_norm.weight")
        ones(f"blk.{i}.ffn_norm.weight")
        for name, n, k in (("attn_q", q, h), ("attn_k", kv, h), ("attn_v", kv, h), ("ffn_gate", inner, h), ("ffn_up", inner, h)):
            q4_0(f"blk.{i}.{name}.weight", n, k, k**-0.5)
        q4_0(f"blk.{i}.attn_output.weight", h, q, q**-0.5 / depth)
        q4_0(f"blk.{i}.ffn_down.weight", h, inner, inner**-0.5 / depth)
    ones("output_norm.weight")
    q6_k("output.weight", shape["vocab_size"], h, 2 * h**-0.5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def convert(model: Path, out: str) -> None:
    """Matrices F16, norms f32. llama.cpp rotates neighbours where the directory rotates halves, so rows of Q and K change places."""
    import gguf

    shape = json.loads((model / "config.json").read_text())
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_name(model.name)
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    writer.add_rope_dimension_count(shape["head_dim"])
    writer.add_layer_norm_rms_eps(shape["rms_norm_eps"])
    writer.add_rope_freq_base(shape["rope_theta"])
    writer.add_vocab_size(shape["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    texts = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    special = {one["id"] for one in tokenizer["added_tokens"] if one["special"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts)
    writer.add_token_types([gguf.TokenType.CONTROL if at in special else gguf.TokenType.NORMAL for at in range(len(texts))])
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(shape["bos_token_id"])
    writer.add_eos_token_id(shape["eos_token_id"])
    writer.add_add_bos_token(True)
    places = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        **{f"self_attn.{name}_proj": f"attn_{to}" for name, to in zip("qkvo", ("q", "k", "v", "output"))},
        **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
    }
    for file in sorted(model.glob("*.safetensors")):
        for name, data in tensors(file):
            stem = name.removesuffix(".weight")
            if stem.startswith("model.layers."):
                _, _, layer, stem = stem.split(".", 3)
                prefix = f"blk.{layer}."
            else:
                prefix = ""
            if stem in ("self_attn.q_proj", "self_attn.k_proj"):
                count = heads if stem == "self_attn.q_proj" else kv_heads
                data = data.reshape(count, 2, -1, data.shape[-1]).swapaxes(1, 2).reshape(data.shape)
            writer.add_tensor(f"{prefix}{places[stem]}.weight", data.astype(np.float32) if data.ndim == 1 else data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Name and values of each tensor of a safetensors file in fp16."""
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8 : 8 + size]).items():
        if name != "__metadata__":
            assert entry["dtype"] == "F16", f"{name} is {entry['dtype']}; expected F16"
            begin, end = (8 + size + at for at in entry["data_offsets"])
            yield name, np.frombuffer(data[begin:end], np.float16).reshape(entry["shape"])


class Peer:
    """The C API through ctypes: no Python between two tokens but one argmax."""

    def __init__(self, path: str, threads: int) -> None:
        import llama_cpp as lib

        self.lib = lib
        self.quiet = lib.llama_log_callback(lambda level, text, data: None)  # kept alive: C holds the pointer
        lib.llama_log_set(self.quiet, None)
        lib.llama_backend_init()
        self.model = lib.llama_load_model_from_file(path.encode(), lib.llama_model_default_params())
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = 1024, 512, 512
        params.n_threads = params.n_threads_batch = threads
        self.context = lib.llama_new_context_with_model(self.model, params)
        self.vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))

    def step(self, ids: list[int]) -> int:
        """Run tokens; the most probable next one."""
        array = (self.lib.llama_token * len(ids))(*ids)
        code = self.lib.llama_decode(self.context, self.lib.llama_batch_get_one(array, len(ids)))
        assert code == 0, f"llama_decode: {code}"
        logits = self.lib.llama_get_logits_ith(self.context, -1)
        return int(np.ctypeslib.as_array(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (self.vocab_size,)).argmax())

    def measure(self, prompt_tokens: int, new_tokens: int, seed: int) -> dict:
        """Seconds for the prompt, and for the new tokens after it."""
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        ids = np.random.default_rng(seed).integers(3, 200, prompt_tokens).tolist()
        start = time.perf_counter()
        token = self.step(ids)
        middle = time.perf_counter()
        for _ in range(new_tokens):
            token = self.step([token])
        return {"prompt_tokens": prompt_tokens, "prompt_s": middle - start, "new_tokens": new_tokens, "new_s": time.perf_counter() - middle}


def serve(path: str, threads: int) -> None:
    peer = Peer(path, threads)
    for line in sys.stdin:
        print(json.dumps(peer.measure(**json.loads(line))), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(json.loads(Path(sys.argv[2]).read_text()), sys.argv[3])
    elif sys.argv[1] == "convert":
        convert(Path(sys.argv[2]), sys.argv[3])
    else:
        serve(sys.argv[2], int(sys.argv[3]))
