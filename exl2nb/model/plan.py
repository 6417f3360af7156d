"""Where each matrix of a model lies and in which format, decided and checked from file headers alone, before a byte of data is read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from exl2nb.core.errors import FormatError
from exl2nb.model.config import ModelConfig
from exl2nb.model.layout import Linear, accepted, head_linear, layer_linears, modules, vectors
from exl2nb.model.store import Store
from exl2nb.quant.dense import check_dense
from exl2nb.quant.exl2_check import SUFFIXES, check_headers

SHOWN = 5  # names listed in a message


@dataclass(frozen=True)
class Source:
    """One linear and where its matrix comes from: `prefix` of its tensors (the embedding's for a tied head), `kind` "exl2" or "dense"."""

    linear: Linear
    prefix: str
    kind: str


def plan(config: ModelConfig, store: Store) -> dict[str, Source]:
    """Decide for every linear where it comes from.

    Args:
        config: what the model must have.
        store: what the files hold.

    Returns:
        Module key -> Source, in running order.

    Raises:
        FormatError: tensors that are missing, that the architecture does not know, or of the wrong shape or dtype; matrices of one module
            that are partly quantised. Names the tensors and files.
    """
    sources: dict[str, Source] = {}
    for layer in range(config.num_layers):
        linears = layer_linears(config, layer)
        found = {role: _layer_source(store, linear) for role, linear in linears.items()}
        for roles in modules(linears):
            _check_granularity(store, [found[role] for role in roles if role in found])
        sources |= {source.linear.key: source for source in found.values()}
    sources[config.names.head] = _head_source(config, store)
    for name, shape in vectors(config).items():
        _check_float(store, name, *accepted(config, shape))
    _check_extra(config, store, sources.values())
    return sources


def _layer_source(store: Store, linear: Linear) -> Source:
    kind = _kind(store, linear.key)
    if kind is None:
        raise missing(store, f"{linear.key}.weight", f"it or {linear.key}.q_weight")
    _check_linear(store, linear, linear.key, kind)
    if linear.bias:
        _check_float(store, f"{linear.key}.bias", (linear.out_features,))
    return Source(linear, linear.key, kind)


def _head_source(config: ModelConfig, store: Store) -> Source:
    linear, embed = head_linear(config), config.names.embed
    kind = _kind(store, linear.key)
    if kind is not None:
        _check_linear(store, linear, linear.key, kind)
        return Source(linear, linear.key, kind)
    if not config.tie_word_embeddings:
        raise missing(store, f"{linear.key}.weight", f"it or {linear.key}.q_weight, since tie_word_embeddings is false")
    return Source(linear, embed, "dense")


def _kind(store: Store, prefix: str) -> str | None:
    return "exl2" if f"{prefix}.q_weight" in store else "dense" if f"{prefix}.weight" in store else None


def _check_linear(store: Store, linear: Linear, prefix: str, kind: str) -> None:
    if kind == "dense":
        _check_float(store, f"{prefix}.weight", linear.shape)
        return
    for part in SUFFIXES:
        if f"{prefix}.{part}" not in store:
            raise missing(store, f"{prefix}.{part}", f"all of {', '.join(SUFFIXES)} beside each other")
    infos = {part: store.info(f"{prefix}.{part}") for part in SUFFIXES}
    file = infos["q_weight"].path
    check_headers(infos, prefix, file=file, in_features=linear.in_features, out_features=linear.out_features)
    # only the head may be padded: attention and MLP use the plain widths
    if linear.role != "head" and linear.out_features % 32:
        raise wrong(store, f"{prefix}.q_weight", f"a layer of {linear.out_features} outputs", "a multiple of 32")


def _check_float(store: Store, name: str, shape: tuple[int, ...], *others: tuple[int, ...]) -> None:
    if name not in store:
        raise missing(store, name, "it for this architecture")
    info = store.info(name)
    check_dense(info, name, info.shape if info.shape in others else shape, file=info.path)


def _check_granularity(store: Store, sources: list[Source]) -> None:
    if len({source.kind for source in sources}) > 1:
        plain = next(source for source in sources if source.kind == "dense")
        names = ", ".join(source.linear.key.rsplit(".", 1)[-1] for source in sources)
        raise wrong(store, f"{plain.prefix}.weight", "a plain matrix beside quantised ones", f"all of {names} quantised or none")


def _check_extra(config: ModelConfig, store: Store, sources: Iterable[Source]) -> None:
    allowed = set(vectors(config))
    for source in sources:
        parts = (*SUFFIXES, "q_perm") if source.kind == "exl2" else ("weight",)
        allowed |= {f"{source.prefix}.{part}" for part in parts}
        if source.linear.bias:
            allowed.add(f"{source.linear.key}.bias")
    # buffers that old checkpoints saved; RoPE comes from the config
    extra = sorted(name for name in store.names() if name not in allowed and not name.endswith("rotary_emb.inv_freq"))
    if extra:
        shown = ", ".join(extra[:SHOWN]) + (f" and {len(extra) - SHOWN} more" if len(extra) > SHOWN else "")
        raise FormatError(
            f"{store.info(extra[0]).path}: found {len(extra)} tensors that {config.architecture} with this config.json lacks: {shown}; "
            "expected none: does config.json belong to these weights?"
        )


def missing(store: Store, name: str, expected: str) -> FormatError:
    """The error for a tensor that no file has."""
    return FormatError(f"{store.directory}: tensor {name!r}: found none of that name in {len(store.files)} files, expected {expected}")


def wrong(store: Store, name: str, found: str, expected: str) -> FormatError:
    """The error for a tensor that does not fit."""
    return FormatError(f"{store.info(name).path}: tensor {name!r}: found {found}, expected {expected}")
