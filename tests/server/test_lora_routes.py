"""Adapters over HTTP: named by the model, loaded and unloaded by administrators, in both APIs."""

import httpx
import pytest

import exl2nb
from exl2nb.server.http_server import Server
from exl2nb.server.server_options import ServerOptions

from ..llm.lora_maker import write_lora

KEYS = {"api_keys": ("user-key",), "admin_keys": ("admin-key",)}


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A server with an adapter folder, its model, and clients with an admin's and a user's key."""
    folder = tmp_path_factory.mktemp("loras")
    with exl2nb.demo(device="cpu", progress=None) as llm:
        for i in range(2):
            write_lora(folder / f"a{i}", llm.config, seed=i, size=0.4)
        write_lora(folder / "wrong", llm.config)
        (folder / "wrong" / "adapter_config.json").write_text('{"peft_type": "IA3"}')
        with Server(llm, ServerOptions(port=0, lora_dir=folder, template="chatml", **KEYS), owned=False).start() as server:
            clients = [
                httpx.Client(base_url=server.url, timeout=60, headers={"Authorization": f"Bearer {key}-key"}) for key in ("admin", "user")
            ]
            yield llm, *clients
            for client in clients:
                client.close()


def test_load_list_use_unload(adapted):
    llm, admin, user = adapted
    ids = [one["id"] for one in user.get("/v1/loras").json()["data"]]
    assert ids == ["a0", "a1", "wrong"] and user.get("/v1/lora").json()["data"] == []
    assert user.post("/v1/lora/load", json={"loras": [{"name": "a0"}]}).status_code == 403
    done = admin.post(
        "/v1/lora/load", json={"loras": [{"name": "a0"}, {"name": "a1", "scaling": 0.5}, {"name": "wrong"}, {"name": "none"}]}
    ).json()
    assert (
        done["success"] == ["a0", "a1"]
        and [one["name"] for one in done["failure"]] == ["wrong", "none"]
        and "IA3" in done["failure"][0]["reason"]
    )
    assert {one["id"]: one["scaling"] for one in user.get("/v1/lora").json()["data"]} == {"a0": 1.0, "a1": 0.5}
    names = [one["id"] for one in user.get("/v1/models").json()["data"]]
    assert names == [llm.name, f"{llm.name}:a0", f"{llm.name}:a1"]
    assert user.get(f"/v1/models/{llm.name}:a1").json()["id"] == f"{llm.name}:a1"

    ask = {"prompt": "The old man went", "max_tokens": 12, "temperature": 0}
    texts = {name: user.post("/v1/completions", json={**ask, "model": name}).json()["choices"][0]["text"] for name in names}
    assert texts[names[0]] == llm.generate(ask["prompt"], max_tokens=12, temperature=0).text
    assert texts[names[2]] == llm.generate(ask["prompt"], max_tokens=12, temperature=0, lora={"a1": 0.5}).text
    assert len(set(texts.values())) == 3
    blend = user.post("/v1/completions", json={**ask, "lora": {"a0": 0.3, "a1": 0.2}}).json()["choices"][0]["text"]
    assert blend == llm.generate(ask["prompt"], max_tokens=12, temperature=0, lora={"a0": 0.3, "a1": 0.2}).text

    said = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}
    chats = [user.post("/v1/chat/completions", json={**said, "model": name}).json()["choices"][0]["message"]["content"] for name in names]
    anthropic = [user.post("/v1/messages", json={**said, "model": name}).json()["content"][0]["text"] for name in names]
    assert len(set(chats)) == 3 and chats == anthropic

    for body, status in (({"model": f"{llm.name}:zz"}, 404), ({"model": "x:a0"}, 404), ({"lora": "zz"}, 400), ({"lora": {"a0": 1e9}}, 400)):
        assert user.post("/v1/completions", json={**ask, **body}).status_code == status, body
    assert user.post("/v1/embeddings", json={"input": "x", "model": names[1]}).status_code == 400
    assert admin.post("/v1/lora/load", json={"loras": [{"name": "../a0"}]}).status_code == 400
    assert admin.post("/v1/lora/unload", json={"loras": ["zz"]}).status_code == 404
    assert admin.post("/v1/lora/unload", json={"loras": ["a0"]}).json() == {"unloaded": ["a0"]}
    assert admin.post("/v1/lora/unload").json() == {"unloaded": ["a1"]} and not llm.loras.list()


def test_without_a_folder(client):
    assert client.get("/v1/loras").json()["data"] == []
    assert client.post("/v1/lora/load", json={"loras": [{"name": "a"}]}).status_code == 400
