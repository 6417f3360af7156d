"""Chats with pictures: answers as Transformers gives them, beside other requests, from the cache, and what is refused."""

import functools
import threading

import numpy as np
import PIL.Image
import pytest
import torch

import exl2nb as ex
from exl2nb.core.errors import ConfigError, ContextOverflow, FormatError, OptionError, PictureError
from exl2nb.model.vision.pictures import Picture
from exl2nb.model.vision.tower import patches_of
from tests.model.vision.zoo import ZOO, build, write

GREEDY = {"temperature": 0, "max_tokens": 10, "ignore_eos": True}
pytestmark = pytest.mark.cpu


def noise(width, height, seed):
    return PIL.Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def talk(name):
    """Two pictures, and a video where the model reads them, in a conversation of three turns."""
    video = [{"type": "video", "video": [noise(24, 24, i) for i in range(5)], "fps": 2}] if name.startswith("qwen") else []
    return [
        {"role": "user", "content": [{"type": "image", "image": noise(30, 20, 1)}, {"type": "text", "text": "w1 w2"}]},
        {"role": "assistant", "content": "w5"},
        {"role": "user", "content": [*video, noise(17, 40, 2), "w3 w4"]},
    ]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Name -> the model in Transformers and ours, loaded once."""
    loaded = []

    @functools.cache
    def make(name):
        twin = build(name)
        loaded.append(ex.load(write(name, twin, tmp_path_factory.mktemp(name)), device="cpu", cache="fp32", progress=None))
        return twin, loaded[-1]

    yield make
    for llm in loaded:
        llm.close()


def inputs_of(name, llm, messages):
    """A prompt as Transformers takes it, from our own ids and pixels."""
    ids, _ = llm.chat_request(messages, {}, where="test")
    row, vision = torch.tensor([ids]), llm.vision.vision
    kinds = (row == 140).int() + 2 * (row == 141).int()
    found = [part for message in messages for part in message["content"] if not isinstance(part, str)]
    pictures = [
        Picture.video(p["video"], fps=2) if "video" in p else Picture.of(p["image"]) for p in map(_as_part, found) if "text" not in p
    ]
    frames = [(vision.video_rules if one.is_video else vision.rules).frames(one) for one in pictures]
    inputs = {"input_ids": row, "attention_mask": torch.ones_like(row)}
    if name.startswith("qwen"):
        kinds_of = {False: ("pixel_values", "image_grid_thw"), True: ("pixel_values_videos", "video_grid_thw")}
        for video, (pixels, grids) in kinds_of.items():
            mine = [one for one, picture in zip(frames, pictures) if picture.is_video == video]
            inputs[pixels] = torch.cat([patches_of(vision.tower, one) for one in mine])
            inputs[grids] = torch.tensor([[len(one) // 2, one.shape[2] // 4, one.shape[3] // 4] for one in mine])
        inputs["mm_token_type_ids"] = kinds
        if name == "qwen2_5_vl":
            inputs["second_per_grid_ts"] = torch.tensor([1.0])
    elif name in ("pixtral", "mistral3"):
        height, width = (max(one.shape[side] for one in frames) for side in (2, 3))
        pads = [torch.nn.functional.pad(one, (0, width - one.shape[3], 0, height - one.shape[2])) for one in frames]
        inputs |= {"pixel_values": torch.cat(pads), "image_sizes": torch.tensor([one.shape[2:] for one in frames])}
    else:
        inputs["pixel_values"] = torch.cat(frames)
        if name == "gemma3":
            inputs["token_type_ids"] = kinds
    return inputs


def _as_part(part):
    return part if isinstance(part, dict) else {"image": part}


def ids_of(completion):
    return [token.id for token in completion.tokens]


def drawn(completion):
    """Tokens with their log probabilities, equal to the bit where everything is."""
    return [(token.id, token.logprob) for token in completion.tokens]


@pytest.mark.parametrize("name", ZOO)
def test_answers_equal_transformers(name, made):
    twin, llm = made(name)
    answer = llm.chat(talk(name), **GREEDY, return_logits=True)
    inputs = inputs_of(name, llm, talk(name))
    padding = list(range(llm.tokenizer.highest_id + 1, llm.config.vocab_size))  # ids without a token, which are never drawn
    with torch.no_grad():
        want = twin.generate(
            **inputs,
            max_new_tokens=10,
            do_sample=False,
            suppress_tokens=padding or None,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    assert answer.timings.prompt_tokens == inputs["input_ids"].shape[1]
    logits = torch.cat(want.logits)
    assert float((torch.from_numpy(answer.logits) - logits).abs().max() / logits.std()) < 1e-4
    assert ids_of(answer) == want.sequences[0, -10:].tolist()


@pytest.mark.parametrize("name", ZOO)
def test_beside_texts_and_other_pictures_answers_are_the_same(name, made):
    _, llm = made(name)
    llm.cache.clear()
    other = [{"role": "user", "content": [noise(40, 33, 7), "w9"]}]
    talks = [talk(name), "w1 w2 w3", other, "w7", talk(name), "w8 w1"]
    llm.cache.reuse = False
    try:
        alone = [drawn(llm.chat(one, **GREEDY)) for one in talks]
        handles = [llm.chat(one, stream=True, **GREEDY) for one in talks]
        assert [drawn(handle.result()) for handle in handles] == alone
        assert alone[0] == alone[4] != alone[2]
    finally:
        llm.cache.reuse = True
    again = [llm.chat(one, stream=True, **GREEDY) for one in talks]
    assert [drawn(handle.result()) for handle in again] == alone


def test_the_same_picture_costs_once(made):
    _, llm = made("qwen2_5_vl")
    llm.cache.clear()
    runs = llm.vision.runs
    content = [noise(60, 60, 50), "w1"]
    first = llm.chat([{"role": "user", "content": content}], **GREEDY)
    again = llm.chat([{"role": "user", "content": [*content, "w2 w3"]}], **GREEDY)
    assert llm.vision.runs == runs + 1
    assert first.timings.reused_tokens == 0
    assert again.timings.reused_tokens >= llm.vision.tokens(Picture.of(content[0])) > 8
    other = llm.chat([{"role": "user", "content": [noise(60, 60, 51), "w1"]}], **GREEDY)  # as large, with the same ids
    assert other.timings.reused_tokens < 3
    assert ids_of(other) != ids_of(first)
    assert other.timings.prompt_tokens == first.timings.prompt_tokens


def test_cached_pages_of_pictures_are_saved_and_loaded(made, tmp_path):
    _, llm = made("qwen2_vl")
    llm.cache.clear()
    messages = [{"role": "user", "content": [noise(60, 60, 52), "w1"]}]
    first = llm.chat(messages, **GREEDY)
    llm.cache.save(tmp_path / "pages")
    llm.cache.clear()
    llm.cache.load(tmp_path / "pages")
    again = llm.chat(messages, **GREEDY)
    assert again.timings.reused_tokens == first.timings.prompt_tokens - 1
    assert ids_of(again) == ids_of(first)
    assert "negative" not in str(llm.cache.snapshot())


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "pixtral"])
def test_beams_guidance_drafts_and_samples_see_too(name, made):
    _, llm = made(name)
    messages = talk(name)
    plain = llm.chat(messages, **GREEDY)
    drafted = llm.chat(messages, **GREEDY, speculation={"kind": "ngram", "adaptive": False})
    assert ids_of(drafted) == ids_of(plain)
    assert ids_of(llm.chat(messages, beams=3, max_tokens=5)) == ids_of(llm.chat(messages, beams=3, max_tokens=5))
    guided = llm.chat(messages, **GREEDY, negative_prompt="w1 w2", cfg_scale=1.0)
    assert ids_of(guided) == ids_of(plain)
    assert len(llm.chat(messages, **GREEDY, negative_prompt="w1 w2", cfg_scale=3.0).tokens) == 10


def test_a_small_cache_preempts_and_goes_on(tmp_path):
    """Sequences with pictures give their pages up and run again."""
    folder = write("qwen2_vl", build("qwen2_vl"), tmp_path)
    long = {"temperature": 0, "max_tokens": 230, "ignore_eos": True}
    with ex.load(folder, device="cpu", context=512, cache_tokens=1024, max_sequences=4, progress=None) as llm:
        talks = [[{"role": "user", "content": [noise(50, 40, i), f"w{i}"]}] for i in range(3)]
        alone = [ids_of(llm.chat(one, **long)) for one in talks]
        llm.cache.reuse = False
        together = [llm.chat(one, stream=True, **long) for one in talks * 2]
        assert [ids_of(one.result()) for one in together] == alone * 2


def test_many_threads_share_one_tower(made):
    _, llm = made("llava")
    llm.cache.clear()
    found, runs = {}, llm.vision.runs

    def ask(i):
        found[i] = ids_of(llm.chat([{"role": "user", "content": [noise(30, 30, 60 + i % 2), "w1"]}], **GREEDY))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert llm.vision.runs == runs + 2
    assert found[0] == found[2] == found[4] != found[1] == found[3] == found[5]


def test_a_prompt_is_shown_with_its_picture_tokens(made):
    _, llm = made("gemma3")
    shown = llm.render([{"role": "user", "content": [noise(9, 9, 1), "w1"]}])
    assert sum(piece.text == "<image>" for piece in shown.pieces) == 16
    assert not shown.warnings


def test_templates_that_know_no_parts_get_the_model_s_mark(made):
    _, llm = made("llava")
    text = llm.render_chat([{"role": "user", "content": [noise(9, 9, 1), "w1"]}], template="vicuna")
    assert "USER: " + "<image>" * 9 + "\nw1" in text
    only_lists = "{% for m in messages %}{% for p in m.content %}{{ '<image>' if p.type == 'image' else p.text }} {% endfor %}{% endfor %}"
    assert llm.render_chat([{"role": "user", "content": "w1"}, {"role": "user", "content": [noise(9, 9, 1)]}], template=only_lists) == (
        "w1 " + "<image>" * 9 + " "
    )


def test_what_openai_and_anthropic_send(made):
    import base64
    import io

    _, llm = made("llava")
    held = io.BytesIO()
    noise(9, 9, 1).save(held, "PNG")
    data = base64.b64encode(held.getvalue()).decode()
    parts = [
        {"type": "image", "image": noise(9, 9, 1)},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        {"type": "input_image", "image_url": f"data:image/png;base64,{data}"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},
        {"type": "image", "base64": data},
    ]
    runs = llm.vision.runs
    answers = [ids_of(llm.chat([{"role": "user", "content": [part, "w1"]}], **GREEDY)) for part in parts]
    assert answers == [answers[0]] * 5
    assert llm.vision.runs == runs + 1


@pytest.mark.parametrize(
    ("content", "options", "error", "says"),
    [
        ([{"type": "image"}], {}, OptionError, "without a picture"),
        ([{"type": "image", "image": "/no/such.png"}], {}, PictureError, "no file"),
        ([{"type": "image_url", "image_url": {"url": "http://example.org/a.png"}}], {}, PictureError, "nothing is fetched"),
        ([{"type": "video", "video": [noise(8, 8, 1)] * 2}], {}, PictureError, "reads pictures and no videos"),
        ([{"type": "audio", "audio": b""}], {}, OptionError, "type 'audio'"),
        ([noise(8, 8, 1), "\ue001picture\ue001"], {}, PictureError, "1 pictures and 2 places"),
        ([noise(8, 8, 1)], {"token_healing": True}, OptionError, "exclude each other"),
        ([noise(8, 8, i) for i in range(257)], {}, PictureError, "more than 256"),
        ([noise(8, 8, i) for i in range(120)], {}, ContextOverflow, "of them pictures'"),
        (["w1"], {"pictures": 5}, OptionError, "llm.chat makes"),
    ],
)
def test_what_cannot_be_asked(content, options, error, says, made):
    _, llm = made("llava")
    with pytest.raises(error, match=says):
        llm.chat([{"role": "user", "content": content}], **options)
    assert llm.chat("w1", max_tokens=1, ignore_eos=True).tokens  # and the model goes on


def test_without_its_tower_a_model_reads_text_alone(tmp_path):
    folder = write("gemma3", build("gemma3"), tmp_path)
    with ex.load(folder, device="cpu", vision=False, progress=None) as llm:
        assert llm.vision is None
        assert llm.chat("w1", max_tokens=1, ignore_eos=True).tokens
        with pytest.raises(OptionError, match="reads text alone"):
            llm.chat([{"role": "user", "content": [{"type": "image", "image": noise(8, 8, 1)}]}])
    with pytest.raises(OptionError, match="vision"):
        ex.load(folder, device="cpu", vision="yes", progress=None)


def test_towers_that_do_not_fit_are_named(tmp_path):
    from exl2nb.io.safetensors import SafetensorsFile
    from exl2nb.io.safetensors import save as save_tensors

    folder = write("mistral3", build("mistral3"), tmp_path)
    with SafetensorsFile(folder / "model.safetensors") as file:
        tensors = {name: file.read(name).clone() for name in file.names()}
    name = next(name for name in tensors if name.endswith("vision_tower.transformer.layers.0.attention.o_proj.weight"))

    def broken(changed):
        save_tensors(folder / "model.safetensors", changed)
        with pytest.raises(FormatError) as caught:
            ex.load(folder, device="cpu", progress=None)
        return str(caught.value)

    assert "is missing" in broken({key: value for key, value in tensors.items() if key != name})
    assert "do not fit" in broken({**tensors, name: torch.zeros(32, 31)})
    last = next(name for name in tensors if name.endswith("linear_2.weight"))
    assert "becomes rows" in broken({**tensors, last: torch.zeros(63, 64)})
    save_tensors(
        folder / "model.safetensors", {key: value for key, value in tensors.items() if "vision" not in key and "multi_modal" not in key}
    )
    with ex.load(folder, device="cpu", progress=None) as llm:  # the text part alone
        assert llm.vision is None


@pytest.mark.parametrize("name", ["qwen2_5_vl", "llava"])
def test_plans_count_the_tower_and_the_tokens_of_a_picture(name, made, tmp_path):
    twin, llm = made(name)
    planned = ex.plan(write(name, twin, tmp_path), context=256, free=1 << 40)
    assert planned.tower == llm.vision.weight_bytes
    assert abs(planned.weights - llm.weight_bytes - planned.tower) < 0.35 * llm.weight_bytes  # small ones are padded
    assert planned.picture_tokens == llm.vision.tokens(Picture.of(noise(1024, 1024, 0)))
    assert planned.at(batch=2).tower == planned.tower
    assert f"take {planned.picture_tokens} tokens" in str(planned) + planned._repr_html_()
    assert ex.plan(llm.path, device="cuda", context=256, free=1 << 40).tower == planned.tower // 2


def test_conversations_keep_the_pictures_they_were_shown(made, tmp_path):
    _, llm = made("llava")
    talk = llm.conversation(temperature=0, max_tokens=5)
    first = talk.say("w1 w2", images=[noise(30, 20, 5)])
    again = llm.chat([{"role": "user", "content": [noise(30, 20, 5), "w1 w2"]}], temperature=0, max_tokens=5)
    assert first.content == again.reply.content
    runs = llm.vision.runs
    second = talk.say("w3")
    assert llm.vision.runs == runs
    talk.save(tmp_path / "talk.json")
    loaded = llm.load_conversation(tmp_path / "talk.json")
    assert [turn.content for turn in loaded.turns] == [turn.content for turn in talk.turns]
    assert loaded.regenerate().content == second.content
    edited = loaded.edit(loaded.turns[0], "w9")
    assert loaded.turns[0].images == talk.turns[0].images
    assert edited.role == "assistant"
    assert "data:image/png;base64," in talk._repr_html_()
    text = (tmp_path / "talk.json").read_text().replace("data:image/png", "http://else")
    (tmp_path / "talk.json").write_text(text)
    with pytest.raises(ConfigError, match="data URLs"):
        llm.load_conversation(tmp_path / "talk.json")
    with pytest.raises(OptionError, match="list of pictures"):
        talk.say("w1", images="cat.png")
