"""A mixture of experts as data: which layers have one, how large, how tokens choose. Knows no architecture by name."""

from __future__ import annotations

from dataclasses import dataclass

from exl2nb.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class MoE:
    """The experts of a model; all sparse layers are alike.

    num_experts: in each sparse layer. top_k: experts that a token visits. intermediate_size: of one expert. layers: which layers are
    sparse; the others have the plain MLP. renormalize: the probabilities of the chosen experts (softmax over all of them) are divided by
    their norm of this order; 0 = not, 1 = they sum to 1, which is also what a softmax over the chosen ones alone gives. shared_size:
    intermediate size of an expert that every token visits, weighted by a sigmoid; 0 = none.

    Raises:
        ConfigError: a token is to visit more experts than there are.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    layers: tuple[bool, ...]
    renormalize: float = 0.0
    shared_size: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ConfigError(f"num_experts_per_tok is {self.top_k}; expected 1 to num_experts {self.num_experts}")


MAX_EXPERTS = 1024
