"""GPTQ matrices. The file in tests/data holds tensors that GPTQModel 7.7.0 packed (`pack_original`, and its conversion to format v1) from
random codes, zero points of 0 included, with the weights they stand for."""

from pathlib import Path

import pytest
import torch

from exl2nb import ops
from exl2nb.core.errors import ConfigError, FormatError
from exl2nb.io.safetensors import SafetensorsFile
from exl2nb.quant.gptq_format import GptqSpec, GptqTensors, unpack_zeros

MADE = Path(__file__).parents[1] / "data" / "gptqmodel-7.7.0.safetensors"


class Dict(dict):
    """Tensors in memory as a store."""

    def info(self, name):
        return self[name]

    read = info


def made(bits, version):
    """The tensors of one width as a checkpoint of `version` has them, and the weights `(K, N)`."""
    with SafetensorsFile(MADE) as file:
        parts = {name.partition(".")[2]: file.read(name) for name in file.names() if name.startswith(f"b{bits}.")}
    store = Dict({f"m.{name}": parts[name] for name in ("qweight", "scales", "g_idx")})
    store["m.qzeros"] = parts[f"qzeros_v{version}"]
    return store, parts["weight"]


V1 = GptqSpec.read({"bits": None, "meta": {"quantizer": ["gptqmodel:7.7.0"]}}, "x")
V2 = GptqSpec.read({"checkpoint_format": "gptq_v2"}, "x")


@pytest.mark.parametrize(("bits", "version"), [(2, 1), (4, 1), (8, 1), (2, 2), (3, 2), (4, 2), (8, 2)])
def test_what_gptqmodel_packed(bits, version):
    store, weight = made(bits, version)
    gptq = GptqTensors.read(store, "m", V1 if version == 1 else V2, in_features=64, out_features=32)
    assert gptq.bits == bits and gptq.group_rows == [32, 32]
    assert gptq.zeros is not None and int(gptq.zeros.min()) == 0
    assert torch.equal(gptq.reconstruct(), weight)
    blob = ops.pack_gptq(*gptq.packed(), bits=bits, in_features=64)
    assert torch.equal(ops.unpack(blob), weight)


def test_columns_of_a_fused_matrix():
    store, weight = made(4, 2)
    columns = torch.tensor([3, 4, 30, 1])
    gptq = GptqTensors.read(store, "m", V2, in_features=64, out_features=32, columns=columns)
    assert torch.equal(gptq.reconstruct(), weight[:, columns]) and gptq.out_features == 4


def test_zero_conventions():
    """Words of four bits: fields of 15 mean 16 in old files, and 0 with a borrow in GPTQModel's."""
    words = torch.tensor([[0x0000000F]], dtype=torch.int32)
    assert unpack_zeros(words, 4, 8, GptqSpec()).tolist() == [[16, 1, 1, 1, 1, 1, 1, 1]]
    assert unpack_zeros(words, 4, 8, GptqSpec(zero_offset=0)).tolist() == [[15, 0, 0, 0, 0, 0, 0, 0]]
    assert unpack_zeros(words, 4, 8, GptqSpec(whole_words=True)).tolist() == [[0, 2, 1, 1, 1, 1, 1, 1]]
    ones = torch.tensor([[-1]], dtype=torch.int32)
    assert unpack_zeros(ones, 8, 4, GptqSpec()).tolist() == [[256] * 4]
    assert unpack_zeros(ones.expand(1, 3), 3, 32, GptqSpec(whole_words=True)).tolist() == [[0] * 32]


def test_without_g_idx_groups_follow_each_other():
    store, weight = made(8, 2)
    del store["m.g_idx"]
    assert torch.equal(GptqTensors.read(store, "m", V2, in_features=64).reconstruct(), weight)
    store["m.g_idx"] = torch.zeros(64, dtype=torch.int64)  # what some old files have
    assert torch.equal(GptqTensors.read(store, "m", V2).reconstruct(), weight)


def test_groups_of_any_shape():
    """g_idx may give the groups any number of rows, none included."""
    generator = torch.Generator().manual_seed(0)
    store, _ = made(4, 2)
    store["m.scales"] = torch.rand(5, 32, generator=generator)
    store["m.qzeros"] = torch.randint(0, 2**31 - 1, (5, 4), generator=generator).int()
    store["m.g_idx"] = torch.tensor([0, 3, 3, 4])[torch.randint(0, 4, (64,), generator=generator)].int()
    gptq = GptqTensors.read(store, "m", V2)
    blob = ops.pack_gptq(*gptq.packed(), bits=4, in_features=64)
    assert torch.equal(ops.unpack(blob), gptq.reconstruct())
    x = torch.randn(3, 64, generator=generator)
    torch.testing.assert_close(ops.linear(x, blob), x @ gptq.reconstruct(), rtol=1e-3, atol=1e-3)


def test_scales_that_fp16_cannot_hold_stay_wide():
    store, weight = made(4, 2)
    store["m.scales"] = store["m.scales"].bfloat16().float() * 1e-9
    assert GptqTensors.read(store, "m", V2).scales.dtype == torch.float32
    store["m.scales"] = made(4, 2)[0]["m.scales"].float()
    gptq = GptqTensors.read(store, "m", V2)
    assert gptq.scales.dtype == torch.float16 and torch.equal(gptq.reconstruct(), weight)


def test_all_problems_of_a_matrix_at_once():
    store, _ = made(4, 2)
    store["m.qzeros"] = torch.zeros(2, 3, dtype=torch.int32)
    store["m.g_idx"] = torch.zeros(60, dtype=torch.int32)
    with pytest.raises(
        FormatError, match=r"'m.qzeros': found shape \(2, 3\), expected \(2, 4\); .*'m.g_idx': found 60 entries, expected 64"
    ):
        GptqTensors.read(store, "m", V2, in_features=64)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"bits": 7}, "bits is 7"),
        ({"bits": True}, "bits is True"),
        ({"group_size": -2}, "group_size is -2"),
        ({"format": "bitblas"}, "bitblas"),
    ],
)
def test_settings_are_checked(block, words):
    with pytest.raises(ConfigError, match=words):
        GptqSpec.read(block, "config.json")
