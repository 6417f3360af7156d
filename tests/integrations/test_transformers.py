"""Transformers' own generate() over our model, held against Transformers' Llama with the same weights, feature by feature."""

from pathlib import Path

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteriaList,
    TextStreamer,
    TopKLogitsWarper,
    TopPLogitsWarper,
    pipeline,
)

import exl2nb as ex
from exl2nb.core.errors import ContextOverflow, OptionError
from exl2nb.integrations import transformers as transformers_door
from exl2nb.integrations.transformers import CACHE, Exl2ForCausalLM

pytestmark = pytest.mark.cpu
DEMO = Path(ex.__file__).parent / "demo_model"
EXL2 = Path(__file__).parents[1] / "data" / "demo-exl2-4.0bpw"
PROMPTS = ["It was a dark and stormy night", "The old man", "“My dear,” said she, in a voice that"]


@pytest.fixture(scope="module")
def theirs():
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)


@pytest.fixture(scope="module")
def ours():
    model = Exl2ForCausalLM.from_pretrained(DEMO, cache="fp32", device_map="cpu", dtype="auto")
    yield model
    model.close()


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(DEMO, padding_side="left")
    tokenizer.pad_token = "<unk>"
    return tokenizer


@pytest.fixture(scope="module")
def same_random(ours):
    """With the random numbers of Transformers."""
    return Exl2ForCausalLM(ours.llm, torch_random=True)


@pytest.fixture
def one(tokenizer):
    return tokenizer(PROMPTS[0], return_tensors="pt")


@pytest.fixture
def batch(tokenizer):
    return tokenizer(PROMPTS, return_tensors="pt", padding=True)


def test_forward_is_that_of_transformers(ours, theirs, batch):
    mine = ours(**batch, output_hidden_states=True)
    want = theirs(**batch, output_hidden_states=True)
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(mine.logits[real], want.logits[real], atol=2e-3, rtol=0)
    assert (mine.logits[~real] == 0).all()
    assert len(mine.hidden_states) == len(want.hidden_states) == 13
    for a, b in zip(mine.hidden_states, want.hidden_states):
        torch.testing.assert_close(a[real], b[real], atol=5e-3, rtol=1e-3)
    last = ours(**batch, logits_to_keep=1).logits
    torch.testing.assert_close(last[:, 0], mine.logits[:, -1], atol=1e-4, rtol=0)
    torch.testing.assert_close(ours(**batch, logits_to_keep=torch.tensor([3, 5])).logits, mine.logits[:, [3, 5]], atol=1e-4, rtol=0)


def test_right_padding_and_steps_with_a_cache(ours, theirs, tokenizer):
    right = tokenizer(PROMPTS, return_tensors="pt", padding=True, padding_side="right")
    real = right["attention_mask"].bool()
    torch.testing.assert_close(ours(**right).logits[real], theirs(**right).logits[real], atol=2e-3, rtol=0)
    labels = right["input_ids"].masked_fill(~real, -100)
    torch.testing.assert_close(ours(**right, labels=labels).loss, theirs(**right, labels=labels).loss, atol=1e-3, rtol=0)
    ids = tokenizer(PROMPTS[0], return_tensors="pt")["input_ids"]
    first = ours(ids[:, :4])
    second = ours(ids[:, 4:], **{CACHE: first[CACHE]})
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), ours(ids).logits, atol=1e-4, rtol=0)
    assert second[CACHE].get_seq_length() == ids.shape[1]
    second[CACHE].crop(-2)
    again = ours(ids[:, -2:], **{CACHE: second[CACHE]})
    torch.testing.assert_close(again.logits, second.logits[:, -2:], atol=1e-4, rtol=0)


def both(ours, theirs, inputs, **options):
    made = []
    for model in (ours, theirs):
        torch.manual_seed(7)
        made.append(model.generate(**inputs, pad_token_id=0, **options))
    assert torch.equal(*made), (made[0].tolist(), made[1].tolist())
    return made[0]


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.9},
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 4, "num_return_sequences": 2},
        {"num_beams": 3, "do_sample": True},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 12},
        {"use_cache": False},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=lambda options: "-".join(options),
)
def test_generate_gives_the_tokens_of_transformers(same_random, theirs, one, options):
    both(same_random, theirs, one, max_new_tokens=16, **options)


@pytest.mark.parametrize("options", [{"do_sample": False}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_batches_with_left_padding(ours, theirs, batch, options):
    both(ours, theirs, batch, max_new_tokens=16, **options)


def test_whole_requests_run_in_the_engine(ours, same_random, theirs, one, batch, tokenizer, monkeypatch, capsys):
    """The same tokens with no step of Transformers', where the engine can do it; with one step a token where it cannot."""
    steps = []
    forward = Exl2ForCausalLM.forward
    monkeypatch.setattr(Exl2ForCausalLM, "forward", lambda self, *args, **kwargs: steps.append(1) or forward(self, *args, **kwargs))
    both(ours, theirs, one, max_new_tokens=12, do_sample=False)
    both(ours, theirs, batch, max_new_tokens=12, do_sample=False)
    both(same_random, theirs, one, max_new_tokens=12, do_sample=True, temperature=0.9, top_k=30, min_p=0.02, repetition_penalty=1.2)
    both(ours, theirs, one, max_new_tokens=12, do_sample=False, repetition_penalty=1.3, suppress_tokens=[13, 5])
    free = both(ours, theirs, one, max_new_tokens=12, do_sample=False)[0].tolist()
    end = free[one["input_ids"].shape[1] + 4]
    ended = both(ours, theirs, batch, max_new_tokens=12, do_sample=False, eos_token_id=[end, 2])
    assert end in ended[0].tolist() and ended[0, -1] == 0, "the sequence that ended is padded"
    ours.generate(**one, max_new_tokens=5, do_sample=False, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out.strip() == tokenizer.decode(free[one["input_ids"].shape[1] :][:5])
    ours.generate(**batch, max_new_tokens=4, do_sample=True, temperature=0.7, top_p=0.9)
    assert not steps
    both(same_random, theirs, batch, max_new_tokens=4, do_sample=True)
    assert len(steps) == 4
    ours.generate(**batch, max_new_tokens=4, do_sample=True, repetition_penalty=1.2)  # Transformers' penalty counts padding
    assert len(steps) == 8


CUTS = {
    "temperature": 1.3,
    "top_k": 40,
    "top_p": 0.97,
    "min_p": 0.01,
    "typical_p": 0.97,
    "repetition_penalty": 1.3,
    "suppress_tokens": [13],
}


def test_our_sampler_draws_from_the_distribution_of_transformers(ours, theirs, one, monkeypatch):
    """Chi-square of first tokens against the probabilities that Transformers' processors leave; seeds are fixed."""
    draws = 1500
    monkeypatch.setattr(transformers_door, "Drawing", lambda *_, **__: pytest.fail("drawn by Transformers' processors"))
    torch.manual_seed(3)
    made = ours.generate(**one, max_new_tokens=1, do_sample=True, num_return_sequences=draws, pad_token_id=0, **CUTS)[:, -1]
    seen = torch.bincount(made, minlength=4096).double()

    def statistic(**options):
        """And its degrees of freedom."""
        torch.manual_seed(3)
        asked = {"max_new_tokens": 1, "do_sample": True, "output_scores": True, "return_dict_in_generate": True, "pad_token_id": 0}
        probs = theirs.generate(**one, **asked, **options).scores[0][0].double().softmax(-1)
        assert (seen[probs == 0] == 0).all()
        wanted, found = probs * draws, seen
        rare = wanted < 5
        wanted, found = (torch.cat([part[~rare], part[rare].sum()[None]]) for part in (wanted, found))
        return float(((found - wanted) ** 2 / wanted.clamp(min=1e-9)).sum()), len(wanted) - 1

    value, degrees = statistic(**CUTS)
    limit = degrees + 4 * (2 * degrees) ** 0.5
    assert degrees >= 8
    assert value < limit, (value, degrees)
    assert statistic(**{**CUTS, "temperature": 1.5})[0] > limit, "the test would see another temperature"


def test_a_seed_of_torch_repeats_what_our_sampler_draws(ours, batch):
    made = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        made.append(ours.generate(**batch, max_new_tokens=12, do_sample=True, num_return_sequences=2, pad_token_id=0))
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])
    assert len({tuple(row) for row in made[0][:2].tolist()}) == 2, "sequences of one prompt have seeds of their own"


def test_the_least_length_holds_in_our_sampler(ours, one, monkeypatch):
    monkeypatch.setattr(transformers_door, "Drawing", lambda *_, **__: pytest.fail("drawn by Transformers' processors"))
    length, ends = one["input_ids"].shape[1], list(range(2, 4096))  # of 4096 tokens: it would end at once
    for least in ({"min_new_tokens": 7}, {"min_length": length + 7}):
        made = ours.generate(**one, max_new_tokens=20, do_sample=True, eos_token_id=ends, pad_token_id=0, **least)
        assert made.shape[1] == length + 8, least
        assert set(made[0, length : length + 7].tolist()) <= {0, 1}


@pytest.mark.parametrize(
    "options",
    [
        {"no_repeat_ngram_size": 2},
        {"top_p": 0.0},
        {"logits_processor": LogitsProcessorList([TopPLogitsWarper(0.9)]), "temperature": 0.5},  # before the temperature
        {"logits_processor": LogitsProcessorList([TopKLogitsWarper(20, min_tokens_to_keep=2)])},
    ],
    ids=["not-ours", "out-of-range", "another-order", "other-settings"],
)
def test_other_processors_are_run_by_transformers(ours, theirs, one, options):
    both(ours, theirs, one, max_new_tokens=12, do_sample=True, **options)


def test_processors_of_the_caller_see_every_step(ours, one):
    seen = []

    class Watch(LogitsProcessor):
        def __call__(self, ids, scores):
            seen.append(ids.shape[1])
            return scores

    ours.generate(**one, max_new_tokens=5, do_sample=True, logits_processor=LogitsProcessorList([Watch()]), eos_token_id=4095)
    assert len(seen) == 5


def test_code_of_a_repository_is_not_run(ours, one, monkeypatch):
    for name in ("hf_hub_download", "cached_file"):
        monkeypatch.setattr(f"transformers.utils.hub.{name}", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(OptionError, match="contrastive_search is no part of this Transformers"):
        ours.generate(**one, penalty_alpha=0.6, top_k=4, max_new_tokens=3)
    with pytest.raises(OptionError, match="custom_generate names a repository"):
        ours.generate(**one, custom_generate="owner/name", trust_remote_code=True, max_new_tokens=3)


def test_an_assistant_changes_nothing_but_the_speed(ours, theirs, one):
    with ex.load(EXL2, cache="fp32", progress=None) as small:
        assistant = Exl2ForCausalLM(small)
        text = ours.generate(**one, max_new_tokens=24, do_sample=False, assistant_model=assistant, pad_token_id=0)
    assert torch.equal(text, theirs.generate(**one, max_new_tokens=24, do_sample=False, pad_token_id=0))


def test_going_on_with_a_cache(ours, one):
    first = ours.generate(**one, max_new_tokens=6, do_sample=False, return_dict_in_generate=True, output_scores=True, output_logits=True)
    assert len(first.scores) == len(first.logits) == 6
    more = ours.generate(first.sequences, max_new_tokens=6, do_sample=False, **{CACHE: first[CACHE]})
    assert torch.equal(more, ours.generate(**one, max_new_tokens=12, do_sample=False))


def test_streamers_criteria_and_processors(ours, tokenizer, one, capsys):
    class Ends:
        def __call__(self, ids, scores, **kwargs):
            return torch.tensor([ids.shape[1] >= one["input_ids"].shape[1] + 5] * ids.shape[0])

    class Only:
        def __call__(self, ids, scores):
            return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([42]), 0.0)

    text = ours.generate(
        **one,
        max_new_tokens=20,
        stopping_criteria=StoppingCriteriaList([Ends()]),
        logits_processor=LogitsProcessorList([Only()]),
        streamer=TextStreamer(tokenizer, skip_prompt=True),
    )
    assert text[0, one["input_ids"].shape[1] :].tolist() == [42] * 5
    assert capsys.readouterr().out.strip() == tokenizer.decode([42] * 5).strip()


def test_the_pipeline(ours, tokenizer, one):
    generate = pipeline("text-generation", model=ours, tokenizer=tokenizer)
    made = generate(PROMPTS[0], max_new_tokens=8, do_sample=False, return_full_text=False)[0]["generated_text"]
    want = ours.generate(**one, max_new_tokens=8, do_sample=False)[0, one["input_ids"].shape[1] :]
    assert made == tokenizer.decode(want, skip_special_tokens=True)


def test_one_forward_a_token_as_web_uis_use_it(ours, llm, tokenizer):
    """What text-generation-webui's HF loaders do: a wrapper that keeps the cache and asks for the last logits."""
    ids = tokenizer(PROMPTS[1], return_tensors="pt")["input_ids"]
    cache, step, made = None, ids, []
    for _ in range(8):
        out = ours(step, **{CACHE: cache}, use_cache=True, logits_to_keep=1)
        cache, step = out[CACHE], out.logits[:, -1].argmax(-1, keepdim=True)
        made.append(int(step))
    assert made == [token.id for token in llm.generate(PROMPTS[1], max_tokens=8, temperature=0).tokens]


def test_the_model_beside_it_goes_on(ours, one):
    handle = ours.llm.stream("She said", max_tokens=40, temperature=0, ignore_eos=True)
    text = ours.generate(**one, max_new_tokens=6, do_sample=False)
    assert handle.result().text == ours.llm.generate("She said", max_tokens=40, temperature=0, ignore_eos=True).text
    assert torch.equal(text, ours.generate(**one, max_new_tokens=6, do_sample=False))


def test_a_quantised_directory(tokenizer, one):
    model = Exl2ForCausalLM.from_pretrained(EXL2)
    want = [token.id for token in model.llm.generate(PROMPTS[0], max_tokens=10, temperature=0).tokens]
    assert model.generate(**one, max_new_tokens=10, do_sample=False)[0, one["input_ids"].shape[1] :].tolist() == want
    model.close()
    assert model.llm.engine.closed


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m, x: m(**x, output_attentions=True), OptionError, "output_attentions was given"),
        (lambda m, x: m(inputs_embeds=torch.zeros(1, 2, 256)), OptionError, "inputs_embeds was given"),
        (lambda m, x: m(**x, head_mask=torch.ones(1)), OptionError, "unknown keyword 'head_mask'"),
        (lambda m, x: m(x["input_ids"], torch.ones(3, 3)), OptionError, r"attention_mask is \(3, 3\)"),
        (lambda m, x: m(x["input_ids"] + 5000), OptionError, "ids outside 0 to 4095"),
        (lambda m, x: m(torch.ones(1, 2000, dtype=torch.int64)), ContextOverflow, "the model was loaded for 1024"),
        (lambda m, x: m(**x, **{CACHE: transformers.DynamicCache()}), OptionError, "the cache is a DynamicCache"),
        (lambda m, x: m.generate(**x, cache_implementation="static", max_new_tokens=2), OptionError, "cache_implementation is 'static'"),
        (lambda m, x: m.to("cuda"), OptionError, "cannot be moved to cuda"),
        (lambda m, x: m.save_pretrained("x"), OptionError, "the model's files are in"),
        (lambda m, x: Exl2ForCausalLM.from_pretrained(DEMO, torch_dtype=torch.bfloat16), OptionError, "torch_dtype is torch.bfloat16"),
        (lambda m, x: Exl2ForCausalLM.from_pretrained(DEMO, trust_remote_code=True), OptionError, "trust_remote_code is True"),
        (
            lambda m, x: Exl2ForCausalLM.from_pretrained(DEMO, torch_random="no"),
            OptionError,
            "torch_random is 'no'; expected True or False",
        ),
        (lambda m, x: Exl2ForCausalLM.from_pretrained(DEMO, device_map={"": 0}), OptionError, "device_map is"),
        (lambda m, x: Exl2ForCausalLM.from_pretrained(DEMO, load_in_4bit=True), OptionError, "unknown keyword 'load_in_4bit'"),
    ],
)
def test_refusals(ours, one, call, error, message):
    with pytest.raises(error, match=message):
        call(ours, one)
    assert ours.to("cpu") is ours
