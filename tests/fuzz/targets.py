"""What is fuzzed: functions of bytes that may raise named errors and nothing else.

Each target has seeds, small valid inputs that a fuzzer starts from. `fuzz.py` drives them with atheris, `test_fuzz.py` with mutations.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import struct
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

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
from exl2nb.model.loader import read_model_config
from exl2nb.quant.exl2 import Exl2Tensors
from exl2nb.sampling.params import SamplingParams
from exl2nb.tokenizer import chat
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
# what a mutation may insert whole
WORDS = (
    *(f'"{name}":' for name in (*OPTIONS, *KEYWORDS, "dtype", "shape", "data_offsets", "normalizer", "decoder", "Regex", "chat_template")),
    *('{"', '":', "[]", "{}", "null", "true", "1e999", "-1", "NaN", "\\ud800", "18446744073709551616", '"Replace"', '"Strip"', '"F32"'),
    *("{% for a in ", "{% endfor %}", "{% if ", "{% endif %}", "{% set a = ", "{% macro f() %}", "{{ ", " }}", " | tojson", "range(9)"),
)


@dataclasses.dataclass(frozen=True)
class Target:
    """run: takes any bytes. seeds: valid inputs."""

    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]


def target(seeds: Callable[[], list[bytes]]) -> Callable[[Callable[[bytes], Any]], Callable[[bytes], None]]:
    """Register a function under its name; its named errors are fine."""

    def register(function: Callable[[bytes], Any]) -> Callable[[bytes], None]:
        def run(data: bytes) -> None:
            with suppress(Exl2Error):
                function(data)

        TARGETS[function.__name__] = Target(run, seeds)
        return run

    return register


@cache
def folder() -> Path:
    """In memory where the system has such a place; removed when the process ends."""
    place = tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None, prefix="exl2nb-fuzz-")
    globals()["_place"] = place
    return Path(place.name)


def written(name: str, data: bytes) -> Path:
    path = folder() / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
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


@target(lambda: [b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"__metadata__":{"x":"y"}}'])
def safetensors_header(data: bytes) -> None:
    safetensors_file(len(data).to_bytes(8, "little") + data + bytes(64))


@target(lambda: [(DEMO / "config.json").read_bytes(), (EXL2 / "config.json").read_bytes()])
def config(data: bytes) -> None:
    read_model_config(written("config/config.json", data).parent)


@target(lambda: [b'{"metadata":{"total_size":8},"weight_map":{"a":"one.safetensors"}}'])
def index(data: bytes) -> None:
    written("index/one.safetensors", saved(a=torch.ones(2)))
    with TensorStore(written("index/model.safetensors.index.json", data).parent) as store:
        for name in store.names():
            store.read(name)


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


@cache
def trial() -> Helper:
    return Helper("exl2nb.tokenizer.backend", Limits(cpu_s=5, wall_s=60, memory_bytes=512 << 20))


@target(tokenizer_seeds)
def tokenizer_file(data: bytes) -> None:
    """A file that passes the trial in the helper process is then used in this one."""
    import tokenizers

    text = data.decode("utf-8", "replace")
    try:
        trial().ask({"text": text})
    except HelperError:
        return
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(text))
    for words in ("It was a dark night, 12:30. é東\n\n  x", "a" * 300, " " * 300):
        ids = tokenizer.encode(words)
        tokenizer.decode(ids)
        assert tokenizer.at_least(words) <= len(ids)


@target(
    lambda: [
        (DEMO / "tokenizer_config.json").read_bytes(),
        b'{"bos_token":{"content":"<s>"},"chat_template":[{"name":"default","template":"x"}]}',
    ]
)
def tokenizer_config(data: bytes) -> None:
    import tokenizers

    backend = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    for name in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        written("tokenizer/" + name, data)
        Tokenizer(backend, directory=folder() / "tokenizer")
        (folder() / "tokenizer" / name).unlink()


@target(
    lambda: [
        TEMPLATE.encode(),
        b"{% set n = namespace(x=1) %}{% macro f(a) %}{{ a }}{% endmacro %}{{ f('%s' % n.x) }}{{ strftime_now('%Y') }}",
    ]
)
def template(data: bytes) -> None:
    chat.render(
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}], data.decode("utf-8", "replace"), tools=[{"a": 1}]
    )


# ---- requests


@target(
    lambda: [
        b'{"temperature":0.8,"top_k":40,"stop":["a"],"logit_bias":{"3":1.5},"max_tokens":2,"seed":1}',
        b'{"beams":2,"dry_multiplier":0.8}',
    ]
)
def options(data: bytes) -> None:
    given = value_of(data, OPTIONS)
    Request.of([1, 2], where="fuzz", **{name: value for name, value in given.items() if name not in ("prompt_ids", "where", "stream")})


@target(
    lambda: [
        b'{"temperature":1,"top_k":4,"min_p":0.1,"max_tokens":2,"seed":1}',
        b'{"typical_p":0.5,"xtc_probability":0.5,"mirostat":2,"max_tokens":3}',
    ]
)
def generation(data: bytes) -> None:
    """Options that pass their checks, through the engine and the compiled samplers."""
    given = value_of(data, OPTIONS)
    if not {"n", "beams", "on_chunk"} & given.keys():
        llm().generate("It", **{**given, "max_tokens": 2})


@target(
    lambda: [
        b'{"type":"object","properties":{"a":{"type":"integer"},"b":{"enum":["x",null]}},"required":["a"]}',
        b'{"anyOf":[{"$ref":"#/$defs/x"}],"$defs":{"x":{"type":"string"}}}',
    ]
)
def schema(data: bytes) -> None:
    given = value_of(data, KEYWORDS)
    Structure("schema", given, llm().tokenizer, llm().config.vocab_size).start().allowed()


@target(lambda: [b"[a-z]+(x|y){2}", b"\\d{3}-[^ab]*"])
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


@target(lambda: [(DEMO / "measurement.json").read_bytes()[:4000], b'{"exl2nb":{"format":1,"linears":{}}}'])
def measurement(data: bytes) -> None:
    Measurement.load(written("measurement.json", data))


def cache_seeds() -> list[bytes]:
    llm().generate("It was a dark and stormy night; the rain fell in torrents.", max_tokens=40, temperature=0, ignore_eos=True)
    llm().cache.save(folder() / "pages.safetensors")
    return [(folder() / "pages.safetensors").read_bytes()[: 1 << 16]]


@target(cache_seeds)
def prompt_cache(data: bytes) -> None:
    llm().cache.load(written("pages.safetensors", data))


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
    """Answers of a server's application to POST requests, without a socket."""
    import asyncio

    import httpx

    from exl2nb.server.app import application
    from exl2nb.server.options import ServerOptions
    from exl2nb.server.state import State

    loop = asyncio.new_event_loop()
    app = application(State(ServerOptions(template=TEMPLATE), llm(), owned=False))
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1", timeout=60)

    def ask(route: str, body: bytes) -> tuple[int, bytes]:
        answer = loop.run_until_complete(client.post(f"/v1/{route}", content=body, headers={"content-type": "application/json"}))
        return answer.status_code, answer.content

    return ask


@target(
    lambda: [
        b'\0{"prompt":"It was","max_tokens":2,"temperature":0,"stop":["x"],"logprobs":2}',
        b'\1{"messages":[{"role":"user","content":"hi"}],"max_tokens":2,"stream":true}',
        b'\2{"input":[{"type":"message","role":"user","content":[{"type":"input_text","text":"hi"}]}],"max_output_tokens":2}',
        b'\3{"messages":[{"role":"user","content":[{"type":"text","text":"hi"}]}],"max_tokens":2,"system":"be short"}',
        b'\5{"text":"It was a dark night"}',
        b'\6{"tokens":[5,6,7]}',
        b'\1{"messages":[{"role":"user","content":"x"}],"max_tokens":1,"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}]}',
    ]
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
