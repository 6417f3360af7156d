"""RoPE: frequencies and tables are Transformers'; longrope's two sets of factors, chosen by how long a sequence is."""

import warnings
from pathlib import Path

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import exl2nb as ex
from exl2nb.core.errors import ConfigError, OptionError
from exl2nb.generator.engine import Engine
from exl2nb.generator.request import Request
from exl2nb.model.archs import parse_config
from exl2nb.model.loader import load_model
from exl2nb.model.rope import RopeOverride, rope_frequencies, rope_tables
from exl2nb.tokenizer.tokenizer import Tokenizer

from .tiny import BASE, ids_of, truth
from .zoo import LONGROPE, build, write, write_tokenizer

DEMO = Path(ex.__file__).parent / "demo_model"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
CASES = {
    "default": {},
    "theta": {"rope_theta": 1e6},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "linear-old": {"type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": LLAMA3 | {"rope_theta": 500000.0},
    "llama3-32": LLAMA3 | {"factor": 32.0, "rope_theta": 500000.0},
    "yarn": YARN,
    "yarn-attention": YARN | {"attention_factor": 1.3},
    "yarn-mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0},
    "yarn-mscale-alone": YARN | {"mscale": 0.7},
    "yarn-no-truncate": YARN | {"truncate": False, "beta_fast": 20.0, "beta_slow": 2.0},
    "yarn-one": YARN | {"factor": 1.0},
    "yarn-small": YARN | {"original_max_position_embeddings": 64},
}


def both(parameters, head_dim=64, max_positions=16384, style="new"):
    theta = parameters.get("rope_theta", 10000.0)
    raw = {**BASE, "head_dim": head_dim, "max_position_embeddings": max_positions, "architectures": ["LlamaForCausalLM"]}
    if style == "new":
        raw["rope_parameters"] = {"rope_theta": theta, **parameters}
    else:
        raw |= {"rope_scaling": {k: v for k, v in parameters.items() if k != "rope_theta"} or None, "rope_theta": theta}
    theirs = transformers.LlamaConfig(**{k: v for k, v in raw.items() if k != "architectures"})
    return parse_config(raw), theirs


@pytest.mark.parametrize("style", ["new", "old"])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("case", CASES)
def test_frequencies_and_tables_equal_transformers(case, head_dim, style):
    config, theirs = both(CASES[case], head_dim, style=style)
    rotary = LlamaRotaryEmbedding(theirs)
    inverse, factor = rope_frequencies(config.rope)
    assert torch.equal(inverse, rotary.inv_freq), (inverse - rotary.inv_freq).abs().max()
    assert factor == pytest.approx(rotary.attention_scaling, abs=0)
    cos, sin = rope_tables(config, 9000)
    want_cos, want_sin = rotary(torch.zeros(1), torch.arange(9000)[None])
    assert cos.shape == (9000, head_dim // 2)
    assert cos.dtype == torch.float32
    for mine, want in ((cos, want_cos), (sin, want_sin)):
        torch.testing.assert_close(mine, want[0, :, : head_dim // 2], atol=1e-6, rtol=0)
        torch.testing.assert_close(mine, want[0, :, head_dim // 2 :], atol=1e-6, rtol=0)


@pytest.mark.parametrize("context", [100, 512, 513, 4000])
def test_dynamic_follows_the_context_the_model_is_loaded_with(context):
    config, theirs = both(CASES["dynamic"], max_positions=512)
    want, _ = ROPE_INIT_FUNCTIONS["dynamic"](theirs, None, seq_len=context)
    got, _ = rope_frequencies(config.rope, context=context)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    if context > 512:
        cos, _ = rope_tables(config, context, context=context)
        want_cos, _ = LlamaRotaryEmbedding(theirs)(torch.zeros(1), torch.arange(context)[None])
        torch.testing.assert_close(cos, want_cos[0, :, :32], atol=2e-4, rtol=0)


def test_yarn_null_factor_is_the_ratio_of_contexts():
    config, theirs = both(YARN | {"factor": None, "original_max_position_embeddings": 2048})
    assert config.rope.factor == 8.0
    want, scaling = ROPE_INIT_FUNCTIONS["yarn"](theirs, None)
    got, factor = rope_frequencies(config.rope)
    assert torch.equal(got, want)
    assert factor == scaling


def test_top_level_original_length_wins():
    raw = {**BASE, "architectures": ["LlamaForCausalLM"], "original_max_position_embeddings": 100, "rope_scaling": YARN}
    assert parse_config(raw).rope.original_positions == 100


def test_rope_scaling_wins_over_rope_parameters():
    raw = {**BASE, "architectures": ["LlamaForCausalLM"], "rope_scaling": CASES["linear"], "rope_parameters": {"rope_type": "default"}}
    assert parse_config(raw).rope.type == "linear"


CHANGES = {
    "scale": ({"scale": 2.5}, {"rope_type": "linear", "factor": 2.5}),
    "theta": ({"theta": 5e5}, {"rope_theta": 5e5}),
    "alpha": ({"alpha": 4.0}, {"rope_theta": 10000.0 * 4.0 ** (64 / 62)}),
    "yarn": ({"scaling": {"rope_type": "yarn", "factor": 2.0}}, {"rope_type": "yarn", "factor": 2.0}),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_a_caller_changes_is_what_transformers_makes_of_such_a_config(case):
    change, parameters = CHANGES[case]
    change = RopeOverride(**change)
    plain, theirs = both(parameters, max_positions=512)
    plain = {**BASE, "head_dim": 64, "max_position_embeddings": 512, "architectures": ["LlamaForCausalLM"], "rope_theta": 10000.0}
    config = change.apply(parse_config(change.raw(plain)))
    got, _ = rope_frequencies(config.rope)
    torch.testing.assert_close(got, LlamaRotaryEmbedding(theirs).inv_freq, rtol=1e-6, atol=0)
    assert config.max_position_embeddings == {"scale": 1280, "theta": 512, "alpha": 2048, "yarn": 1024}[case]


@pytest.mark.cpu
def test_a_stretched_model_gives_the_logits_of_transformers():
    scaling = {"rope_type": "yarn", "factor": 2.0}
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        DEMO, dtype=torch.float32, rope_parameters={"rope_theta": 10000.0, "original_max_position_embeddings": 1024, **scaling}
    )
    with warnings.catch_warnings(), ex.load(DEMO, context=2048, rope_scaling=scaling, cache="fp32", progress=None) as llm:
        warnings.simplefilter("error")
        ids = llm.tokenizer.encode((DEMO / "evaluation.txt").read_text()[:8000])[:1500]
        row = torch.as_tensor(llm.generate(ids, max_tokens=1, temperature=0, return_logits=True).logits[0])
    with torch.no_grad():
        want = reference(torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(row, want, atol=2e-3, rtol=0)


def test_a_context_beyond_what_the_model_knows_warns():
    with pytest.warns(RuntimeWarning, match="context is 2048, the model was trained for 1024 tokens.*rope_scale=2"):
        load_model(DEMO, context=2048).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_model(DEMO, context=1024).close()
        load_model(DEMO, context=2048, rope=RopeOverride(scale=2)).close()
        load_model(DEMO, context=2048, rope=RopeOverride(alpha=2.5)).close()
    with ex.load(DEMO, rope_scale=4, progress=None) as llm:
        assert llm.context == 4096


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rope_scale": 0}, "rope_scale is 0"),
        ({"rope_theta": "many"}, "rope_theta is 'many'"),
        ({"rope_alpha": 0.5}, "rope_alpha is 0.5"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'; expected a dict"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "with rope_scaling.*rope_type is 'spiral'; expected one of"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor"),
    ],
)
def test_rope_options_are_checked(options, message):
    with pytest.raises((OptionError, ConfigError), match=message):
        ex.load(DEMO, progress=None, **options)


def test_a_model_without_rope_refuses_rope_options(tmp_path):
    write("gpt2", build("gpt2"), tmp_path)
    with pytest.raises(OptionError, match="has no RoPE they could change"):
        load_model(tmp_path, rope=RopeOverride(scale=2))


SWITCH = 128


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    directory = tmp_path_factory.mktemp("phi3")
    twin = build("phi3", rope_parameters=dict(LONGROPE), original_max_position_embeddings=SWITCH, sliding_window=None)
    write_tokenizer(write("phi3", twin, directory))
    return twin, load_model(directory, context=512), Tokenizer.load(directory)


def request(ids, count, **kwargs):
    return Request.of(ids, where="test", temperature=0, max_tokens=count, ignore_eos=True, return_logits=True, **kwargs)


def check(twin, completion, prompt):
    """Every token's logits are those of the whole text before it, run at once."""
    ids = [*prompt, *(token.id for token in completion.tokens)]
    for at in range(len(prompt), len(ids)):
        want = truth(twin, torch.tensor([ids[:at]]))[0, -1]
        got = torch.as_tensor(completion.logits[at - len(prompt)])
        assert float((got - want).abs().max() / want.std()) < 5e-3, at


def test_short_long_and_across(pair):
    twin, model, tokenizer = pair
    assert model.rope_switch == SWITCH
    engine = Engine(model, tokenizer, model.cache_spec(8 * 256), context=512)
    try:
        text = ids_of(93, 1, 300, 4)[0].tolist()
        # side by side, and with equal beginnings: no page of a short sequence serves a long one
        prompts = [text[:40], text[:125], text[:128], text[:129], text[:290]]
        for prompt, handle in list(zip(prompts, engine.submit_many([request(p, 6) for p in prompts]))):
            check(twin, handle.result(), prompt)
        again = engine.submit(request(text[:290], 2)).result()
        assert again.timings.reused_tokens >= 256
        check(twin, again, text[:290])
        check(twin, engine.submit(request(text[:126], 8, speculation="ngram")).result(), text[:126])
    finally:
        engine.close()
    assert engine.pages.num_free == engine.pages.num_pages
