"""Where each matrix of a model is stored and in which format, checked from file headers alone; matrices read as dense tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from exl2nb.core.errors import FormatError
from exl2nb.io.hf_config import foreign_format, refuse
from exl2nb.model.config import ModelConfig
from exl2nb.model.layout import Linear, accepted_shapes, head_linear, layer_linears, role_groups, vector_shapes
from exl2nb.model.store import ModelStore, Store
from exl2nb.quant.exl2 import EXL2_SUFFIXES, Exl2Tensors, check_headers
from exl2nb.quant.gptq_format import GPTQ_SUFFIXES, GptqSpec, GptqTensors, header_problems
from exl2nb.quant.weight_source import check_dense


def gptq_spec_of(config: ModelConfig) -> GptqSpec:
    """The checkpoint's settings; where it has none, those of the oldest files."""
    return config.gptq or GptqSpec()


def read_gptq(config: ModelConfig, store: Store, linear: Linear) -> GptqTensors:
    """The matrix of one linear.

    Raises:
        FormatError: as `GptqTensors.read`.
    """
    whole = store.fused_gptq(linear.key) if isinstance(store, ModelStore) else None
    if whole is None:
        return GptqTensors.read(store, linear.key, gptq_spec_of(config), in_features=linear.in_features, out_features=linear.out_features)
    sizes = {"in_features": linear.in_features, "out_features": whole.out_features}
    return GptqTensors.read(whole.store, whole.prefix, gptq_spec_of(config), **sizes, columns=whole.columns)


def gptq_problems(config: ModelConfig, store: Store, linear: Linear) -> list[str]:
    """Every rule that the headers of one linear's matrix break."""
    whole = store.fused_gptq(linear.key) if isinstance(store, ModelStore) else None
    home, prefix, outputs = (store, linear.key, linear.out_features) if whole is None else (whole.store, whole.prefix, whole.out_features)
    if absent := [f"{prefix}.{suffix}" for suffix in GPTQ_SUFFIXES if f"{prefix}.{suffix}" not in home]:
        return [f"tensor {name!r}: found none, expected it beside qweight" for name in absent]
    infos = {suffix: home.info(f"{prefix}.{suffix}") for suffix in (*GPTQ_SUFFIXES, "g_idx") if f"{prefix}.{suffix}" in home}
    return header_problems(infos, prefix, gptq_spec_of(config), in_features=linear.in_features, out_features=outputs)


MAX_SHOWN_NAMES = 5  # names listed in a message
MAX_LISTED_PROBLEMS = 40  # problems listed in a message
TENSOR_SUFFIXES = {
    "exl2": (*EXL2_SUFFIXES, "q_perm"),
    "gptq": (*GPTQ_SUFFIXES, "g_idx"),
    "dense": ("weight",),
}  # kind: ends of its tensors' names


@dataclass(frozen=True)
class Source:
    """One linear and where its matrix comes from: `prefix` of its tensors (the embedding's for a tied head), `kind` a key of
    TENSOR_SUFFIXES.
    """

    linear: Linear
    prefix: str
    kind: str


class _Missing(FormatError):
    """A tensor that no file has; caught and reported with the others."""

    def __init__(self, message: str, tensor: str) -> None:
        super().__init__(message)
        self.tensor = tensor


@dataclass
class _Problems:
    """Everything wrong with a model, so that one error lists it all."""

    config: ModelConfig
    store: Store
    missing: list[_Missing] = field(default_factory=list)
    others: list[str] = field(default_factory=list)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        try:
            yield
        except _Missing as error:
            self.missing.append(error)
        except FormatError as error:
            self.others.append(str(error))

    def raise_any(self) -> None:
        if len(self.missing) + len(self.others) == 0:
            return
        found = list(dict.fromkeys(self.others))
        if len(self.missing) == 1:
            found.insert(0, str(self.missing[0]))
        elif self.missing:
            names = _join_some([error.tensor for error in self.missing], MAX_LISTED_PROBLEMS)
            files = f"{len(self.store.files)} files"
            found.insert(
                0,
                f"{self.store.directory}: found none of {len(self.missing)} tensors in {files}, expected them for "
                f"{self.config.architecture}: {names}",
            )
        raise FormatError(found[0] if len(found) == 1 else f"{len(found)} problems: {_join_some(found, MAX_LISTED_PROBLEMS, '; ')}")


def find_sources(config: ModelConfig, store: Store) -> dict[str, Source]:
    """Decide for every linear where it comes from.

    Args:
        config: what the model must have.

    Returns:
        Module key -> Source, in running order.

    Raises:
        FormatError: tensors that are missing, that the architecture does not know, or of the wrong shape or dtype; matrices of one module
            that are partly quantised with EXL2; formats mixed. Names the tensors and files, all problems at once.
        ConfigError: the tensors are those of a format that is not read here.
    """
    problems = _Problems(config, store)
    sources: dict[str, Source] = {}
    for layer in range(config.num_layers):
        linears = layer_linears(config, layer)
        found: dict[str, Source] = {}
        for role, linear in linears.items():
            with problems.collecting():
                found[role] = _layer_source(config, store, linear)
        for roles in role_groups(linears):
            with problems.collecting():
                _check_granularity(store, [found[role] for role in roles if role in found])
        sources |= {source.linear.key: source for source in found.values()}
    with problems.collecting():
        sources[config.names.head] = _head_source(config, store)
    for name, shape in vector_shapes(config).items():
        with problems.collecting():
            _check_float(store, name, *accepted_shapes(config, shape))
    if problems.missing:
        _check_foreign(store)
    with problems.collecting():
        _check_method(config, store, sources.values())
    if not problems.missing and not problems.others:
        _check_extra(config, store, sources.values())
    problems.raise_any()
    return sources


def _layer_source(config: ModelConfig, store: Store, linear: Linear) -> Source:
    kind = _source_kind(store, linear.key)
    if kind is None:
        raise missing_tensor(store, f"{linear.key}.weight", f"it or {linear.key}.q_weight")
    _check_linear(config, store, linear, linear.key, kind)
    if linear.bias:
        _check_float(store, f"{linear.key}.bias", (linear.out_features,))
    return Source(linear, linear.key, kind)


def _head_source(config: ModelConfig, store: Store) -> Source:
    linear, embed = head_linear(config), config.names.embed
    kind = _source_kind(store, linear.key)
    if kind is not None:
        _check_linear(config, store, linear, linear.key, kind)
        if kind == "gptq" and config.files.unit_head:
            raise wrong_tensor(store, f"{linear.key}.qweight", "a GPTQ head", "a plain one: this architecture normalises its rows")
        return Source(linear, linear.key, kind)
    if not config.tie_word_embeddings:
        raise missing_tensor(store, f"{linear.key}.weight", f"it or {linear.key}.q_weight, since tie_word_embeddings is false")
    return Source(linear, embed, "dense")


def _source_kind(store: Store, prefix: str) -> str | None:
    ends = {"exl2": "q_weight", "gptq": "qweight", "dense": "weight"}
    return next((kind for kind, end in ends.items() if f"{prefix}.{end}" in store), None)


def _check_linear(config: ModelConfig, store: Store, linear: Linear, prefix: str, kind: str) -> None:
    if kind == "dense":
        _check_float(store, f"{prefix}.weight", linear.shape)
        return
    if kind == "gptq":
        if found := gptq_problems(config, store, linear):
            raise FormatError(f"{store.info(f'{prefix}.qweight').path}: {'; '.join(found)}")
        return
    for part in EXL2_SUFFIXES:
        if f"{prefix}.{part}" not in store:
            raise missing_tensor(store, f"{prefix}.{part}", f"all of {', '.join(EXL2_SUFFIXES)} beside each other")
    infos = {part: store.info(f"{prefix}.{part}") for part in EXL2_SUFFIXES}
    file = infos["q_weight"].path
    check_headers(infos, prefix, file=file, in_features=linear.in_features, out_features=linear.out_features)
    # only the head may be padded: attention and MLP use the plain widths
    if linear.role != "head" and linear.out_features % 32:
        raise wrong_tensor(store, f"{prefix}.q_weight", f"a layer of {linear.out_features} outputs", "a multiple of 32")


def _check_float(store: Store, name: str, shape: tuple[int, ...], *others: tuple[int, ...]) -> None:
    if name not in store:
        raise missing_tensor(store, name, "it for this architecture")
    info = store.info(name)
    check_dense(info, name, info.shape if info.shape in others else shape, file=info.path)


def _check_granularity(store: Store, sources: list[Source]) -> None:
    if {source.kind for source in sources} == {"exl2", "dense"}:
        plain = next(source for source in sources if source.kind == "dense")
        names = ", ".join(source.linear.key.rsplit(".", 1)[-1] for source in sources)
        raise wrong_tensor(store, f"{plain.prefix}.weight", "a dense matrix among quantised ones", f"all of {names} quantised or none")


def _check_method(config: ModelConfig, store: Store, sources: Iterable[Source]) -> None:
    """One quantised format in a model, and the one that its config names."""
    examples = {source.kind: source for source in sources if source.kind != "dense"}
    named = config.quant_method
    if len(examples) > 1:
        both = " and ".join(f"{source.prefix} in {kind}" for kind, source in sorted(examples.items()))
        raise FormatError(f"{store.directory}: found {both}, expected one quantised format in a model: remove the files of the other")
    for kind, source in examples.items():
        if named not in (None, kind):
            raise FormatError(
                f"{store.directory}: found {source.prefix} in {kind}, expected {named} as quantization_config says: "
                "does config.json belong to these weights?"
            )
    if named == "gptq" and not examples:
        raise FormatError(f"{store.directory}: found no matrix in gptq, expected some as quantization_config says")


def _check_foreign(store: Store) -> None:
    """Raise ConfigError where the tensors give another format away."""
    if method := foreign_format(store.names()):
        refuse(store.directory, method)


def _unused_bias(store: Store, source: Source) -> bool:
    """Whether there is a bias of zeros that no architecture asked for: some GPTQ tools write them."""
    name = f"{source.linear.key}.bias"
    return source.kind == "gptq" and name in store and not bool(store.read(name).any())


def _check_extra(config: ModelConfig, store: Store, sources: Iterable[Source]) -> None:
    allowed = set(vector_shapes(config))
    for source in sources:
        allowed |= {f"{source.prefix}.{part}" for part in TENSOR_SUFFIXES[source.kind]}
        if source.linear.bias or _unused_bias(store, source):
            allowed.add(f"{source.linear.key}.bias")
    # buffers that old checkpoints saved; RoPE comes from the config
    extra = sorted(name for name in store.names() if name not in allowed and not name.endswith("rotary_emb.inv_freq"))
    if extra:
        _check_foreign(store)
        raise FormatError(
            f"{store.info(extra[0]).path}: found {len(extra)} tensors that {config.architecture} with this config.json lacks: "
            f"{_join_some(extra, MAX_SHOWN_NAMES)}; "
            "expected none: does config.json belong to these weights?"
        )


def _join_some(items: list[str], limit: int, separator: str = ", ") -> str:
    """The first of them, and how many more there are."""
    return separator.join(items[:limit]) + (f" and {len(items) - limit} more" if len(items) > limit else "")


def missing_tensor(store: Store, name: str, expected: str) -> FormatError:
    """The error for a tensor that no file has."""
    return _Missing(f"{store.directory}: tensor {name!r}: found none of that name in {len(store.files)} files, expected {expected}", name)


def wrong_tensor(store: Store, name: str, found: str, expected: str) -> FormatError:
    """The error for a tensor that does not fit."""
    return FormatError(f"{store.info(name).path}: tensor {name!r}: found {found}, expected {expected}")


class ReconstructedWeights(Mapping[str, Tensor]):
    """Full tensor name -> tensor in the nn.Linear layout, in its stored dtype; EXL2 matrices are reconstructed to f16, padding
    dropped, GPTQ ones to f32.

    Nothing is kept: every access reads the file again. A tied head without a matrix of its own has no entry.

    Args:
        config: what the model must have; the store is checked against it.
        store: the files; it stays open as long as this is used.

    Raises:
        FormatError: as `find_sources`; on access as `Exl2Tensors.read` and `GptqTensors.read`.
    """

    def __init__(self, config: ModelConfig, store: Store) -> None:
        self._config, self._store = config, store
        self._quantised = {}
        names = set(store.names())
        for source in find_sources(config, store).values():
            if source.kind != "dense":
                names -= {f"{source.prefix}.{part}" for part in TENSOR_SUFFIXES[source.kind]}
                self._quantised[f"{source.prefix}.weight"] = source
        self._names = sorted(names | set(self._quantised))

    def __getitem__(self, name: str) -> Tensor:
        source = self._quantised.get(name)
        if source is None:
            if name not in self._store:
                raise KeyError(name)
            return self._store.read(name)
        linear = source.linear
        if source.kind == "gptq":
            return read_gptq(self._config, self._store, linear).reconstruct().T
        exl2 = Exl2Tensors.read(self._store, source.prefix, in_features=linear.in_features, out_features=linear.out_features)
        return exl2.reconstruct()[:, : linear.out_features].T

    def __contains__(self, name: object) -> bool:
        return name in self._quantised or name in self._store

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
