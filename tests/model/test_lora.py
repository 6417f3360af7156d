"""Adapters that PEFT wrote: the logits of PEFT on Transformers for many kinds of them; hostile files are named errors."""

import json
import os
import re

import pytest
import torch

from exl2nb.cache.pool import KVCache
from exl2nb.core.errors import ConfigError, Exl2Error, FormatError, ModelNotFound, OptionError
from exl2nb.io.safetensors import SafetensorsFile
from exl2nb.io.safetensors import save as save_tensors
from exl2nb.model.batch import Batch, SequenceSlice
from exl2nb.model.config_fields import Fields
from exl2nb.model.loader import load_model
from exl2nb.model.lora import adapter_bytes, adapter_changes, change_sizes, read_lora
from exl2nb.model.lora_merge import merge
from exl2nb.model.lora_settings import read_scales
from exl2nb.ops.lora_table import FUSED_LORA_OPS, LoraStrips

from .test_model import error, run
from .tiny import ids_of, truth
from .zoo import build, write

os.environ.setdefault("PEFT_DISABLE_TELEMETRY", "1")
LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
KINDS = {  # of the zoo, options of PEFT's LoraConfig
    "llama": ("llama", {"target_modules": LLAMA}),
    "llama, few": ("llama", {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]}),
    "llama, rslora, patterns": (
        "llama",
        {"target_modules": LLAMA, "use_rslora": True, "rank_pattern": {"q_proj": 7, "layers.1.mlp.up_proj": 3},
         "alpha_pattern": {r".*\.0\.self_attn\.v_proj": 9, "down_proj": 2}},
    ),
    "llama, dora": ("llama", {"target_modules": LLAMA, "use_dora": True}),
    "llama, embedding and head": ("llama", {"target_modules": ["embed_tokens", "lm_head", "v_proj"]}),
    "llama, norms": ("llama", {"target_modules": ["v_proj"], "modules_to_save": ["input_layernorm", "post_attention_layernorm", "norm"]}),
    "qwen2, all biases": ("qwen2", {"target_modules": ["q_proj", "o_proj", "up_proj"], "bias": "all"}),
    "qwen2, dora with biases": ("qwen2", {"target_modules": LLAMA, "use_dora": True, "bias": "lora_only"}),
    "phi3, fused": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]}),
    "gemma2, norms": ("gemma2", {"target_modules": ["embed_tokens", *LLAMA], "modules_to_save": ["post_feedforward_layernorm", "norm"]}),
    "gpt2, fused and transposed": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "gpt2, biases and norms": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "bias": "all", "modules_to_save": ["ln_f"]}),
    "glm4, post norms": ("glm4", {"target_modules": ["gate_up_proj", "q_proj"], "modules_to_save": ["post_self_attn_layernorm"]}),
    "cohere, parallel": ("cohere", {"target_modules": LLAMA, "modules_to_save": ["input_layernorm", "norm"]}),
    "granite, factors": ("granite", {"target_modules": ["embed_tokens", *LLAMA], "modules_to_save": ["norm"]}),
    "starcoder2, layer norms": ("starcoder2", {"target_modules": ["q_proj", "c_fc", "c_proj"], "bias": "all"}),
    "mixtral, attention": ("mixtral", {"target_modules": ["q_proj", "o_proj"]}),
    "B with biases": ("llama", {"target_modules": ["q_proj", "gate_proj"], "lora_bias": True}),
}  # fmt: skip


def adapted(arch, options, directory, *, seed=0, rank=5, alpha=12):
    """A random adapter in a directory, and the model with it."""
    peft = pytest.importorskip("peft")
    model = build(arch)
    write(arch, model, directory / "model")
    with_lora = peft.get_peft_model(
        model, peft.LoraConfig(r=rank, lora_alpha=alpha, init_lora_weights=False, task_type="CAUSAL_LM", **options)
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in with_lora.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "lora_magnitude" in name:
                parameter.mul_(1 + 0.3 * noise)
            elif "lora_" in name:
                parameter.copy_((0.3 * noise * parameter.shape[-1] ** -0.5).half())
            elif "modules_to_save" in name or (name.endswith("bias") and options.get("bias", "none") != "none"):
                parameter.add_(0.2 * noise)
    with_lora.save_pretrained(directory / "lora", safe_serialization=True)
    return with_lora.eval()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_peft(kind, tmp_path):
    arch, options = KINDS[kind]
    twin = adapted(arch, options, tmp_path)
    model = load_model(tmp_path / "model")
    ids = ids_of(model.config.vocab_size, 1, 40)
    network, program = model.network_and_program
    made = adapter_changes(read_lora(tmp_path / "lora", model.config), model.config, network, program)
    assert adapter_bytes(tmp_path / "lora", model.config) == sum(change.nbytes for change in made.values()), "as planned"
    second = adapter_bytes(tmp_path / "lora", model.config, strips=True) - adapter_bytes(tmp_path / "lora", model.config)
    inside = {op: change for op, change in made.items() if change.is_plain and isinstance(program.steps[op], FUSED_LORA_OPS)}
    copied = [
        LoraStrips.of(part, torch.arange(len(part.a)), [(part.first, part.b.shape[1])])
        for change in inside.values()
        for part in change.parts
    ]
    assert second >= sum(copy.nbytes for copy in copied), "and its copy for the GPU"
    if all(change.norm is None and change.norm_bias is None for change in made.values()):
        assert second == sum(copy.nbytes for copy in copied)
    model.set_adapters([made])
    span = SequenceSlice(ids=ids[0].tolist(), start=0, pages=[0], logit_rows="all", adapter=0)
    found = model.forward(Batch.build([span]), KVCache(model.cache_spec(256, mode="fp32")))
    want = truth(twin, ids)[0]
    plain = run(model, ids[0])
    assert error(found, want) < 1e-4, (error(found, want), error(plain, want))
    assert error(plain, want) > 0.02, "the adapter changes the logits"


def _rows_in_phi3(config, role):
    """Where a role is in phi3's fused matrices."""
    up, kv = config.intermediate_size, config.kv_size
    sizes = {"q": config.q_size, "k": kv, "v": kv} if role in "qkv" else {"gate": up, "up": up}
    first = sum(size for name, size in sizes.items() if [*sizes].index(name) < [*sizes].index(role))
    return slice(first, first + sizes[role])


@pytest.mark.parametrize("kind", ["llama", "qwen2, dora with biases", "phi3, fused", "llama, embedding and head", "mixtral, attention"])
def test_sizes_of_the_changes(kind, tmp_path):
    """Frobenius norms, beside the weights that PEFT merges."""
    arch, options = KINDS[kind]
    twin = adapted(arch, options, tmp_path)
    model = load_model(tmp_path / "model")
    sizes = change_sizes(read_lora(tmp_path / "lora", model.config), model)
    before = {name: p.detach().clone() for name, p in build(arch).named_parameters()}
    after = dict(twin.merge_and_unload().named_parameters())
    stems = {"embed": "embed_tokens", "head": "lm_head"}
    if "phi3" in kind:
        stems |= dict.fromkeys("qkv", "qkv_proj") | dict.fromkeys(("gate", "up"), "gate_up_proj")
    for one in sizes:
        layer = "" if one.layer < 0 else f"layers.{one.layer}."
        stem = stems.get(one.role, f"{one.role}_proj")
        name = next(n for n in before if layer in n and n.endswith(f"{stem}.weight"))
        rows = _rows_in_phi3(model.config, one.role) if "phi3" in kind and one.role in stems else slice(None)
        old, new = before[name][rows], after[name][rows]
        assert one.weight == pytest.approx(float(old.norm()), rel=2e-3), one
        assert one.change == pytest.approx(float((new - old).norm()), rel=5e-3), one
    assert len(sizes) >= 3


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_logits_on_the_gpu_equal_peft(kind, tmp_path):
    """The prompt at once, and in steps of eight: as near as the GPU's fp16 activations are without the adapter."""
    arch, options = KINDS[kind]
    twin = adapted(arch, options, tmp_path)
    model = load_model(tmp_path / "model", device="cuda")
    ids = ids_of(model.config.vocab_size, 1, 40)
    network, program = model.network_and_program
    made = adapter_changes(read_lora(tmp_path / "lora", model.config), model.config, network, program)
    model.set_adapters([{op: change.to("cuda") for op, change in made.items()}])
    want = truth(twin, ids)[0]
    for each in (40, 8, 1):
        cache, found = KVCache(model.cache_spec(256, mode="fp16"), "cuda"), []
        for first in range(0, 40, each):
            span = SequenceSlice(ids=ids[0, first : first + each].tolist(), start=first, pages=[0], logit_rows="all", adapter=0)
            found.append(model.forward(Batch.build([span]), cache).cpu())
        assert error(torch.cat(found), want) < 0.02, each


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "embedding" not in kind and kind not in ("B with biases", "gemma2, norms")])
def test_merged_weights_give_the_same_logits(kind, tmp_path):
    arch, options = KINDS[kind]
    twin = adapted(arch, options, tmp_path)
    model = load_model(merge(tmp_path / "model", tmp_path / "lora", tmp_path / "merged", progress=None))
    ids = ids_of(model.config.vocab_size, 1, 40)
    assert error(run(model, ids[0]), truth(twin, ids)[0]) < 1e-4


def test_what_cannot_be_merged(tmp_path):
    adapted("gemma2", KINDS["gemma2, norms"][1], tmp_path)
    with pytest.raises(OptionError, match="one table"):
        merge(tmp_path / "model", tmp_path / "lora", tmp_path / "merged", progress=None)
    adapted("qwen2", {"target_modules": ["o_proj"], "lora_bias": True}, tmp_path / "b")
    with pytest.raises(FormatError, match="no tensor of its own"):
        merge(tmp_path / "b" / "model", tmp_path / "b" / "lora", tmp_path / "merged", progress=None)
    assert not (tmp_path / "merged").exists()


@pytest.fixture
def files(tmp_path):
    adapted("llama", {"target_modules": LLAMA}, tmp_path)
    return tmp_path, load_model(tmp_path / "model").config


def edited(folder, settings=None, tensors=None):
    """Change settings and tensors of an adapter; None removes a key."""
    path = folder / "lora" / "adapter_config.json"
    raw = json.loads(path.read_text()) | (settings or {})
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
    with SafetensorsFile(folder / "lora" / "adapter_model.safetensors") as file:
        found = {name: file.read(name).clone() for name in file.names()}
    found |= tensors(found) if callable(tensors) else (tensors or {})
    save_tensors(folder / "lora" / "adapter_model.safetensors", {name: value for name, value in found.items() if value is not None})


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


@pytest.mark.parametrize(
    ("settings", "tensors", "error_type", "words"),
    [
        ({"peft_type": "IA3"}, None, FormatError, "IA3"),
        ({"peft_type": None}, None, ConfigError, "peft_type"),
        ({"lora_alpha": "16"}, None, ConfigError, "lora_alpha"),
        ({"lora_alpha": 1e300}, None, ConfigError, "lora_alpha"),
        ({"alpha_pattern": {"(a+)+$": 4}}, None, ConfigError, "alpha_pattern"),
        ({"alpha_pattern": {".*.*.*.*x": 4}}, None, ConfigError, "alpha_pattern"),
        ({"alpha_pattern": {f".*.q_proj{i}": 4 for i in range(65)}}, None, ConfigError, "64 entries with wildcards"),
        ({"alpha_pattern": {"q_proj": True}}, None, ConfigError, "alpha_pattern"),
        ({"layer_replication": [[0, 1]]}, None, FormatError, "layer_replication"),
        ({"trainable_token_indices": [1]}, None, FormatError, "trainable_token_indices"),
        (None, {Q.format("A"): torch.zeros(5, 63)}, FormatError, "shape"),
        (None, {Q.format("A"): torch.zeros(0, 64)}, FormatError, "shape"),
        (None, {Q.format("A"): torch.zeros(4097, 64)}, FormatError, "shape"),
        (None, {Q.format("A"): torch.zeros(4, 64)}, FormatError, "one r"),
        (None, {Q.format("A"): None}, FormatError, "lora_A"),
        (None, {Q.format("A"): torch.full((5, 64), torch.nan)}, FormatError, "not finite"),
        (None, {Q.format("B"): torch.full((64, 5), 1e6)}, FormatError, "fp16"),
        (None, {Q.format("A"): torch.zeros(5, 64, dtype=torch.int32)}, FormatError, "float"),
        (None, {Q.format("A").replace("q_proj", "c_proj"): torch.zeros(5, 64)}, FormatError, "c_proj"),
        (None, {Q.format("A").replace("layers.0", "layers.7"): torch.zeros(5, 64)}, FormatError, "layers.7"),
        (None, {"base_model.model.model.layers.0.self_attn.q_proj.weight": torch.zeros(64, 64)}, FormatError, "only"),
        (None, {"base_model.model.lm_head.weight": torch.zeros(131, 64)}, FormatError, "only"),
        (None, {"base_model.model." * 100_000: torch.zeros(1)}, FormatError, "1700000 characters"),
        (None, lambda found: dict.fromkeys(found) | {}, FormatError, "no tensors"),
    ],
)
def test_hostile_files_are_named_errors(files, settings, tensors, error_type, words):
    folder, config = files
    edited(folder, settings, tensors)
    with pytest.raises(error_type, match=words):
        read_lora(folder / "lora", config)


@pytest.mark.parametrize(
    ("pattern", "module", "fits"),
    [
        ("v_proj", "model.layers.0.self_attn.v_proj", True),
        (r"self_attn\.v_proj", "model.layers.0.self_attn.v_proj", True),
        ("v_proj", "model.layers.0.self_attn.uv_proj", False),
        ("layers.1.mlp.up_proj", "model.layers.11.mlp.up_proj", False),
        (r"layers.\d+.mlp.up_proj", "model.layers.11.mlp.up_proj", True),
        (r"^.*\.0\..*\.v_proj$", "model.layers.0.self_attn.v_proj", True),
        (r"layers.\d.mlp.up_proj", "model.layers.11.mlp.up_proj", False),
        (".*.*.*attn", "model.layers.0.self_attn.v_proj", False),
    ],
)
def test_patterns_of_alpha_choose_modules(pattern, module, fits):
    fields = Fields({"peft_type": "LORA", "lora_alpha": 1, "alpha_pattern": {pattern: 2, ".*_proj": 1}}, "test")
    assert read_scales(fields)(module, 1) == (2 if fits else 1)
    assert bool(re.fullmatch(rf"(.*\.)?({pattern})", module)) == fits, "as PEFT matches them"


def test_many_names_in_alpha_pattern_are_looked_up(files):
    folder, config = files
    many = {f"model.layers.{i}.mlp.up_proj": 3 for i in range(4096)}
    edited(folder, {"alpha_pattern": many, "lora_alpha": 1})
    found = read_lora(folder / "lora", config).targets
    assert {roles: target.scale * target.rank for (layer, roles), target in found.items() if layer == 1 and "up" in roles} == {("up",): 3}
    assert all(target.scale * target.rank == 1 for (_, roles), target in found.items() if "up" not in roles)


def test_missing_and_pickled_files(files):
    folder, config = files
    (folder / "lora" / "adapter_model.safetensors").rename(folder / "lora" / "adapter_model.bin")
    with pytest.raises(ModelNotFound, match="pickle"):
        read_lora(folder / "lora", config)
    with pytest.raises(ModelNotFound, match="adapter_config"):
        read_lora(folder, config)


def test_an_adapter_of_another_model_is_refused(files, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    adapted("phi3", {"target_modules": ["qkv_proj"]}, other)
    with pytest.raises(Exl2Error, match="qkv_proj"):
        read_lora(other / "lora", files[1])
