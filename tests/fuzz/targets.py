"""What is fuzzed: functions of bytes that may raise named errors and nothing else.

Each target has seeds, small valid inputs that a fuzzer starts from. `fuzz.py` drives them with atheris, `test_fuzz.py` with mutations.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import struct
import tempfile
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from jinja2 import TemplateSyntaxError

import exl2nb as ex
from exl2nb import ops
from exl2nb.constraint.structure import Structure
from exl2nb.converter.measurement import Measurement
from exl2nb.core.errors import Exl2Error
from exl2nb.core.helper import Helper, HelperError, Limits
from exl2nb.generator.request import Request
from exl2nb.io import safetensors
from exl2nb.io.shards import TensorStore
from exl2nb.llm.conversation import Conversation
from exl2nb.model.loader import load_model, read_model_config
from exl2nb.model.lora import ADAPTER_SETTINGS_FILE, ADAPTER_WEIGHTS_FILE, adapter_changes, read_lora, save_lora
from exl2nb.quant.exl2 import Exl2Tensors
from exl2nb.sampling.params import SamplingParams
from exl2nb.tokenizer import template as chat_templates
from exl2nb.tokenizer.sandbox import Sandbox
from exl2nb.tokenizer.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
DEMO = Path(ex.__file__).parent / "demo_model"
EXL2 = ROOT / "tests" / "data" / "demo-exl2-4.0bpw"
TEMPLATE = (
    "{% for m in messages %}{{ m.role | upper ~ ': ' + m['content'] }}{% endfor %}{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}"
)
TARGETS: dict[str, Target] = {}

OPTIONS = sorted(
    {field.name for kind in (Request, SamplingParams) for field in dataclasses.fields(kind)} - {"prompt_ids", "stream", "sampling"}
)
KEYWORDS = (
    *("type", "object", "array", "string", "integer", "number", "null", "properties", "required", "items", "prefixItems", "enum", "const"),
    *("anyOf", "oneOf", "allOf", "not", "$ref", "$defs", "#/$defs/x", "#", "x", "pattern", "format", "date-time", "minimum", "maximum"),
    *("minLength", "maxLength", "minItems", "maxItems", "additionalProperties", "patternProperties", "uniqueItems", "multipleOf"),
)
PEFT = (
    "peft_type",
    "lora_alpha",
    "use_rslora",
    "alpha_pattern",
    "rank_pattern",
    ".lora_A.weight",
    ".lora_magnitude_vector",
    ".base_layer.",
)
# what a mutation may insert whole
WORDS = (
    *(
        f'"{name}":'
        for name in (*OPTIONS, *KEYWORDS, "dtype", "shape", "data_offsets", "normalizer", "decoder", "Regex", "chat_template", *PEFT)
    ),
    *('{"', '":', "[]", "{}", "null", "true", "1e999", "-1", "NaN", "\\ud800", "18446744073709551616", '"Replace"', '"Strip"', '"F32"'),
    *("{% for a in ", "{% endfor %}", "{% if ", "{% endif %}", "{% set a = ", "{% macro f() %}", "{{ ", " }}", " | tojson", "range(9)"),
)


@dataclasses.dataclass(frozen=True)
class Target:
    """run: takes any bytes. seeds: valid inputs."""

    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]


def target(*seeds: bytes | Callable[[], list[bytes]]) -> Callable[[Callable[[bytes], Any]], Callable[[bytes], None]]:
    """Register a function under its name; its named errors are fine. seeds: some, and functions that make some."""

    def made() -> list[bytes]:
        return [seed for some in seeds for seed in ([some] if isinstance(some, bytes) else some())]

    def register(function: Callable[[bytes], Any]) -> Callable[[bytes], None]:
        def run(data: bytes) -> None:
            with suppress(Exl2Error):
                function(data)

        TARGETS[function.__name__] = Target(run, made)
        return run

    return register


@cache
def folder() -> Path:
    """In memory where the system has such a place; removed when the process ends."""
    place = tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None, prefix="exl2nb-fuzz-")
    globals()["_place"] = place
    return Path(place.name)


@cache
def place_of(name: str) -> Path:
    path = folder() / name
    path.parent.mkdir(exist_ok=True)
    return path


def written(name: str, data: bytes) -> Path:
    path = place_of(name)
    with open(path, "wb", buffering=0) as file:
        file.write(data)
    return path


def value_of(data: bytes, names: Sequence[str]) -> dict[str, Any]:
    """The JSON object that the bytes spell; for others an object that they choose: keys among `names`, values of every kind, nested."""
    with suppress(ValueError, RecursionError):
        if isinstance(found := json.loads(data), dict):
            return found
    stream = iter(data)

    def few(count: int) -> bytes:
        return bytes(itertools.islice(stream, count))

    def value(depth: int) -> Any:
        kind = next(stream, 0) % (10 if depth else 8)
        if kind == 8:
            return {names[next(stream, 0) % len(names)]: value(depth - 1) for _ in range(next(stream, 0) % 4)}
        if kind == 9:
            return [value(depth - 1) for _ in range(next(stream, 0) % 4)]
        simple = (None, True, False, next(stream, 0), int.from_bytes(few(8).ljust(8, b"\0"), "little", signed=True))
        others = (struct.unpack("d", few(8).ljust(8, b"\0"))[0], few(next(stream, 0) % 16).decode("utf-8", "replace"))
        return (*simple, *others, names[next(stream, 0) % len(names)])[kind]

    return {names[next(stream, 0) % len(names)]: value(4) for _ in range(1 + next(stream, 0) % 5)}


@cache
def llm() -> Any:
    return ex.demo(progress=None, device="cpu", context=64, cache_tokens=256)


def saved(**tensors: torch.Tensor) -> bytes:
    safetensors.save(folder() / "seed.safetensors", tensors)
    return (folder() / "seed.safetensors").read_bytes()


# ---- files


@target(lambda: [saved(a=torch.arange(6).view(2, 3), b=torch.ones(3, dtype=torch.bfloat16)), saved(empty=torch.zeros(0)), saved()])
def safetensors_file(data: bytes) -> None:
    with safetensors.SafetensorsFile(written("one.safetensors", data)) as file:
        for name in file.names():
            file.read(name)


@target(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"__metadata__":{"x":"y"}}')
def safetensors_header(data: bytes) -> None:
    safetensors_file(len(data).to_bytes(8, "little") + data + bytes(64))


@target(lambda: [(DEMO / "config.json").read_bytes(), (EXL2 / "config.json").read_bytes()])
def config(data: bytes) -> None:
    read_model_config(written("config/config.json", data).parent)


@cache
def shard() -> Path:
    return written("index/one.safetensors", saved(a=torch.ones(2)))


@target(b'{"metadata":{"total_size":8},"weight_map":{"a":"one.safetensors"}}')
def index(data: bytes) -> None:
    shard()
    with TensorStore(written("index/model.safetensors.index.json", data).parent) as store:
        for name in store.names():
            store.read(name)


@cache
def adapters() -> tuple[dict[str, Any], Path, bytes, bytes]:
    """What `adapter_changes` wants of a model; the folder of an adapter; its two files."""
    model = load_model(DEMO)
    network, program = model.network_and_program
    layer, hidden, kv = "model.layers.0", model.config.hidden_size, model.config.num_kv_heads * model.config.head_dim
    pairs = {f"{layer}.self_attn.q_proj": hidden, f"{layer}.self_attn.v_proj": kv}
    save_lora(folder() / "adapter", {name: (torch.ones(1, hidden), torch.ones(n, 1)) for name, n in pairs.items()}, alpha=2)
    settings, weights = ((folder() / "adapter" / name).read_bytes() for name in (ADAPTER_SETTINGS_FILE, ADAPTER_WEIGHTS_FILE))
    return {"config": model.config, "network": network, "program": program}, folder() / "adapter", settings, weights


@target(lambda: [b"\0" + adapters()[2], b"\1" + adapters()[3]], b'\0{"peft_type":"LORA","lora_alpha":1,"alpha_pattern":{".*.0.v_proj":3}}')
def adapter(data: bytes) -> None:
    """adapter_config.json or adapter_model.safetensors of a LoRA, by the first byte; the other one is good."""
    wants, place, settings, weights = adapters()
    files = {ADAPTER_SETTINGS_FILE: settings, ADAPTER_WEIGHTS_FILE: weights} | (
        {(ADAPTER_SETTINGS_FILE, ADAPTER_WEIGHTS_FILE)[data[0] % 2]: data[1:]} if data else {}
    )
    for name, content in files.items():
        written(f"adapter/{name}", content)
    adapter_changes(read_lora(place, wants["config"]), **wants)


@cache
def matrix() -> tuple[bytes, ...]:
    """A matrix of the test model: bytes of its tensors."""
    with TensorStore(EXL2) as store:
        key = next(name.removesuffix(".q_groups") for name in store.names() if name.endswith("k_proj.q_groups"))
        good = Exl2Tensors.read(store, key)
    return key.encode(), *(getattr(good, field.name) for field in dataclasses.fields(good))


@target(lambda: [matrix()[4].numpy().tobytes(), matrix()[3].numpy().tobytes()])
def exl2_matrix(data: bytes) -> None:
    """Group tables, scales and the permutation of a matrix, read by Python and by the compiled library."""
    good = dict(zip(("q_weight", "q_scale", "q_scale_max", "q_groups", "q_invperm"), matrix()[1:]))
    for name in ("q_groups", "q_scale_max", "q_invperm"):
        tensor = good[name].clone()
        raw = tensor.view(torch.uint8).reshape(-1)
        count = min(len(data), len(raw))
        raw[:count] = torch.frombuffer(bytearray(data), dtype=torch.uint8)[:count] if count else raw[:0]
        with suppress(Exl2Error):
            checked = Exl2Tensors(**{**good, name: tensor}).validate()
            blob = ops.pack_exl2(checked.q_weight, checked.q_scale, checked.q_scale_max, checked.q_groups, checked.q_invperm)
            ops.linear(torch.ones(1, len(checked.q_invperm)), blob)


@target(lambda: [ops.pack_dense(torch.ones(3, 32)).numpy().tobytes()])
def blob(data: bytes) -> None:
    """A packed matrix from anywhere: the compiled library checks each before it reads it."""
    if not data:
        return
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    with suppress(RuntimeError):
        ops.linear(torch.ones(1, 32), raw)


# ---- tokenizers and templates


def tokenizer_seeds() -> list[bytes]:
    from tests.tokenizer.makers import MAKERS

    return [make().to_str().encode() for make in MAKERS.values()]


def worth_asking(data: bytes, read: Callable[[str], Any], text: str) -> bool:
    """Whether a helper process should see a text: what `read` refuses here is refused there, so that every 16th of them is enough."""
    with suppress(ValueError, RecursionError, TemplateSyntaxError):
        read(text)
        return True
    return zlib.crc32(data) % 16 == 0


@cache
def trial() -> Helper:
    return Helper("exl2nb.tokenizer.backend", Limits(cpu_s=5, wall_s=60, memory_bytes=512 << 20))


@target(tokenizer_seeds)
def tokenizer_file(data: bytes) -> None:
    """A file that passes the trial in the helper process is then used in this one."""
    import tokenizers

    text = data.decode("utf-8", "replace")
    if not worth_asking(data, json.loads, text):
        return
    try:
        trial().ask({"text": text})
    except HelperError:
        return
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(text))
    for words in ("It was a dark night, 12:30. é東\n\n  x", "a" * 300, " " * 300):
        ids = tokenizer.encode(words)
        tokenizer.decode(ids)
        assert tokenizer.at_least(words) <= len(ids)


@cache
def backend() -> Any:
    import tokenizers

    return tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))


@target(
    lambda: [(DEMO / "tokenizer_config.json").read_bytes()],
    b'{"bos_token":{"content":"<s>"},"chat_template":[{"name":"default","template":"x"}]}',
)
def tokenizer_config(data: bytes) -> None:
    for name in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        written("tokenizer/" + name, data)
        Tokenizer(backend(), directory=folder() / "tokenizer")
        (folder() / "tokenizer" / name).unlink()


@cache
def renderer() -> tuple[Sandbox, Helper]:
    return Sandbox(), Helper("exl2nb.tokenizer.sandbox", dataclasses.replace(chat_templates.SANDBOX_LIMITS, cpu_s=0.3))


@target(
    TEMPLATE.encode(),
    b"{% set n = namespace(x=1) %}{% macro f(a) %}{{ a }}{% endmacro %}{{ f('%s' % n.x) }}{{ strftime_now('%Y') }}",
)
def template(data: bytes) -> None:
    """Parsed here, where the fuzzer sees which lines run; compiled and rendered in the helper process, with less time than usual."""
    sandbox, helper = renderer()
    text = data.decode("utf-8", "replace")
    if worth_asking(data, sandbox.parse, text):
        with patch.object(chat_templates, "TEMPLATE_HELPER", helper):
            chat_templates.render([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}], text, tools=[{"a": 1}])


# ---- requests


@target(
    b'{"temperature":0.8,"top_k":40,"stop":["a"],"logit_bias":{"3":1.5},"max_tokens":2,"seed":1}',
    b'{"beams":2,"dry_multiplier":0.8}',
)
def options(data: bytes) -> None:
    given = value_of(data, OPTIONS)
    Request.of([1, 2], where="fuzz", **{name: value for name, value in given.items() if name not in ("prompt_ids", "where", "stream")})


@target(
    b'{"temperature":1,"top_k":4,"min_p":0.1,"max_tokens":2,"seed":1}',
    b'{"typical_p":0.5,"xtc_probability":0.5,"mirostat":2,"max_tokens":3}',
)
def generation(data: bytes) -> None:
    """Options that pass their checks, through the engine and the compiled samplers."""
    given = value_of(data, OPTIONS)
    if not {"n", "beams", "on_chunk"} & given.keys():
        llm().generate("It", **{**given, "max_tokens": 2})


@target(
    b'{"type":"object","properties":{"a":{"type":"integer"},"b":{"enum":["x",null]}},"required":["a"]}',
    b'{"anyOf":[{"$ref":"#/$defs/x"}],"$defs":{"x":{"type":"string"}}}',
)
def schema(data: bytes) -> None:
    given = value_of(data, KEYWORDS)
    Structure("schema", given, llm().tokenizer, llm().config.vocab_size).start().allowed()


@target(b"[a-z]+(x|y){2}", b"\\d{3}-[^ab]*")
def regex(data: bytes) -> None:
    Structure("regex", data.decode("utf-8", "replace"), llm().tokenizer, llm().config.vocab_size).start().allowed()


# ---- saved files


def conversation_seeds() -> list[bytes]:
    talk = Conversation(llm(), system="Be brief.", template=TEMPLATE)
    talk.say("Hello", max_tokens=2)
    talk.save(folder() / "talk.json")
    return [(folder() / "talk.json").read_bytes()]


@target(conversation_seeds)
def conversation(data: bytes) -> None:
    Conversation.load(llm(), written("talk.json", data))


@target(lambda: [(DEMO / "measurement.json").read_bytes()[:4000]], b'{"exl2nb":{"format":1,"linears":{}}}')
def measurement(data: bytes) -> None:
    Measurement.load(written("measurement.json", data))


@cache
def cache_file() -> tuple[bytes, int]:
    """A saved prompt cache up to its keys and values, and how many bytes those have."""
    llm().generate("It was a dark and stormy night; the rain fell in torrents.", max_tokens=40, temperature=0, ignore_eos=True)
    llm().cache.save(folder() / "pages.safetensors")
    whole = (folder() / "pages.safetensors").read_bytes()
    header = int.from_bytes(whole[:8], "little")
    cut = 8 + header + min(tensor["data_offsets"][0] for name, tensor in json.loads(whole[8 : 8 + header]).items() if name[:2] == "k.")
    return whole[:cut], len(whole) - cut


@target(lambda: [cache_file()[0]])
def prompt_cache(data: bytes) -> None:
    """Header, tokens and parents of pages; keys and values are zeros, which the file system does not store."""
    os.truncate(path := written("pages.safetensors", data), len(data) + cache_file()[1])
    llm().cache.load(path)


# ---- the server

ROUTES = (
    "completions",
    "chat/completions",
    "responses",
    "messages",
    "messages/count_tokens",
    "token/encode",
    "token/decode",
    "embeddings",
    "model/load",
    "lora/load",
)
FIELDS = (
    *("model", "prompt", "messages", "role", "content", "text", "type", "input", "system", "max_tokens", "stream", "n", "best_of", "stop"),
    *("tools", "tool_choice", "function", "name", "arguments", "parameters", "input_schema", "response_format", "json_schema", "schema"),
    *(
        "logprobs",
        "top_logprobs",
        "logit_bias",
        "temperature",
        "top_p",
        "seed",
        "echo",
        "suffix",
        "stream_options",
        "include_usage",
        "user",
    ),
    *("instructions", "reasoning", "effort", "metadata", "tokens", "add_bos_token", "prompt_template", "template_vars", "banned_strings"),
)


@cache
def served() -> Callable[[str, bytes], tuple[int, bytes]]:
    """Answers of a server's application to POST requests, without a socket and without a client."""
    import asyncio

    from exl2nb.server.app import application
    from exl2nb.server.server_options import ServerOptions
    from exl2nb.server.state import State

    loop = asyncio.new_event_loop()
    app = application(State(ServerOptions(template=TEMPLATE), llm(), owned=False))
    plain = {"type": "http", "method": "POST", "scheme": "http", "http_version": "1.1", "query_string": b"", "client": ("127.0.0.1", 1)}
    names = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]

    async def answer(route: str, body: bytes) -> tuple[int, bytes]:
        status, parts, messages = 0, [], [{"type": "http.request", "body": body}]

        async def receive() -> Any:
            return messages.pop() if messages else await asyncio.Event().wait()  # then the client waits

        async def send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            parts.append(message.get("body", b""))

        path, headers = f"/v1/{route}", [*names, (b"content-length", str(len(body)).encode())]
        await app({**plain, "path": path, "raw_path": path.encode(), "headers": headers}, receive, send)
        return status, b"".join(parts)

    def ask(route: str, body: bytes) -> tuple[int, bytes]:
        return loop.run_until_complete(answer(route, body))

    return ask


@target(
    b'\0{"prompt":"It was","max_tokens":2,"temperature":0,"stop":["x"],"logprobs":2}',
    b'\1{"messages":[{"role":"user","content":"hi"}],"max_tokens":2,"stream":true}',
    b'\2{"input":[{"type":"message","role":"user","content":[{"type":"input_text","text":"hi"}]}],"max_output_tokens":2}',
    b'\3{"messages":[{"role":"user","content":[{"type":"text","text":"hi"}]}],"max_tokens":2,"system":"be short"}',
    b'\5{"text":"It was a dark night"}',
    b'\6{"tokens":[5,6,7]}',
)
def http_body(data: bytes) -> None:
    """Bodies for every route that takes one: never a server error, and an error has a message."""
    if not data:
        return
    route, body = ROUTES[data[0] % len(ROUTES)], data[1:]
    status, answer = served()(route, body)
    if status < 300 and data[0] < 128:
        return
    assert status < 500, (route, status, answer[:500])
    if data[0] >= 128:  # an object of known fields, which no mutation of JSON text would find
        given = {"max_tokens": 2, **value_of(body, FIELDS)}
        status, answer = served()(route, json.dumps(given).encode())
        assert status < 500, (route, given, status, answer[:500])
