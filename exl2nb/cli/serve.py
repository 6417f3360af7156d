"""`exl2nb serve`: a model over HTTP until a signal ends it."""

from __future__ import annotations

import argparse
import signal
import threading
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exl2nb.cli.console import Console
from exl2nb.cli.models import (
    LOAD_OPTIONS,
    add_cache_option,
    add_flag,
    add_generation_config_option,
    add_load_options,
    add_lora_option,
    load_loras,
    locate,
    locate_demo,
)
from exl2nb.core.errors import OptionError
from exl2nb.llm.load_keywords import LOAD_OPTIONS_BY_NAME

if TYPE_CHECKING:
    from exl2nb.server.server_options import ServerOptions

REPLICA_OPTIONS = ("on", "replicas", "replica_gpus")
LOADING_OPTIONS = ("cache", "context", "cache_tokens", "max_sequences", *LOAD_OPTIONS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command; a TOML file may hold any of them, and what is given here counts more."""
    parser.add_argument("model", nargs="?", help="model directory, hub id, or `demo`; none: begin without a model (needs --model-dir)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with options by their names here, `_` for `-`, and presets")
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port; 0 takes a free one (default 5000)")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="keys, one a line; administrators' begin with `admin:`")
    parser.add_argument("--allow-no-key", action="store_true", default=None, help="listen beyond this machine without a key")
    parser.add_argument("--remote-images", action="store_true", default=None, help="fetch pictures that requests name by address")
    parser.add_argument(
        "--cors-origin", dest="cors_origins", action="append", metavar="ORIGIN", help="pages that may call it; again for more"
    )
    parser.add_argument("--allowed-host", dest="allowed_hosts", action="append", metavar="NAME", help="another name of this machine")
    parser.add_argument("--model-name", help="what clients call the model (default: its folder's name)")
    parser.add_argument("--model-dir", type=Path, metavar="FOLDER", help="models that clients with an admin key may load")
    parser.add_argument("--lora-dir", type=Path, metavar="FOLDER", help="adapters that clients with an admin key may load")
    parser.add_argument("--template", metavar="NAME|FILE", help="chat template: chatml, llama2, alpaca, vicuna, mistral, or a Jinja file")
    parser.add_argument("--max-queue", type=int, help="requests that run or wait, at most (default 256)")
    parser.add_argument("--request-timeout-s", type=float, metavar="S", help="seconds after which an answer ends (default 600)")
    parser.add_argument("--drain-s", type=float, metavar="S", help="seconds that running requests get at the end (default 30)")
    parser.add_argument(
        "--stream-interval-ms", type=float, metavar="MS", help="tokens that come within it join in one event (default 33; 0 = never)"
    )
    parser.add_argument("--on", choices=("here", "ray"), help="ray: replicas on a Ray cluster, or on one that is started here")
    parser.add_argument("--replicas", metavar="N|MIN:MAX", help="with --on ray: how many, or as many as requests need (default 1)")
    parser.add_argument("--replica-gpus", type=float, metavar="N", help="with --on ray: GPUs of a replica (default 1 where there are any)")
    add_generation_config_option(parser)
    add_cache_option(parser, "fp16")
    parser.set_defaults(cache=None)
    for name in ("context", "cache_tokens", "max_sequences"):
        add_flag(parser, LOAD_OPTIONS_BY_NAME[name])
    add_load_options(parser)
    add_lora_option(parser, "LoRA adapter that requests may name as MODEL:ADAPTER; again for more")


def run(args: argparse.Namespace, console: Console) -> int:
    """Load and serve; SIGINT and SIGTERM let running requests finish."""
    from exl2nb.llm.load import load
    from exl2nb.server.http_server import Server
    from exl2nb.server.server_options import ServerOptions

    given = _given(args)
    name = given.pop("model", None)
    loading, adapters = {key: given.pop(key) for key in LOADING_OPTIONS if key in given}, args.lora
    on, replicas, gpus = (given.pop(key, None) for key in REPLICA_OPTIONS)
    options = ServerOptions.of(**given)
    if on == "ray":
        return _on_ray(name, options, {"replicas": replicas or 1, "gpus": gpus, "loading": loading, "adapters": adapters or ()}, console)
    if replicas is not None or gpus is not None:
        raise OptionError("serve: replicas are for --on ray")
    if name is None and options.model_dir is None:
        raise OptionError("serve: no model was given; name one, or give --model-dir so that clients can load one")
    llm = None
    if name is not None:
        revision = loading.pop("revision", None)
        if isinstance(loading.get("draft"), str):
            loading["draft"] = locate_demo(loading["draft"])
        llm = load(locate(name, console.sink, revision=revision), progress=console.sink, **loading)
        load_loras(llm, adapters, console.sink)
    server = Server(llm, options, owned=True)

    def started() -> None:
        console.result(
            {"url": server.url, "model": server.figures()["model"]}, f"serving {server.figures()['model'] or 'no model'} at {server.url}"
        )

    try:
        server.run(started)
    finally:
        server.close()
    return 0


def _on_ray(name: str | None, options: ServerOptions, given: dict[str, Any], console: Console) -> int:
    """Replicas until a signal ends them."""
    from exl2nb.server.replicas import serve_replicas

    if name is None:
        raise OptionError("serve: --on ray needs a model")
    revision = given["loading"].pop("revision", None)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())  # noqa: TID251 - of a command's own process
    with serve_replicas(str(locate(name, console.sink, revision=revision)), options, **given) as served:
        console.result({"url": served.url, "model": name}, f"serving {name} at {served.url}")
        while not ended.wait(1):
            pass
    return 0


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """Options of the file and of the command line together."""
    from exl2nb.eval.rows import read_text
    from exl2nb.server.server_options import ServerOptions, read_config, read_keys
    from exl2nb.tokenizer.template import INSTRUCT_TEMPLATES

    known = [*(field.name for field in fields(ServerOptions)), *LOADING_OPTIONS, *REPLICA_OPTIONS, "model", "api_key_file"]
    given = read_config(args.config, known) if args.config is not None else {}
    given |= {key: value for key in known if (value := getattr(args, key, None)) is not None}
    if (path := given.pop("api_key_file", None)) is not None:
        users, admins = read_keys(Path(path))
        given["api_keys"] = (*given.get("api_keys", ()), *users)
        given["admin_keys"] = (*given.get("admin_keys", ()), *admins)
    if isinstance(template := given.get("template"), str) and template not in INSTRUCT_TEMPLATES and "{" not in template:
        given["template"] = read_text(Path(template))
    return given
