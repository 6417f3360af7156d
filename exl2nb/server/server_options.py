"""Settings of a server: plain data, checked when made, also read from a TOML file."""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exl2nb.core.errors import ConfigError, MissingDependency, OptionError
from exl2nb.core.options import check_flag, check_keywords, check_path, check_range, make, shown
from exl2nb.sampling.params import check_integer

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
MAX_FILE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What a server allows and offers.

    host, port: where it listens; port 0 = a free one. api_keys: one of them is needed for every route but /health and /docs; none =
    anybody who reaches the port may call it. admin_keys: for loading, unloading and downloading models, and for switching templates and
    presets; they open all else too. Without any key, whoever reaches the port may do that as well. allow_no_key: listen beyond this
    machine without a key. cors_origins: pages of these origins may call it; none = no page of another origin. allowed_hosts: names by
    which a request may call a server that listens on this machine alone; a page that points a name of its own here is refused.

    max_body_bytes: of a request. max_queue: requests that run or wait; more are refused with 429 and Retry-After. request_timeout_s: of one
    answer, which then ends as it stands; None = never. drain_s: how long `stop` and SIGTERM wait for running requests.

    model_name: what the model is called; None = its folder's name. model_dir: folder whose models may be listed and loaded, and to which
    downloads go; None = neither. lora_dir: the same for adapters. template: chat template, as source or as the name of an instruct format;
    None = the model's own. presets: sampler presets by name: {field: value} or {field: {"override": value, "force": bool}}. preset: the
    one that applies at first.
    remote_images: fetch pictures that a request names by address; False = they must be in the request, as data URLs. Whoever may call the
    server can then make it ask any address that it reaches.
    docs: serve /docs and /openapi.json.
    generation_config: sampling options that a request does not give have the values of the model's generation_config.json; False = they
    do not. Without such values a chat has temperature 0.7 and top_p 0.95, and /v1/completions temperature 1.

    stream_interval_ms: tokens of a stream that come within it join in one event, so that a screen still sees about 30 events a second. The
    first token of an answer goes out at once, the last ones with its end. 0 = an event per token, which costs more than a small model.
    Streams that begin beside more than 64 other requests: twice as long.
    """

    host: str = "127.0.0.1"
    port: int = 5000
    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    allow_no_key: bool = False
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    max_body_bytes: int = 8 << 20
    max_queue: int = 256
    request_timeout_s: float | None = 600.0
    drain_s: float = 30.0
    model_name: str | None = None
    model_dir: Path | None = None
    lora_dir: Path | None = None
    template: str | None = None
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    preset: str | None = None
    remote_images: bool = False
    docs: bool = True
    generation_config: bool = True
    stream_interval_ms: float = 33.0

    def __post_init__(self) -> None:
        if not isinstance(self.host, str) or not self.host:
            raise OptionError(f"host is {shown(self.host)}; expected an address, such as '127.0.0.1'")
        check_integer("port", self.port, 0, 65535)
        for name in ("api_keys", "admin_keys", "cors_origins", "allowed_hosts"):
            object.__setattr__(self, name, _texts(name, getattr(self, name)))
        for name in ("allow_no_key", "remote_images", "docs", "generation_config"):
            check_flag(name, getattr(self, name))
        check_integer("max_body_bytes", self.max_body_bytes, 1024, 1 << 30)
        check_integer("max_queue", self.max_queue, 1, 1 << 20)
        if self.request_timeout_s is not None:
            check_range("request_timeout_s", self.request_timeout_s, 0.001, 1e9)
        check_range("drain_s", self.drain_s, 0.0, 1e6)
        check_range("stream_interval_ms", self.stream_interval_ms, 0.0, 10_000.0)
        for name in ("model_dir", "lora_dir"):
            if (folder := getattr(self, name)) is not None:
                check_path(name, folder)
                object.__setattr__(self, name, Path(os.fspath(folder)).expanduser())
        for name in ("model_name", "template", "preset"):
            if not isinstance(getattr(self, name), (str, type(None))):
                raise OptionError(f"{name} is {shown(getattr(self, name))}; expected a text")
        if not isinstance(self.presets, Mapping) or not all(isinstance(one, Mapping) for one in self.presets.values()):
            raise OptionError(f"presets is {shown(self.presets)}; expected a table of fields for each name")
        if self.preset is not None and self.preset not in self.presets:
            raise OptionError(
                f"preset is {self.preset!r}; expected one of {', '.join(self.presets) or 'the presets, of which there are none'}"
            )
        if not self.local and not (self.api_keys or self.admin_keys or self.allow_no_key):
            raise OptionError(
                f"host is {self.host!r}, which other machines can reach, and there is no key; give api_keys (--api-key-file), listen on "
                "127.0.0.1, or say allow_no_key=True"
            )

    @property
    def local(self) -> bool:
        """True where only this machine can reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host in LOCAL_HOSTS

    @classmethod
    def of(cls, **options: Any) -> ServerOptions:
        """Build from keywords; an unknown one is an OptionError that names the nearest known one."""
        return make(cls, options, where="serve")


def _texts(name: str, value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not all(isinstance(one, str) and one for one in texts):
        raise OptionError(f"{name} is {shown(value)}; expected texts, none of them empty")
    return tuple(texts)


def read_config(path: Path, known: Sequence[str]) -> dict[str, Any]:
    """Read a TOML file of options.

    Args:
        known: names that may occur.

    Raises:
        ConfigError: it cannot be read, or holds something else. MissingDependency: Python 3.10 without the package tomli.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise MissingDependency("reading TOML needs the package tomli on Python 3.10; pip install 'exl2nb[server]'") from error
    try:
        if path.stat().st_size > MAX_FILE:
            raise ConfigError(f"{path}: larger than {MAX_FILE} bytes; expected a configuration")
        value = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as TOML ({error})") from error
    try:
        check_keywords(value, list(known), where=str(path))
    except OptionError as error:
        raise ConfigError(str(error)) from None
    return value


def read_keys(path: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Keys of a file, one a line: users' keys, and administrators' behind "admin:". Empty lines and lines with # do not count.

    Raises:
        ConfigError: it cannot be read, or holds no key.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()[:1000]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); expected a key a line") from error
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise ConfigError(f"{path}: holds no key; expected one a line")
    admin = tuple(key.removeprefix("admin:").strip() for key in keys if key.startswith("admin:"))
    return tuple(key for key in keys if not key.startswith("admin:")), admin
