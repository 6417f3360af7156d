"""eval, logits, inspect, generate, chat, convert, doctor and bench, on the packaged model and the fixture."""

import argparse
import io
import json
import re
import subprocess
import sys
import types
from importlib import metadata
from pathlib import Path

import pytest
import torch

import exl2nb
from exl2nb.cli import doctor
from exl2nb.cli.bench import chat_prompts, markdown, measure
from exl2nb.cli.eval import read_source
from exl2nb.cli.models import demo_directory
from exl2nb.cli.sampling import add_options, given_options
from exl2nb.converter import calibration
from exl2nb.core import env
from exl2nb.core.errors import OptionError
from exl2nb.io.safetensors import SafetensorsFile, save
from exl2nb.ops import _load, kernel_code, prefill_attention
from exl2nb.ops.kernel_code import NoCompiler
from exl2nb.sampling.defaults import NEUTRAL_VALUES
from exl2nb.sampling.params import SamplingParams

DATA = Path(__file__).parents[1] / "data"
EXL2 = str(DATA / "demo-exl2-4.0bpw")
TEXT = str(demo_directory() / "evaluation.txt")


def test_eval_against(cli_json):
    data = cli_json("eval", EXL2, "--against", "demo", "--text", TEXT, "--rows", "2", "--length", "128")
    assert set(data) >= {"ppl", "kl_mean", "kl_p99", "top1", "bpw", "bytes"}
    assert 0.05 < data["kl_mean"] < 0.3
    assert data["ppl"] > data["reference_ppl"]
    assert 3.9 < data["bpw"] < 4.1
    assert data["bytes"] == sum(path.stat().st_size for path in Path(EXL2).glob("*.safetensors"))


def test_cache_option(refused, cli_json):
    """A model against itself shows what its cache costs; more bits cost less."""
    words = ("eval", EXL2, "--against", EXL2, "--text", TEXT, "--rows", "2", "--length", "128")
    found = {mode: cli_json(*words, "--cache", mode) for mode in ("fp32", "q8", "k8v4", "q4")}
    assert [data["cache"] for data in found.values()] == ["fp32", "q8", "q6", "q4"]
    losses = [data["kl_mean"] for data in found.values()]
    assert losses == sorted(losses)
    assert losses[0] == 0
    plain, q4 = (cli_json("generate", "demo", "--prompt", "It was a", "--cache", mode)["text"] for mode in ("fp32", "q4"))
    assert plain
    assert q4
    for command in (
        ["generate", "demo"],
        ["chat", "demo"],
        ["eval", "demo", "--text", TEXT],
        ["logits", "demo", "--ids", "x", "--out", "y"],
    ):
        assert "unknown cache mode 'q5'; known: fp32" in refused(*command, "--cache", "q5")


def test_eval_alone_agrees_and_leaves_kl_open(cli_json):
    alone = cli_json("eval", EXL2, "--text", TEXT, "--rows", "2", "--length", "64")
    both = cli_json("eval", EXL2, "--against", EXL2, "--text", TEXT, "--rows", "2", "--length", "64")
    assert alone["kl_mean"] is None
    assert both["kl_mean"] == 0
    assert alone["ppl"] == pytest.approx(both["ppl"], rel=1e-9)


def test_eval_text_form(cli):
    code, out, err = cli("eval", EXL2, "--text", TEXT, "--rows", "1", "--length", "32")
    assert code == 0
    assert "perplexity" in out and "bits per weight" in out
    assert "perplexity: 32/32 tokens" in err


def test_eval_reads_parquet_and_public_sets_by_name(cli_json, refused, tmp_path, monkeypatch):
    import pyarrow as pa
    from pyarrow import parquet

    lines = Path(TEXT).read_text()[:4000].split("\n")
    parquet.write_table(pa.table({"text": lines}), tmp_path / "test.parquet")
    words = ("eval", "demo", "--rows", "1", "--length", "64")
    plain = cli_json(*words, "--text", TEXT)
    assert cli_json(*words, "--text", tmp_path / "test.parquet")["ppl"] == pytest.approx(plain["ppl"], rel=1e-9)
    asked = []
    monkeypatch.setattr(calibration, "read_hub", lambda name, render: asked.append(name) or "\n".join(lines))
    assert cli_json(*words, "--text", "wikitext2")["ppl"] == pytest.approx(plain["ppl"], rel=1e-9)
    assert asked == ["Salesforce/wikitext:wikitext-2-raw-v1/test-*.parquet"]
    message = refused(*words, "--text", "wikitxt2")
    assert "text wikitxt2: no such file" in message and "or one of wikitext2, wikitext103, c4" in message


def test_eval_reads_json_lines_called_json(tmp_path):
    (tmp_path / "c4.json").write_text('{"text": "one"}\n{"text": "two"}\n')
    (tmp_path / "list.json").write_text('[{"text": "one"},\n{"text": "two"}]')
    assert read_source(str(tmp_path / "c4.json")) == read_source(str(tmp_path / "list.json")) == "one\ntwo"


def test_load_options(cli_json, refused):
    words = ("generate", "demo", "--prompt", "It was", "--max-tokens", "8", "--temperature", "0")
    plain = cli_json(*words)
    assert cli_json(*words, "--device", "cpu", "--draft", EXL2)["ids"] == plain["ids"]
    assert cli_json(*words, "--rope-scale", "8")["ids"] != plain["ids"]
    assert cli_json(*words, "--rope-theta", "1e4", "--rope-alpha", "1")["ids"] == plain["ids"]
    scaled = ("eval", "demo", "--text", TEXT, "--rows", "1", "--length", "64")
    by_scale, by_scaling = (
        cli_json(*scaled, *more) for more in (["--rope-scale", "2"], ["--rope-scaling", '{"rope_type": "linear", "factor": 2}'])
    )
    assert by_scale["ppl"] == pytest.approx(by_scaling["ppl"], rel=1e-9)
    assert "expected auto, cpu, cuda or cuda:N" in refused(*words, "--device", "gpu")
    assert "expected a JSON object" in refused(*words, "--rope-scaling", "yarn")
    assert "revision is 'x' for the local directory" in refused(*words, "--revision", "x")
    assert "no such directory" in refused(*words, "--draft", "nowhere")


def test_generate_puts_the_prompt_into_a_template(cli_json, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ bos_token }}<{{ messages[0].role }}>{{ messages[0].content }}")
    found = cli_json("generate", "demo", "--prompt", "It was", "--template", tmp_path / "t.jinja", "--max-tokens", "2")
    assert found["prompt"] == "<s><user>It was"


def test_python_m_exl2nb():
    done = subprocess.run([sys.executable, "-m", "exl2nb", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"exl2nb {exl2nb.__version__}\n")


def test_logits_agree_with_the_recorded_ones(cli_json, tmp_path):
    with SafetensorsFile(DATA / "demo-logits.safetensors") as recorded:
        ids, fp16, quantised = (recorded.read(name) for name in ("input_ids", "logits_fp16", "logits_exl2_4.0bpw"))
    save(tmp_path / "ids.safetensors", {"input_ids": ids})
    for model, expected in (("demo", fp16), (EXL2, quantised)):
        data = cli_json("logits", model, "--ids", tmp_path / "ids.safetensors", "--out", tmp_path / "out.safetensors")
        with SafetensorsFile(tmp_path / "out.safetensors") as file:
            logits = file.read("logits")
        assert data["shape"] == list(logits.shape) == list(expected.shape)
        assert logits.dtype == torch.float32
        assert (logits - expected.float()).abs().max() < 0.15


def test_logits_wants_input_ids(refused, tmp_path):
    save(tmp_path / "ids.safetensors", {"tokens": torch.zeros(1, 2, dtype=torch.int32)})
    err = refused("logits", "demo", "--ids", tmp_path / "ids.safetensors", "--out", tmp_path / "o.safetensors")
    assert "found tokens; expected a tensor `input_ids`" in err
    assert not (tmp_path / "o.safetensors").exists()


def test_inspect(cli, cli_json):
    data = cli_json("inspect", EXL2)
    assert data["layers"] == 12
    assert 3.9 < data["decoder_bpw"] < 4.1
    code, out, _ = cli("inspect", EXL2)
    assert code == 0 and "q_proj" in out


def test_generate(cli_json):
    first, second = (cli_json("generate", "demo", "--prompt", "It was", "--max-tokens", "12", "--seed", "3") for _ in range(2))
    assert first["text"] == second["text"]
    assert first["new_tokens"] == len(first["ids"]) == 12
    assert first["finish_reason"] == "length"


def test_generate_streams_text(cli, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("It was"))
    code, out, err = cli("generate", "demo", "--max-tokens", "8", "--temperature", "0")
    assert code == 0
    assert out.startswith("It was") and len(out) > 10
    assert "tok/s" in err


def test_chat_needs_a_template_and_takes_one(refused, cli, tmp_path):
    assert "template" in refused("chat", EXL2, "--message", "Hello")
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:")
    words = ["chat", "demo", "--template", tmp_path / "t.jinja", "--max-tokens", "6", "--message", "Hello", "--message", "And now?"]
    code, out, _ = cli(*words, "--json", "--quiet")
    assert code == 0
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["message"] for line in lines] == ["Hello", "And now?"]
    assert lines[1]["prompt_tokens"] > lines[0]["prompt_tokens"] + lines[0]["new_tokens"], "the whole conversation is sent"


def test_convert_refuses_before_it_works(refused, tmp_path):
    assert "bpw is 9.0; expected a number from 2 to 8" in refused("convert", "demo", tmp_path / "out", "--bpw", "9")
    assert not (tmp_path / "out").exists()


def test_doctor(cli):
    code, out, _ = cli("doctor", "--json")
    data = json.loads(out)
    assert code == (0 if data["ok"] else 1)
    names = [check["name"] for check in data["checks"]]
    parts = ["torch", "engine", "cuda", "kernels", "flash-attn", "cpu", "memory", "environment", "jupyter"]
    assert names == ["exl2nb", "python", "packages", *parts, "demo model"]
    assert next(check for check in data["checks"] if check["name"] == "demo model")["state"] == "ok"


def test_the_device_variable_takes_a_number(monkeypatch):
    monkeypatch.setenv("EXL2NB_DEVICE", "cuda:12")
    assert env.get("EXL2NB_DEVICE", "auto") == "cuda:12"


def test_doctor_says_what_to_do(monkeypatch):
    monkeypatch.setenv("EXL2NB_DEVICE", "toaster")
    monkeypatch.setitem(doctor.DEMO_SHA256, "tokenizer.json", "0" * 64)
    found = {check.name: check for check in doctor.diagnose()}
    assert found["environment"].state == "problem"
    assert found["environment"].todo == "unset EXL2NB_DEVICE"
    assert found["demo model"].state == "problem"
    assert "reinstall" in found["demo model"].todo


def test_doctor_says_which_attention_prompts_use(monkeypatch):
    for found, state, words in (
        (prefill_attention.FlashAttention(None, why="not installed"), "note", "not installed; prompts on a GPU use torch's attention"),
        (prefill_attention.FlashAttention(print), "ok", "prompts on the GPU use it"),
    ):
        monkeypatch.setattr(prefill_attention, "flash_attention", lambda found=found: found)
        (check,) = doctor.diagnose("flash_attention")
        assert check.state == state
        assert words in check.found


def test_doctor_says_what_the_kernels_lack(monkeypatch, tmp_path):
    """No compiler is a problem where there is a GPU; a cache that cannot be written is a warning with the reason."""
    monkeypatch.setattr(_load, "has_nvidia_gpu", lambda: True)

    def no_compiler():
        raise NoCompiler("NVRTC was not found (tried)")

    monkeypatch.setattr(kernel_code, "nvrtc", no_compiler)
    (check,) = doctor.diagnose("kernels")
    assert (check.state, check.todo) == ("problem", "pip install nvidia-cuda-nvrtc nvidia-cuda-runtime")
    assert "NVRTC was not found" in check.found

    monkeypatch.setattr(kernel_code, "nvrtc", lambda: types.SimpleNamespace(version=(13, 0), include="headers"))
    monkeypatch.setenv("EXL2NB_KERNEL_CACHE", str(tmp_path / "cache"))
    (check,) = doctor.diagnose("kernels")
    assert (check.state, check.todo) == ("ok", "")
    assert not (tmp_path / "cache").exists()

    (tmp_path / "cache").write_text("a file in its place")
    (check,) = doctor.diagnose("kernels")
    assert check.state == "warning"
    assert "Not a directory" in check.found
    assert "EXL2NB_KERNEL_CACHE" in check.todo


def test_doctor_says_that_the_disk_is_full(monkeypatch, tmp_path):
    resource = pytest.importorskip("resource")
    monkeypatch.setenv("EXL2NB_KERNEL_CACHE", str(tmp_path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        assert doctor.why_not_writable(tmp_path) == "File too large"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert doctor.why_not_writable(tmp_path) == ""
    assert list(tmp_path.iterdir()) == []


def test_doctor_survives_a_broken_check(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: 1 / 0)
    found = [check for check in doctor.diagnose() if check.state == "problem"]
    assert "ZeroDivisionError" in found[0].found


def test_doctor_versions():
    assert doctor.is_at_least("2.10.0+cu130", "2.10")
    assert doctor.is_at_least("7.7.1", "7.6")
    assert not doctor.is_at_least("2.9.1", "2.10")
    assert not doctor.is_at_least("0.9.2", "0.9.13")


def test_bench_measures_what_reaches_python(refused, cli_json):
    found = cli_json("bench", "demo", "--device", "cpu", "--batch", "2", "--context", "16", "--tokens", "8", "--rounds", "3")
    assert found["batch"] == 2 and found["device"] == "cpu"
    assert found["decode_tok_s"] > 0 and found["prefill_tok_s"] > 0
    assert abs(found["decode_ms"] - 2e3 / found["decode_tok_s"]) < 0.01
    assert 16 + 1 + 8 / 2 <= found["decode_context"] < 16 + 8 + 64 + 8  # a text's prompt, its first token, half of what is timed
    assert refused("bench", "demo", "--batch", "0")


@pytest.mark.parametrize("template", ["model", "chatml"])
def test_bench_times_prompts_in_a_chat_template(template, cli_json, refused):
    few = ("--device", "cpu", "--tokens", "4", "--rounds", "1", "--template", template)
    found = cli_json("bench", "demo", "--context", "64", *few)
    assert found["template"] == template and found["prefill_tok_s"] > 0
    assert "the tokens that the template takes" in refused("bench", "demo", "--context", "4", *few)
    assert "no such file" in refused("bench", "demo", "--template", "none.jinja").lower()
    with exl2nb.demo(progress=None) as llm:
        prompt = chat_prompts(llm, None if template == "model" else template, 64)
        begin, end = llm.render_chat("MESSAGE", template=None if template == "model" else template).split("MESSAGE")
        for number in (1, 7):
            text = llm.tokenizer.decode(prompt(number), skip_special=False)
            assert len(prompt(number)) == 64 and text.startswith(begin.strip()) and text.endswith(end), text
        assert prompt(1) != prompt(7)


def test_serve_takes_the_options_of_loading(refused):
    for words, message in [
        (("--device", "gpu"), "device is 'gpu'; expected auto, cpu, cuda or cuda:N"),
        (("--rope-scale", "-1"), "rope_scale"),
        (("--rope-scaling", "x"), "expected a JSON object"),
        (("--devices", "0,1"), "a device is '0'; expected cpu, cuda or cuda:<number>"),
    ]:
        assert message in refused("serve", "demo", *words)


SHORT = ("--report", "--context", "16", "--tokens", "4", "--rounds", "1")


@pytest.mark.cpu
def test_the_report_is_markdown_to_paste(cli_json, refused):
    found = cli_json("bench", "demo", "--device", "cpu", *SHORT)
    assert [row["batch"] for row in found["speed"]] == [1, 8] and all(row["decode_tok_s"] > 0 for row in found["speed"])
    assert 0 < found["kl"]["q8"] < found["kl"]["q6"] < found["kl"]["q4"] < 0.1
    assert found["memory"]["longest"]["q4"] == 1024
    text = markdown(found)
    facts = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", text, re.M))
    assert text.startswith("### exl2nb ") and {"processor", "system", "load", "longest context", "KL of a cache"} <= facts.keys()
    assert "card" not in facts and "memory" not in facts and "KL against the CPU" not in facts, "there is no GPU to speak of"
    assert "16.00 bits per weight" in facts["model"]
    assert "leave --batch out" in refused("bench", "demo", *SHORT, "--batch", "4")


@pytest.mark.gpu
def test_the_report_of_a_card(cli_json):
    found = cli_json("bench", "demo", "--device", "cuda", *SHORT)
    assert found["machine"]["card"] and "NVRTC" in found["machine"]["CUDA"]
    assert found["kl"]["cpu"] < 1e-3
    assert {"card", "CUDA", "memory", "KL against the CPU"} <= dict(re.findall(r"^\| ([^|]+) \| (.+) \|$", markdown(found), re.M)).keys()
    assert found["memory"]["most_used"] > 0 and found["memory"]["planned"] > 0


def test_bench_refuses_answers_too_short_to_time():
    """Every answer ends before all have begun: no figure is made up."""

    class Text:
        """A text of one token."""

        cancel = result = bool

        def __init__(self):
            self.chunks = [types.SimpleNamespace(tokens=[1])]

        def poll(self):
            return self.chunks.pop() if self.chunks else None

        def __next__(self):
            if (chunk := self.poll()) is None:
                raise StopIteration
            return chunk

    llm = types.SimpleNamespace(
        config=types.SimpleNamespace(vocab_size=100, moe=None), cache=types.SimpleNamespace(reuse=True), generate=lambda *_, **__: None,
        stream=lambda *_, **__: Text(),
    )  # fmt: skip
    with pytest.raises(OptionError, match="give more --tokens"):
        measure(llm, batch=2, context=4, tokens=3, rounds=2)


# ---- sampling options and structured output


def parse(*words):
    parser = argparse.ArgumentParser()
    add_options(parser)
    return given_options(parser.parse_args(words))


def test_no_options_give_no_settings():
    assert parse() == {}


def test_names_and_values():
    given = parse(
        "--typical-p",
        "0.9",
        "--dry-multiplier",
        "0.8",
        "--dry-range",
        "64",
        "--temperature-last",
        "--ban",
        "5",
        "--ban",
        "7",
        "--mirostat-tau",
        "4",
    )
    wanted = {
        "typical_p": 0.9,
        "dry_multiplier": 0.8,
        "dry_range": 64,
        "temperature_last": True,
        "banned_tokens": [5, 7],
        "mirostat_tau": 4.0,
    }
    assert given == {**wanted, "mirostat": True}
    assert parse("--dry-range", "64", "--dry-max-ngram", "9") == {"dry_range": 64, "dry_max_ngram": 9}
    SamplingParams(**given)


def test_presets_and_overrides():
    assert parse("--preset", "balanced", "--top-p", "0.5") == {**NEUTRAL_VALUES, "temperature": 0.8, "top_p": 0.5}


def test_files_are_read(tmp_path):
    (tmp_path / "s.json").write_text('{"type": "integer"}')
    assert parse("--schema", str(tmp_path / "s.json")) == {"schema": '{"type": "integer"}'}


def test_generate_with_a_schema(cli_json, tmp_path):
    (tmp_path / "s.json").write_text(json.dumps({"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}))
    found = cli_json("generate", "demo", "--prompt", "x", "--schema", tmp_path / "s.json", "--seed", "1")
    assert len(json.loads(found["text"])) == 2
    assert found["finish_reason"] in ("stop", "eos")


def test_generate_with_a_choice(cli_json):
    found = cli_json("generate", "demo", "--prompt", "x", "--choice", "left", "--choice", "right")
    assert found["text"] in ("left", "right")


@pytest.mark.parametrize("words", [["--schema", "/no/such/file"], ["--regex", "("], ["--regex", "a", "--choice", "b"], ["--tfs", "0"]])
def test_bad_sampling_options(refused, words):
    assert refused("generate", "demo", "--prompt", "x", *words)


def test_doctor_lists_links_between_gpus(monkeypatch):
    from exl2nb.cli import doctor

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for count, linked, expected in [
        (1, {}, []),
        (2, {(0, 1)}, ["all 2 GPUs reach each other's memory"]),
        (3, {(0, 1)}, ["without a direct link: GPUs 0 and 2, 1 and 2; what layers hand on goes through host memory"]),
    ]:
        monkeypatch.setattr("torch.cuda.device_count", lambda count=count: count)
        monkeypatch.setattr("torch.cuda.can_device_access_peer", lambda a, b, linked=linked: (a, b) in linked)
        assert [check.found for check in doctor.diagnose("links")] == expected
