"""Chat templates: those that come with a model, instruct formats by name for models without one, and rendering in the helper process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from exl2nb.core.errors import OptionError, TokenizerError
from exl2nb.core.helper import Helper, HelperError, Limits
from exl2nb.tokenizer.files import read_object, read_text


class Instruct(NamedTuple):
    """One format. source: its Jinja template. stop: texts that begin the next turn, which a model may write itself."""

    source: str
    stop: tuple[str, ...] = ()


def _turns(system: str, user: str, assistant: str, prompt: str) -> str:
    """A template whose roles stand in front of each message; `tool` results are shown as the user's."""
    return (
        "{{ bos_token or '' }}{% for message in messages %}"
        f"{{% if message.role == 'system' %}}{system}"
        f"{{% elif message.role == 'assistant' %}}{assistant}"
        f"{{% else %}}{user}{{% endif %}}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{prompt}{{% endif %}}"
    )


_MISTRAL = """{{ bos_token or '' }}{% set ns = namespace(system='') %}{% for message in messages %}
{%- if message.role == 'system' %}{% set ns.system = message.content ~ '\n\n' %}
{%- elif message.role == 'assistant' %}{{ ' ' ~ message.content ~ (eos_token or '') }}
{%- else %}{{ '[INST] ' ~ ns.system ~ message.content ~ ' [/INST]' }}{% set ns.system = '' %}{% endif %}{% endfor %}"""
_LLAMA2 = """{% set ns = namespace(system='') %}{% for message in messages %}
{%- if message.role == 'system' %}{% set ns.system = '<<SYS>>\n' ~ message.content ~ '\n<</SYS>>\n\n' %}
{%- elif message.role == 'assistant' %}{{ ' ' ~ message.content ~ ' ' ~ (eos_token or '') }}
{%- else %}{{ (bos_token or '') ~ '[INST] ' ~ ns.system ~ message.content ~ ' [/INST]' }}{% set ns.system = '' %}{% endif %}{% endfor %}"""
INSTRUCT: dict[str, Instruct] = {
    "chatml": Instruct(
        "{% if bos_token and bos_token != '<|im_start|>' %}{{ bos_token }}{% endif %}{% for message in messages %}"
        "{{ '<|im_start|>' ~ message.role ~ '\n' ~ message.content }}"
        "{% if not loop.last or message.role != 'assistant' or add_generation_prompt %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        ("<|im_end|>", "<|im_start|>"),
    ),
    "llama2": Instruct(_LLAMA2, ("[INST]",)),
    "mistral": Instruct(_MISTRAL, ("[INST]",)),
    "alpaca": Instruct(
        _turns(
            "{{ message.content ~ '\n\n' }}",
            "{{ '### Instruction:\n' ~ message.content ~ '\n\n' }}",
            "{{ '### Response:\n' ~ message.content ~ '\n\n' }}",
            "{{ '### Response:\n' }}",
        ),
        ("### Instruction:",),
    ),
    "vicuna": Instruct(
        _turns(
            "{{ message.content ~ '\n\n' }}",
            "{{ 'USER: ' ~ message.content ~ '\n' }}",
            "{{ 'ASSISTANT: ' ~ message.content ~ (eos_token or '') ~ '\n' }}",
            "{{ 'ASSISTANT:' }}",
        ),
        ("USER:",),
    ),
}


MAX_TEMPLATE = 1 << 20  # characters
# a conversation of 1000 messages takes 0.02 s; a large template takes 0.05 s to compile
LIMITS = Limits(cpu_s=2.0, wall_s=30.0, memory_bytes=384 << 20)
TEMPLATE_HELPER = Helper("exl2nb.tokenizer.sandbox", LIMITS)


class ChatTemplates:
    """The named templates of one model; most have one, "default".

    Args:
        templates: Jinja sources by name.
        directory: named in messages.
    """

    def __init__(self, templates: Mapping[str, str], directory: Path) -> None:
        self.templates, self._directory = dict(templates), directory

    @classmethod
    def load(cls, directory: Path, tokenizer_config: Mapping[str, Any]) -> ChatTemplates:
        """Collect chat_template.jinja, additional_chat_templates/*.jinja, chat_template.json or the tokenizer config's entry.

        Raises:
            TokenizerError: an entry that is neither a text nor a list of named texts.
        """
        found: dict[str, str] = {}
        single = directory / "chat_template.jinja"
        entry = tokenizer_config.get("chat_template") or read_object(directory / "chat_template.json").get("chat_template")
        if single.is_file():
            found["default"] = read_text(single, 4 * MAX_TEMPLATE)
        elif isinstance(entry, str):
            found["default"] = entry
        elif isinstance(entry, list) and all(isinstance(e, dict) and isinstance(e.get("name"), str) for e in entry):
            found.update({e["name"]: e.get("template") for e in entry})
        elif entry is not None:
            raise TokenizerError(f"{directory}: chat_template is a {type(entry).__name__}; expected a text or a list of named texts")
        for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
            found.setdefault(path.stem, read_text(path, 4 * MAX_TEMPLATE))
        for name, text in found.items():
            if not isinstance(text, str) or len(text) > MAX_TEMPLATE:
                raise TokenizerError(f"{directory}: chat template {name!r} is not a text of at most {MAX_TEMPLATE} characters")
        return cls(found, directory)

    def prepare(self) -> None:
        """Start the process that renders templates, where there is one to render: the first prompt comes sooner."""
        if self.templates:
            TEMPLATE_HELPER.start()

    def pick(self, *, name: str | None = None, tools: bool = False) -> str:
        """The source of a template: by name, or "tool_use" where tools are given and it exists, or "default".

        Raises:
            TokenizerError: the model has no such template; says what to do.
        """
        if not self.templates:
            raise TokenizerError(
                f"{self._directory}: the model has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json); "
                "use generate() with plain text, or give template="
            )
        wanted = name or ("tool_use" if tools and "tool_use" in self.templates else "default")
        if wanted not in self.templates:
            raise TokenizerError(f"{self._directory}: no chat template {wanted!r}; it has {', '.join(sorted(self.templates))}")
        return self.templates[wanted]


def render(
    messages: Sequence[Mapping[str, Any]],
    template: str,
    *,
    special_tokens: Mapping[str, str] | None = None,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """Render a conversation.

    Args:
        messages: dicts with "role" and "content", as plain JSON data.
        template: Jinja source.
        special_tokens: texts of bos_token, eos_token and so on, which templates use by these names.
        add_generation_prompt: end with the words that make the model answer.
        tools: JSON schemas of functions, for templates that know them.
        variables: anything else the template reads (`enable_thinking=False`).

    Returns:
        The prompt. It holds BOS already where the template writes it: encode it with `add_special=False`.

    Raises:
        OptionError: messages that are not plain data.
        TokenizerError: the template is broken, refuses the messages, or was stopped by the sandbox.
    """
    check_messages(messages)
    if not isinstance(template, str):
        raise OptionError(f"template is {str(template)[:80]!r}; expected a text, the template's Jinja source")
    given = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt, **variables}
    try:
        return TEMPLATE_HELPER.ask({"template": template, "variables": {**(special_tokens or {}), **given}})["text"]
    except HelperError as error:
        if error.kind == "TemplateSyntaxError":
            raise TokenizerError(f"chat template, line {error.line}: {error}; it is not valid Jinja") from error
        if error.kind in ("SyntaxError", "IndentationError"):  # of the Python that Jinja makes of it
            raise TokenizerError(f"chat template: {error}; its blocks are nested too deeply, or it is not valid Jinja") from error
        if error.kind == "Killed":
            raise TokenizerError(f"chat template: {error}; it is broken or means harm: give another with template=") from error
        if error.kind == "MemoryError":
            raise TokenizerError(
                f"chat template: {str(error) or f'it needs more than {LIMITS.memory_bytes >> 20} MiB'}; give another with template="
            ) from error
        raise TokenizerError(f"chat template: {error.kind}: {str(error)[:300]}{_hint(str(error))}") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(
            f"messages and template variables hold something that is not plain data ({error}); expected JSON types"
        ) from error


def _hint(message: str) -> str:
    """What to do about an error that a template raised itself, as far as its words tell."""
    words = message.lower()
    if "alternate" in words or "role" in words or "order" in words:
        return "; check roles and order of the messages"
    return "; the template refuses these messages: change what it names, or give another template"


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise OptionError unless this is a non-empty list of dicts with a role."""
    fine = isinstance(messages, (list, tuple)) and bool(messages)
    if not fine or not all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in messages):
        raise OptionError(f"messages is {str(messages)[:80]!r}; expected a list of dicts such as {{'role': 'user', 'content': 'Hello'}}")
