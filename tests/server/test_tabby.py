import json
import shutil
from pathlib import Path

import httpx

import exl2nb as ex
from exl2nb.server.http_server import Server
from exl2nb.server.server_options import ServerOptions

DEMO = Path(ex.__file__).parent / "demo_model"


def fine(response):
    assert response.status_code == 200, response.text
    return response.json()


def test_what_it_is(client):
    assert fine(client.get("/health"))["status"] == "healthy"
    assert fine(client.get("/v1/auth/permission")) == {"permission": "admin"}
    parameters = fine(client.get("/v1/model"))["parameters"]
    assert (parameters["max_seq_len"], parameters["cache_mode"], parameters["draft"]) == (1024, "fp16", False)
    assert fine(client.get("/props"))["default_generation_settings"]["n_ctx"] == 1024
    assert "openai" in fine(client.get("/.well-known/serviceinfo"))["api"]
    assert fine(client.get("/v1/model/list"))["data"] == []
    assert "/v1/chat/completions" in fine(client.get("/openapi.json"))["paths"]
    assert "swagger" in client.get("/docs").text


def test_metrics(client):
    def value(name):
        return next(float(line.split()[1]) for line in client.get("/metrics").text.splitlines() if line.startswith(name + " "))

    before = value("exl2nb_generated_tokens_total")
    fine(client.post("/v1/completions", json={"prompt": "It was", "max_tokens": 5}))
    assert value("exl2nb_generated_tokens_total") == before + 5
    assert value("exl2nb_cache_pages_free") == value("exl2nb_cache_pages")
    assert value("exl2nb_time_to_first_token_seconds_count") > 0


SILLYTAVERN = {  # what SillyTavern 1.19 sends to the API type TabbyAPI, under the names of several servers at once
    "prompt": "User: It was\nAssistant:", "max_new_tokens": 12, "max_tokens": 12, "temperature": 1, "top_p": 0.95, "typical_p": 1,
    "typical": 1, "min_p": 0.01, "repetition_penalty": 1.1, "frequency_penalty": 0, "presence_penalty": 0, "top_k": 0, "skew": 0,
    "min_tokens": 0, "add_bos_token": True, "smoothing_factor": 0, "smoothing_curve": 1, "dry_allowed_length": 2, "dry_multiplier": 0,
    "dry_base": 1.75, "dry_sequence_breakers": '["\\n",":"]', "dry_penalty_last_n": 0, "max_tokens_second": 0,
    "stopping_strings": ["\nUser:"], "stop": ["\nUser:"], "truncation_length": 8192, "ban_eos_token": False, "skip_special_tokens": True,
    "include_reasoning": True, "top_a": 0, "tfs": 1, "mirostat_mode": 0, "mirostat_tau": 5, "mirostat_eta": 0.1, "custom_token_bans": "",
    "banned_strings": [], "api_type": "tabby", "api_server": "http://127.0.0.1:5000", "xtc_threshold": 0.1, "xtc_probability": 0,
    "nsigma": 0, "top_n_sigma": 0, "min_keep": 0, "adaptive_target": -0.01, "adaptive_decay": 0.9, "n": 1, "rep_pen": 1.1,
    "rep_pen_range": 0, "repetition_decay": 0, "repetition_penalty_range": 0, "temperature_last": True, "speculative_ngram": False,
    "guidance_scale": 1, "negative_prompt": "", "repeat_penalty": 1.1, "repeat_last_n": 0, "n_predict": 12, "num_predict": 12,
    "num_ctx": 8192, "mirostat": 0, "ignore_eos": False, "rep_pen_slope": 1, "stream": False, "seed": 3, "sampler_seed": 3,
}  # fmt: skip


def test_a_request_of_sillytavern(client):
    assert fine(client.post("/v1/completions", json=SILLYTAVERN))["usage"]["completion_tokens"] <= 12
    told = client.post("/v1/completions", json={**SILLYTAVERN, "n_predict": 13})
    assert told.status_code == 400 and "max_new_tokens and n_predict are names of one field and differ" in told.text
    for name in ("nsigma", "adaptive_target", "min_keep", "max_tokens_second"):
        told = client.post("/v1/completions", json={"prompt": "It was", "max_tokens": 2, name: 1})
        assert told.status_code == 400 and "is not offered" in told.text


def test_tokens(client, llm):
    assert fine(client.post("/v1/token/encode", json={"text": "It was"}))["tokens"] == llm.tokenizer.encode("It was")
    bare = fine(client.post("/v1/token/encode", json={"text": "It was", "add_bos_token": False}))
    assert bare["tokens"] == llm.tokenizer.encode("It was", add_special=False)
    chat = fine(client.post("/v1/token/encode", json={"text": [{"role": "user", "content": "It was"}]}))
    assert chat["length"] == len(llm.tokenizer.encode("<s>It was\n", add_special=False))
    assert fine(client.post("/v1/token/decode", json={"tokens": bare["tokens"]}))["text"].strip() == "It was"
    assert client.post("/v1/token/decode", json={"tokens": [-1]}).status_code == 400


def test_templates(client):
    assert "vicuna" in fine(client.get("/v1/templates"))["data"]
    body = {"messages": [{"role": "user", "content": "It was"}], "max_tokens": 4, "temperature": 0}
    before = fine(client.post("/v1/chat/completions", json=body))["usage"]["prompt_tokens"]
    fine(client.post("/v1/template/switch", json={"prompt_template_name": "alpaca"}))
    try:
        assert fine(client.post("/v1/chat/completions", json=body))["usage"]["prompt_tokens"] > before
        assert client.post("/v1/template/switch", json={"prompt_template_name": "x"}).status_code == 400
    finally:
        fine(client.post("/v1/template/unload"))
    assert fine(client.post("/v1/chat/completions", json=body))["usage"]["prompt_tokens"] == before


def test_sampler_presets(client, llm):
    body = {"prompt": "It was", "max_tokens": 8, "seed": 3}
    greedy = llm.generate("It was", max_tokens=8, temperature=0).text
    assert fine(client.get("/v1/sampling/override/list"))["presets"] == ["calm"]
    assert fine(client.post("/v1/completions", json={**body, "preset": "calm"}))["choices"][0]["text"] == greedy
    try:
        for switch in ({"preset": "calm"}, {"overrides": {"temperature": {"override": 0, "force": True}}}):
            fine(client.post("/v1/sampling/override/switch", json=switch))
            given = {**body, "temperature": 1.5} if "overrides" in switch else body
            assert fine(client.post("/v1/completions", json=given))["choices"][0]["text"] == greedy
        for wrong, words in [
            ({"preset": "x"}, "preset 'x' is not known"),
            ({"overrides": {"temprature": 1}}, "did you mean 'temperature'"),
            ({"overrides": {"temperature": "hot"}}, "temperature"),
            ({"overrides": {"temperature": {"additive": True}}}, "expected a value"),
            ({}, "expected one of"),
        ]:
            response = client.post("/v1/sampling/override/switch", json=wrong)
            assert response.status_code in (400, 404)
            assert words in response.json()["error"]["message"]
    finally:
        fine(client.post("/v1/sampling/override/unload"))


def test_a_model_of_a_notebook_is_not_touched(client):
    for route, body in [("model/unload", None), ("model/load", {"model_name": "x"})]:
        response = client.post(f"/v1/{route}", json=body)
        assert response.status_code == 409
        assert "llm.serve" in response.json()["error"]["message"]
    assert client.post("/v1/download", json={"repo_id": "a/b"}).status_code == 400


def test_models_are_loaded_and_unloaded(tmp_path, events, monkeypatch):
    """A server of its own, which begins without a model. The hub is a folder."""
    shutil.copytree(DEMO, tmp_path / "models" / "one")
    options = ServerOptions(port=0, model_dir=tmp_path / "models", template="vicuna")
    server = Server(None, options, owned=True).start()
    try:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            assert client.get("/health").status_code == 503
            assert fine(client.get("/v1/models"))["data"] == []
            assert client.post("/v1/completions", json={"prompt": "It was"}).status_code == 503
            assert [one["id"] for one in fine(client.get("/v1/model/list"))["data"]] == ["one"]
            for name, status in [("../one", 400), ("..", 400), ("two", 404)]:
                assert client.post("/v1/model/load", json={"model_name": name}).status_code == status
            load = {"model_name": "one", "cache_mode": "Q8", "max_seq_len": 512, "draft_model": {"draft_model_name": "one"}}
            told = events(client.post("/v1/model/load", json=load))
            assert told[-1]["status"] == "finished"
            assert {one["status"] for one in told[:-1]} == {"processing"}
            parameters = fine(client.get("/v1/model"))["parameters"]
            assert (parameters["max_seq_len"], parameters["cache_mode"], parameters["draft"]) == (512, "q8", True)
            assert fine(client.post("/v1/completions", json={"prompt": "It was", "max_tokens": 3}))["choices"][0]["text"]
            failed = events(client.post("/v1/model/load", json={"model_name": "one", "cache_mode": "q9"}))
            assert "q9" in failed[-1]["error"]["message"]
            monkeypatch.setattr("exl2nb.io.hub.resolve", lambda name, revision, progress: DEMO)
            path = fine(client.post("/v1/download", json={"repo_id": "owner/two", "revision": "4.0bpw"}))["download_path"]
            assert Path(path).name == "two-4.0bpw"
            assert client.post("/v1/download", json={"repo_id": "owner/two", "revision": "4.0bpw"}).status_code == 409
            assert events(client.post("/v1/model/load", json={"model_name": "two-4.0bpw"}))[-1]["status"] == "finished"
            fine(client.post("/v1/model/unload"))
            assert client.get("/health").status_code == 503
    finally:
        server.close()


def test_the_document_names_every_field(client):
    document = json.dumps(fine(client.get("/openapi.json")))
    for name in ("repetition_penalty", "rep_pen", "dry_multiplier", "xtc_probability", "tool_choice", "reasoning_budget"):
        assert name in document
