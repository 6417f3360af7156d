"""EXL2 directories for Transformers' own model classes: `Exl2Linear` in place of their linears, registered as a quantisation method.

Importing this module (or `exl2nb.integrations.transformers`) makes `AutoModelForCausalLM.from_pretrained` read them, of any architecture
that Transformers knows. `Exl2ForCausalLM` is faster where our table has the architecture.
"""

# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from exl2nb import ops
from exl2nb.core.errors import ConfigError, MissingDependency, ModelNotFound, OptionError

try:
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ImportError as error:
    raise MissingDependency(f"exl2nb.integrations.hf_quantizer needs Transformers ({error}); pip install 'transformers>=5'") from error

from exl2nb.io import hub
from exl2nb.io.shards import TensorStore
from exl2nb.quant.exl2 import EXL2_SUFFIXES, Exl2Tensors, check_headers

QUANT_METHOD = "exl2"


class Exl2Linear(nn.Module):
    """A linear whose matrix is quantised: x W^T + b by our kernels.

    On the CPU the matrix is one packed tensor; on a GPU it stays as stored and is turned back into fp16 for every product, which is slow.

    Args:
        in_features, out_features: K and N.
        shapes: of the stored tensors, by their ends (`quant.exl2.EXL2_SUFFIXES`, perhaps "bias"), with their dtypes.
    """

    def __init__(self, in_features: int, out_features: int, shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        for name, (shape, dtype) in shapes.items():
            self.register_buffer(name, torch.empty(shape, dtype=dtype))
        if "bias" not in shapes:
            self.register_buffer("bias", None)
        self.register_buffer("blob", None, persistent=False)

    def finish(self, name: str) -> None:
        """After its tensors have been read: check them, and pack them for the CPU.

        Raises:
            FormatError: they break a rule of the format; names the tensor.
        """
        stored: dict[str, Any] = {suffix: getattr(self, suffix) for suffix in EXL2_SUFFIXES}
        stored["q_scale_max"] = stored["q_scale_max"].half()  # read in the model's dtype
        checked = Exl2Tensors(**stored).validate(name, in_features=self.in_features, out_features=self.out_features)
        if self.bias is not None:
            self.bias = self.bias[: self.out_features].float()
        if checked.q_weight.is_cuda:
            for suffix in EXL2_SUFFIXES:
                setattr(self, suffix, getattr(checked, suffix))
            return
        tensors = [getattr(checked, suffix).contiguous() for suffix in EXL2_SUFFIXES]
        self.blob = ops.pack_exl2(*tensors, out_features=self.out_features)
        for suffix in EXL2_SUFFIXES:
            delattr(self, suffix)

    @property
    def weight(self) -> Tensor:
        """The dense matrix, f32 `(N, K)` on the CPU and f16 on a GPU, made anew: for code that reads weights directly."""
        if self.blob is not None:
            return ops.unpack(self.blob).T
        parts: list[Any] = [getattr(self, suffix) for suffix in EXL2_SUFFIXES]
        return ops.reconstruct(*parts)[:, : self.out_features].T

    def forward(self, x: Tensor) -> Tensor:
        """`(..., K)` -> `(..., N)` in the dtype of x.

        Raises:
            OptionError: x is elsewhere; the model was moved after it was loaded.
        """
        if x.is_cuda != (self.blob is None) or (self.blob is not None and self.blob.is_cuda):
            raise OptionError("an EXL2 model cannot be moved between CPU and GPU; load it there: from_pretrained(..., device_map=...)")
        if self.blob is None or (torch.is_grad_enabled() and x.requires_grad):
            weight = self.weight.to(x.dtype)
            return nn.functional.linear(x, weight, None if self.bias is None else self.bias.to(x.dtype))
        flat = x.detach().reshape(-1, self.in_features).float().contiguous()
        return ops.linear(flat, self.blob, self.bias).to(x.dtype).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """For `print(model)`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Exl2Config(QuantizationConfigMixin):
    """`quantization_config` of an EXL2 model's config.json: what it was converted with; nothing of it is needed to read the files."""

    def __init__(self, **values: Any) -> None:
        self.quant_method: Any = QUANT_METHOD
        for name, value in values.items():
            if name != "quant_method":
                setattr(self, name, value)


class Exl2HfQuantizer(HfQuantizer):
    """What `from_pretrained` asks while it loads an EXL2 directory."""

    requires_calibration = True

    def validate_environment(self, *_: Any, **__: Any) -> None:
        """Called before the files are looked for: those of an EXL2 model have names of their own (`_files_of_exl2`)."""
        exl2_expected.set(True)

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if type(model).__module__.startswith("transformers_modules"):
            raise OptionError(
                f"{type(model).__name__} is code of the model's repository, which is not run with EXL2 weights; leave trust_remote_code out"
            )
        files = kwargs.get("checkpoint_files")
        if not files:
            raise ConfigError("this Transformers does not say which files it reads; expected 5.0 or newer: pip install -U transformers")
        with TensorStore(Path(files[0]).parent) as store:
            keys = [name.removesuffix(".q_weight") for name in store.names() if name.endswith(".q_weight")]
            modules = dict(model.named_modules())
            strange = [key for key in keys if not isinstance(modules.get(key), (nn.Linear, Conv1D))]
            if strange or not keys:
                found = f"{len(strange)} quantised matrices, such as {strange[0]}," if strange else "no quantised matrix"
                raise ConfigError(
                    f"{store.directory}: found {found} where {type(model).__name__} has a linear; expected names as Transformers has them: "
                    "load it with exl2nb.integrations.transformers.Exl2ForCausalLM"
                )
            for key in keys:
                _replace(model, key, modules[key], store)
            _widen_head_norms(model, store)
        for target in [name for name in getattr(model, "all_tied_weights_keys", {}) if name.removesuffix(".weight") in keys]:
            del model.all_tied_weights_keys[target]  # a head that was a copy of the embedding is quantised by itself
            model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = False
        return model

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        for name, module in model.named_modules():
            if isinstance(module, Exl2Linear):
                module.finish(name)
        return model

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        """No: the files are those that were loaded."""
        return False

    @property
    def is_trainable(self) -> bool:
        """No."""
        return False


exl2_expected: ContextVar[bool] = ContextVar("exl2 files are looked for next", default=False)


def _files_of_exl2(found_by_transformers: Callable[..., Any]) -> Callable[..., Any]:
    """Transformers looks for model.safetensors or its index; an EXL2 model is all .safetensors files of its directory, without an index."""

    @functools.wraps(found_by_transformers)
    def find(*arguments: Any, **keywords: Any) -> Any:
        place = keywords.get("pretrained_model_name_or_path")
        if not exl2_expected.get() or arguments or place is None:
            return found_by_transformers(*arguments, **keywords)
        exl2_expected.set(False)
        options = keywords.get("download_kwargs") or {}
        folder = hub.resolve(place, None if Path(place).is_dir() else options.get("revision")) / (options.get("subfolder") or "")
        with suppress(ModelNotFound), TensorStore(folder) as store:
            if store.is_exl2:  # it is not, where an earlier model failed before its files were looked for
                return [str(path) for path in store.files], None
        return found_by_transformers(*arguments, **keywords)

    return find


def _replace(model: Any, key: str, module: Any, store: TensorStore) -> None:
    """Put an Exl2Linear, still empty, in the place of a linear."""
    n, k = module.weight.shape if isinstance(module, nn.Linear) else module.weight.T.shape
    infos = {name: store.info(f"{key}.{name}") for name in (*EXL2_SUFFIXES, "bias") if f"{key}.{name}" in store}
    check_headers(infos, key, file=infos["q_weight"].path, in_features=k, out_features=n)
    parent, _, name = key.rpartition(".")
    made = Exl2Linear(k, n, {suffix: (tuple(info.shape), info.dtype) for suffix, info in infos.items()})
    setattr(model.get_submodule(parent), name, made)


def _widen_head_norms(model: Any, store: TensorStore) -> None:
    """Norms of heads stand in EXL2 files once for each head, which broadcasts to the same."""
    for name, parameter in list(model.named_parameters()):
        if not name.endswith("norm.weight") or parameter.dim() != 1 or name not in store:
            continue
        shape = tuple(store.info(name).shape)
        if len(shape) == 2 and shape[1:] == tuple(parameter.shape):
            owner = model.get_submodule(name.rpartition(".")[0])
            owner.weight = nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device=parameter.device), requires_grad=False)


def register() -> None:
    """Make Transformers know the method; harmless when repeated, and where another package has registered it."""
    from transformers import modeling_utils
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

    name = "_get_resolved_checkpoint_files"
    looked_up = getattr(modeling_utils, name, None)
    if looked_up is not None and not hasattr(looked_up, "__wrapped__"):
        setattr(modeling_utils, name, _files_of_exl2(looked_up))
    if QUANT_METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(QUANT_METHOD)(Exl2Config)
    if QUANT_METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantizer(QUANT_METHOD)(Exl2HfQuantizer)


register()
