"""Rendering against Transformers, on templates of our own in the styles that models use."""

import json
import os
import time
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import exl2nb
from exl2nb.core.errors import OptionError, TokenizerError
from exl2nb.tokenizer.template import render
from exl2nb.tokenizer.tokenizer import Tokenizer

from .makers import byte_level, write

DEMO = Path(exl2nb.__file__).parent / "demo_model"
TALK = [
    {"role": "system", "content": "  Be brief.  "},
    {"role": "user", "content": "What is <b>2 + 2</b> & 'é'?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "and 3 + 3?\n"},
]
TEMPLATES = {
    "chatml": "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "instruct": """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {%- if loop.last and system is defined %}
            {{- '[INST] ' ~ system ~ '\n\n' ~ message.content ~ '[/INST]' }}
        {%- else %}
            {{- '[INST] ' ~ message.content ~ '[/INST]' }}
        {%- endif %}
    {%- else %}
        {{- ' ' ~ message.content | trim ~ eos_token }}
    {%- endif %}
{%- endfor %}""",
    "headers": """{%- macro header(role) %}<|start|>{{ role }}<|end|>

{% endmacro %}
{%- set ns = namespace(count=0, seen=[]) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {{- header(message.role) }}
    {%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}
    {{- '<|eot|>' }}
    {%- if ns.count > 5 %}{% break %}{% endif %}
{%- endfor %}
{%- if tools %}{{ '\n' }}{{ tools | tojson(indent=2) }}{{ messages[1].content | tojson }}{% endif %}
{%- if add_generation_prompt %}{{ header('assistant') }}{% endif %}""",
    "functions": """{%- for m in messages | selectattr('role', 'equalto', 'user') | list %}
{{ m.content.strip().split('?')[0] | upper }} {{ '%s|%d' | format(m.role, 7) }}
{{ 'a,b'.replace(',', ';') }} {{ '{}'.format(1) }} {{ ['x', 'y'] | join('-') }}
{{ m.items() | list | length }}
{{ {'b': 1, 'a': [1.5, none, true]} | tojson }} {{ 'x' * 3 }} {{ (3 * 2 ** 4 + 5) % 7 }} {{ m.missing is defined }} {{ loop.index }}
{% endfor %}{{ dict(a=1).a }}{{ range(4) | list }}{{ messages[0].content[:5] }}{{ enable_thinking | default('no') }}""",
}


def transformers_tokenizer(template):
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_same_as_transformers(name, generate):
    tools = [{"type": "function", "function": {"name": "add", "description": "a < b", "parameters": {"é": 1}}}]
    theirs = transformers_tokenizer(TEMPLATES[name]).apply_chat_template(TALK, tokenize=False, add_generation_prompt=generate, tools=tools)
    special = Tokenizer.load(DEMO).special_tokens
    assert render(TALK, TEMPLATES[name], special_tokens=special, add_generation_prompt=generate, tools=tools) == theirs
    assert len(theirs) > 40


def test_variables_and_date():
    assert render(TALK, TEMPLATES["functions"], enable_thinking="yes").endswith("yes")
    assert render(TALK, "{{ strftime_now('%Y') }}") == time.strftime("%Y")


def test_messages_stay_as_they_are():
    before = json.dumps(TALK)
    render(TALK, "{% for m in messages %}{{ m.pop }}{% endfor %}")
    with pytest.raises(TokenizerError):
        render(TALK, "{{ messages.append(1) }}")
    assert json.dumps(TALK) == before


@pytest.mark.parametrize("messages", [[], "hello", [{"content": "x"}], [{"role": 3}], ["x"], None, {"role": "user"}])
def test_messages_of_another_kind(messages):
    with pytest.raises(OptionError, match="list of dicts such as"):
        render(messages, "x")


def test_messages_must_be_plain_data():
    with pytest.raises(OptionError, match="plain data"):
        render([{"role": "user", "content": object()}], "{{ messages }}")


def test_refusal_of_the_template_is_named():
    with pytest.raises(TokenizerError, match="roles must alternate"):
        render([TALK[1], TALK[1]], TEMPLATES["instruct"], special_tokens={"bos_token": "", "eos_token": ""})
    with pytest.raises(TokenizerError, match="line 2.*not valid Jinja"):
        render(TALK, "\n{{ 1 + }}")
    deep = "".join(f"{{% for a{i} in [1] %}}" for i in range(30)) + "x" + "{% endfor %}" * 30
    with pytest.raises(TokenizerError, match="chat template: .*nest"):
        render(TALK, deep)


class TestFiles:
    def load(self, tmp_path, **files):
        return Tokenizer.load(write(tmp_path, byte_level(), **files))

    def test_missing(self, tmp_path):
        with pytest.raises(TokenizerError, match="has no chat template .* use generate"):
            self.load(tmp_path).templates.pick()

    def test_in_the_config(self, tmp_path):
        assert self.load(tmp_path, tokenizer_config={"chat_template": "A"}).templates.pick() == "A"

    def test_named(self, tmp_path):
        entries = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
        templates = self.load(tmp_path, tokenizer_config={"chat_template": entries}).templates
        assert (templates.pick(), templates.pick(tools=True), templates.pick(name="tool_use")) == ("A", "B", "B")
        with pytest.raises(TokenizerError, match="no chat template 'rag'; it has default, tool_use"):
            templates.pick(name="rag")

    def test_own_file_comes_first(self, tmp_path):
        (tmp_path / "chat_template.jinja").write_text("C")
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("D")
        templates = self.load(tmp_path, tokenizer_config={"chat_template": "A"}).templates
        assert (templates.pick(), templates.pick(name="rag")) == ("C", "D")

    def test_in_a_file_of_its_own(self, tmp_path):
        (tmp_path / "chat_template.json").write_text('{"chat_template": "E"}')
        assert self.load(tmp_path).templates.pick() == "E"

    def test_too_large(self, tmp_path):
        with pytest.raises(TokenizerError, match="characters"):
            self.load(tmp_path, tokenizer_config={"chat_template": "x" * (1 << 21)})


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/rag.jinja"])
def test_a_template_file_must_be_small(tmp_path, name):
    write(tmp_path, byte_level())
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("x" * (5 << 20))
    with pytest.raises(TokenizerError, match=r"more than \d+ bytes; expected at most"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "directory", "device"])
def test_a_template_must_be_a_regular_file(tmp_path, kind):
    """A pipe would block without a writer, /dev/zero would fill the memory."""
    write(tmp_path, byte_level())
    path = tmp_path / "additional_chat_templates" / "rag.jinja"
    path.parent.mkdir()
    {"pipe": os.mkfifo, "directory": os.mkdir, "device": lambda to: os.symlink("/dev/zero", to)}[kind](path)
    with pytest.raises(TokenizerError, match=r"expected a regular file|Is a directory"):
        Tokenizer.load(tmp_path)
