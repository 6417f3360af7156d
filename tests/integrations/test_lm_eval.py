"""The evaluation harness on the demo model: its numbers are those it finds with Transformers on the same weights."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the harness is imported

from lm_eval.api.instance import Instance
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

import exl2nb as ex
from exl2nb.cli import main
from exl2nb.core.errors import OptionError
from exl2nb.integrations.lm_eval import Exl2LM

pytestmark = pytest.mark.cpu
ROOT = Path(__file__).parents[2]
TASKS = ROOT / "tests" / "data" / "lm_eval"
NAMES = ["tiny_choice", "tiny_rolling", "tiny_generate"]
DEMO = Path(ex.__file__).parent / "demo_model"


@pytest.fixture(scope="module")
def theirs():
    return HFLM(
        pretrained=AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32),
        tokenizer=AutoTokenizer.from_pretrained(DEMO),
        batch_size=4,
    )


@pytest.fixture(autouse=True)
def _place(monkeypatch, tmp_path_factory):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.getbasetemp() / "datasets"))
    monkeypatch.chdir(ROOT)  # the tasks name their file from here


def request(kind, *arguments):
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0, metadata=("x", 0, 1))


def test_the_numbers_are_those_of_transformers(llm, theirs):
    random.seed(5)
    before = torch.random.get_rng_state(), random.getstate()
    found = ex.evaluate(llm, NAMES, include=TASKS)
    assert torch.equal(torch.random.get_rng_state(), before[0]) and random.getstate() == before[1]
    want = simple_evaluate(
        theirs, tasks=NAMES, task_manager=TaskManager(include_path=str(TASKS), include_defaults=False), bootstrap_iters=0
    )["results"]
    assert found.scores["tiny_choice"] == {"acc": want["tiny_choice"]["acc,none"], "acc_norm": want["tiny_choice"]["acc_norm,none"]}
    assert found.scores["tiny_choice"]["acc"] == 0.75
    assert found.scores["tiny_generate"]["exact_match"] == want["tiny_generate"]["exact_match,none"] == 0.5
    for metric in ("word_perplexity", "bits_per_byte"):
        assert found.scores["tiny_rolling"][metric] == pytest.approx(want["tiny_rolling"][f"{metric},none"], rel=1e-4)
    assert found.model == "demo_model"
    assert found.errors["tiny_choice"]["acc"] > 0
    assert "tiny_choice" in repr(found) and "±" in repr(found)
    assert list(found.to_frame().columns) == ["task", "metric", "value", "stderr"]
    assert json.loads(json.dumps(found.to_dict()))["scores"] == found.scores


def test_every_request_is_answered_as_by_transformers(llm, theirs):
    ours = Exl2LM(llm=llm)
    long = " ".join((DEMO / "evaluation.txt").read_text().split())[:4600]
    pairs = [
        ("It was a dark and stormy", " night"),
        ("It was a dark and stormy", " day indeed"),
        ("", "She said"),
        ("The old man ", "went"),
        (long, " and then"),
    ]
    requests = [request("loglikelihood", *pair) for pair in pairs]
    for mine, want in zip(ours.loglikelihood(requests), theirs.loglikelihood(requests)):
        assert mine[0] == pytest.approx(want[0], abs=2e-3)
        assert mine[1] == want[1]
    rolling = [request("loglikelihood_rolling", text) for text in (long, "It was")]
    assert ours.loglikelihood_rolling(rolling) == pytest.approx(theirs.loglikelihood_rolling(rolling), rel=1e-4)
    generate = [request("generate_until", text, {"until": ["\n\n", "."], "max_gen_toks": 16}) for text in ("It was", "She", long)]
    assert ours.generate_until(generate) == theirs.generate_until(generate)
    assert ours.eot_token_id == 2 and ours.prefix_token_id == 1


def test_chat_templates(llm):
    ours = Exl2LM(llm=llm)
    talk = [{"role": "user", "content": "Hello"}]
    assert ours.apply_chat_template(talk) == llm.render_chat(talk)
    assert ours.chat_template(True) == llm.tokenizer.templates.pick()
    assert ours.chat_template(False) is None


def test_options_are_checked(llm):
    with pytest.raises(OptionError, match="'cache' is an option of loading"):
        ex.evaluate(llm, "tiny_choice", include=TASKS, cache="q4")
    with pytest.raises(OptionError, match="give pretrained="):
        Exl2LM()
    with pytest.raises(OptionError, match="the task asks for 'num_beams'"):
        Exl2LM(llm=llm).generate_until([request("generate_until", "It was", {"until": ["."], "num_beams": 4})])
    with pytest.raises(OptionError, match="the task asks for 5000 new tokens"):
        Exl2LM(llm=llm).generate_until([request("generate_until", "It was", {"max_gen_toks": 5000})])
    with pytest.raises(OptionError, match="unknown keyword 'cach'"):
        Exl2LM("demo", cach="q4")


def test_the_command_line(capsys):
    words = ["eval", "demo", "--tasks", "tiny_choice", "--include", str(TASKS), "--limit", "4"]
    assert main([*words, "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["scores"]["tiny_choice"]["acc"] >= 0.5
    assert main(["eval", "demo"]) == 2
    assert "give --text, for perplexity, or --tasks" in capsys.readouterr().err
    assert main([*words, "--against", "demo"]) == 2


@pytest.mark.slow
def test_an_unknown_task_has_a_name(llm):
    """Looks through the thousands of tasks of the harness."""
    with pytest.raises(OptionError, match="no task 'no_such_task'"):
        ex.evaluate(llm, "no_such_task")


@pytest.mark.slow
def test_the_harness_has_the_model_on_its_own_command_line(tmp_path):
    words = [
        "run",
        "--model",
        "exl2nb",
        "--model_args",
        "pretrained=demo",
        "--tasks",
        "tiny_choice",
        "--include_path",
        str(TASKS),
        "--limit",
        "4",
        "--device",
        "cpu",
    ]
    environment = {**os.environ, "HF_DATASETS_CACHE": str(tmp_path / "datasets"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "exl2nb.integrations.lm_eval", *words], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "tiny_choice" in done.stdout
