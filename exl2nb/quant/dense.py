"""Plain fp16, bf16 and fp32 weights. Knows nothing of models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exl2nb.quant.base import Store, broken

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def read_tensor(store: Store, name: str, *, shape: Sequence[int | None] | None = None) -> Tensor:
    """Read one floating-point tensor (a norm, an embedding, a weight) in its own dtype.

    Args:
        store: where the tensors are.
        name: full tensor name.
        shape: what the architecture wants, None standing for any extent; not checked where None.

    Raises:
        FormatError: missing, another dtype than fp16/bf16/fp32, or another shape. Names file, tensor, found and expected.
    """
    info = store.info(name)
    file = getattr(info, "path", "")
    if info.dtype not in DTYPES:
        raise broken(file, name, str(info.dtype).removeprefix("torch."), "float16, bfloat16 or float32")
    if shape is not None and (len(info.shape) != len(shape) or any(w is not None and w != s for w, s in zip(shape, info.shape))):
        raise broken(file, name, f"shape {tuple(info.shape)}", f"({', '.join('any' if w is None else str(w) for w in shape)})")
    return store.read(name)


@dataclass(frozen=True, eq=False)
class DenseTensors:
    """One unquantised matrix. weight: fp16, bf16 or fp32 `(N, K)`, the nn.Linear layout. bias: `(N,)` or None."""

    weight: Tensor
    bias: Tensor | None = None

    @classmethod
    def read(cls, store: Store, prefix: str, *, in_features: int | None = None, out_features: int | None = None) -> DenseTensors:
        """Read `<prefix>.weight` and, where there is one, `<prefix>.bias`.

        Raises:
            FormatError: see read_tensor.
        """
        weight = read_tensor(store, f"{prefix}.weight", shape=(out_features, in_features))
        has_bias = f"{prefix}.bias" in store
        return cls(weight, read_tensor(store, f"{prefix}.bias", shape=(weight.shape[0],)) if has_bias else None)

    @property
    def in_features(self) -> int:
        """K."""
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        """N."""
        return self.weight.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of weight and bias."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    @property
    def bpw(self) -> float:
        """Bits per weight: 16 or 32."""
        return 8.0 * self.weight.element_size()

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """Name -> tensor, as a file holds them."""
        return {f"{prefix}.weight": self.weight} | ({} if self.bias is None else {f"{prefix}.bias": self.bias})

    def reconstruct(self) -> Tensor:
        """The matrix as `(K, N)` in its own dtype: a view."""
        return self.weight.T
