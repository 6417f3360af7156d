"""eval, logits, inspect, generate, chat, convert and doctor, through `main`, on the packaged model and the fixture."""

import io
import json
import sys
from pathlib import Path

import pytest
import torch

from exl2nb.cli import doctor, main
from exl2nb.cli.models import demo_directory
from exl2nb.io.safetensors import SafetensorsFile, save
from exl2nb.ops import prefill_attention

DATA = Path(__file__).parents[1] / "data"
EXL2 = str(DATA / "demo-exl2-4.0bpw")
TEXT = str(demo_directory() / "evaluation.txt")


def run(capsys, *words):
    code = main([*words, "--json", "--quiet"])
    captured = capsys.readouterr()
    assert captured.err == ""
    assert code == 0
    return json.loads(captured.out)


def test_eval_against(capsys):
    data = run(capsys, "eval", EXL2, "--against", "demo", "--text", TEXT, "--rows", "2", "--length", "128")
    assert set(data) >= {"ppl", "kl_mean", "kl_p99", "top1", "bpw", "bytes"}
    assert 0.05 < data["kl_mean"] < 0.3
    assert data["ppl"] > data["reference_ppl"]
    assert 3.9 < data["bpw"] < 4.1
    assert data["bytes"] == sum(path.stat().st_size for path in Path(EXL2).glob("*.safetensors"))


def test_cache_option(capsys):
    """A model against itself shows what its cache costs; more bits cost less."""
    words = ("eval", EXL2, "--against", EXL2, "--text", TEXT, "--rows", "2", "--length", "128")
    found = {mode: run(capsys, *words, "--cache", mode) for mode in ("fp32", "q8", "k8v4", "q4")}
    assert [data["cache"] for data in found.values()] == ["fp32", "q8", "q6", "q4"]
    losses = [data["kl_mean"] for data in found.values()]
    assert losses == sorted(losses)
    assert losses[0] == 0
    plain, q4 = (run(capsys, "generate", "demo", "--prompt", "It was a", "--cache", mode)["text"] for mode in ("fp32", "q4"))
    assert plain
    assert q4
    for command in (
        ["generate", "demo"],
        ["chat", "demo"],
        ["eval", "demo", "--text", TEXT],
        ["logits", "demo", "--ids", "x", "--out", "y"],
    ):
        assert main([*command, "--cache", "q5"]) == 2
        assert "unknown cache mode 'q5'; known: fp32" in capsys.readouterr().err


def test_eval_alone_agrees_and_leaves_kl_open(capsys):
    alone = run(capsys, "eval", EXL2, "--text", TEXT, "--rows", "2", "--length", "64")
    both = run(capsys, "eval", EXL2, "--against", EXL2, "--text", TEXT, "--rows", "2", "--length", "64")
    assert alone["kl_mean"] is None
    assert both["kl_mean"] == 0
    assert alone["ppl"] == pytest.approx(both["ppl"], rel=1e-9)


def test_eval_text_form(capsys):
    assert main(["eval", EXL2, "--text", TEXT, "--rows", "1", "--length", "32"]) == 0
    captured = capsys.readouterr()
    assert "perplexity" in captured.out
    assert "bits per weight" in captured.out
    assert "perplexity: 32/32 tokens" in captured.err


def test_logits_agree_with_the_recorded_ones(capsys, tmp_path):
    with SafetensorsFile(DATA / "demo-logits.safetensors") as recorded:
        ids, fp16, quantised = (recorded.read(name) for name in ("input_ids", "logits_fp16", "logits_exl2_4.0bpw"))
    save(tmp_path / "ids.safetensors", {"input_ids": ids})
    for model, expected in (("demo", fp16), (EXL2, quantised)):
        data = run(capsys, "logits", model, "--ids", str(tmp_path / "ids.safetensors"), "--out", str(tmp_path / "out.safetensors"))
        with SafetensorsFile(tmp_path / "out.safetensors") as file:
            logits = file.read("logits")
        assert data["shape"] == list(logits.shape) == list(expected.shape)
        assert logits.dtype == torch.float32
        assert (logits - expected.float()).abs().max() < 0.15


def test_logits_wants_input_ids(capsys, tmp_path):
    save(tmp_path / "ids.safetensors", {"tokens": torch.zeros(1, 2, dtype=torch.int32)})
    assert main(["logits", "demo", "--ids", str(tmp_path / "ids.safetensors"), "--out", str(tmp_path / "o.safetensors")]) == 2
    assert "found tokens; expected a tensor `input_ids`" in capsys.readouterr().err
    assert not (tmp_path / "o.safetensors").exists()


def test_inspect(capsys):
    data = run(capsys, "inspect", EXL2)
    assert data["layers"] == 12
    assert 3.9 < data["decoder_bpw"] < 4.1
    assert main(["inspect", EXL2]) == 0
    assert "q_proj" in capsys.readouterr().out


def test_generate(capsys):
    first, second = (run(capsys, "generate", "demo", "--prompt", "It was", "--max-tokens", "12", "--seed", "3") for _ in range(2))
    assert first["text"] == second["text"]
    assert first["new_tokens"] == len(first["ids"]) == 12
    assert first["finish_reason"] == "length"


def test_generate_streams_text(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("It was"))
    assert main(["generate", "demo", "--max-tokens", "8", "--temperature", "0"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("It was")
    assert len(captured.out) > 10
    assert "tok/s" in captured.err


def test_chat_needs_a_template_and_takes_one(capsys, tmp_path):
    assert main(["chat", "demo", "--message", "Hello"]) == 2
    assert "template" in capsys.readouterr().err
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:")
    words = ["chat", "demo", "--template", str(tmp_path / "t.jinja"), "--max-tokens", "6", "--message", "Hello", "--message", "And now?"]
    assert main([*words, "--json", "--quiet"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["message"] for line in lines] == ["Hello", "And now?"]
    assert lines[1]["prompt_tokens"] > lines[0]["prompt_tokens"] + lines[0]["new_tokens"], "the whole conversation is sent"


def test_convert_refuses_before_it_works(capsys, tmp_path):
    assert main(["convert", "demo", str(tmp_path / "out"), "--bpw", "9"]) == 2
    assert "bpw is 9.0; expected a number from 2 to 8" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_doctor(capsys):
    code = main(["doctor", "--json"])
    data = json.loads(capsys.readouterr().out)
    assert code == (0 if data["ok"] else 1)
    names = [check["name"] for check in data["checks"]]
    parts = ["torch", "engine", "cuda", "flash-attn", "cpu", "memory", "environment", "jupyter"]
    assert names == ["exl2nb", "python", "packages", *parts, "demo model"]
    assert next(check for check in data["checks"] if check["name"] == "demo model")["state"] == "ok"


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
        (check,) = doctor._flash_attention()
        assert check.state == state
        assert words in check.found


def test_doctor_survives_a_broken_check(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: 1 / 0)
    found = [check for check in doctor.diagnose() if check.state == "problem"]
    assert "ZeroDivisionError" in found[0].found


def test_doctor_versions():
    assert doctor._at_least("2.10.0+cu130", "2.10")
    assert doctor._at_least("7.7.1", "7.6")
    assert not doctor._at_least("2.9.1", "2.10")
    assert not doctor._at_least("0.9.2", "0.9.13")


def test_bench_measures_what_reaches_python(capsys):
    import json

    from exl2nb.cli import main

    code = main(
        ["bench", "demo", "--device", "cpu", "--batch", "2", "--context", "16", "--tokens", "8", "--rounds", "3", "--json", "--quiet"]
    )
    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert found["batch"] == 2 and found["device"] == "cpu"
    assert found["decode_tok_s"] > 0 and found["prefill_tok_s"] > 0
    assert abs(found["decode_ms"] - 2e3 / found["decode_tok_s"]) < 0.01
    assert 16 + 1 + 8 / 2 <= found["decode_context"] < 16 + 8 + 64 + 8  # a text's prompt, its first token, half of what is timed
    assert main(["bench", "demo", "--batch", "0"]) != 0


def test_bench_has_nothing_to_time_where_texts_end_first():
    """Every text is over before all have begun: no figure is made up."""
    import types

    from exl2nb.cli.bench import measure
    from exl2nb.core.errors import OptionError

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
