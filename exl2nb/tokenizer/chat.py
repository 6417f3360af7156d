"""Messages to the text a chat model was trained on, by the template that came with the model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from exl2nb.core.errors import OptionError, TokenizerError
from exl2nb.core.helper import Helper, HelperError, Limits
from exl2nb.tokenizer.files import read_object, read_text
from exl2nb.tokenizer.tools import Tool, ToolFormat, described

MAX_TEMPLATE = 1 << 20  # characters
# a conversation of 1000 messages takes 0.02 s; a large template takes 0.05 s to compile
LIMITS = Limits(cpu_s=2.0, wall_s=30.0, memory_bytes=384 << 20)
_HELPER = Helper("exl2nb.tokenizer.sandbox", LIMITS)


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
            _HELPER.start()

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
        return _HELPER.ask({"template": template, "variables": {**(special_tokens or {}), **given}})["text"]
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
        raise TokenizerError(f"chat template: {error.kind}: {str(error)[:300]}; check roles and order of the messages") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(
            f"messages and template variables hold something that is not plain data ({error}); expected JSON types"
        ) from error


def text_messages(messages: Sequence[Mapping[str, Any]], *, parse_arguments: bool = True) -> list[dict[str, Any]]:
    """Messages whose contents are texts: the text parts of a content are joined by line breaks.

    Args:
        parse_arguments: give templates the arguments of earlier tool calls as data, which is what most of them expect; False: as JSON text.

    Raises:
        OptionError: messages that are no messages, or a part that is no text, such as an image: names the message and the part.
    """
    check_messages(messages)
    made: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        message = dict(message)
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            message["content"] = "\n".join([_part(part, number, message["role"]) for part in content])
        elif content is None:
            message["content"] = ""
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [_call(call, number, parse_arguments) for call in calls]
        made.append(message)
    return made


def _part(part: Any, number: int, role: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
        return part["text"]
    raise OptionError(
        f"message {number} ({role}) holds a part of type {str(kind)[:40]!r}; this model reads text alone: leave the part out, or say in "
        "words what it shows"
    )


def _call(call: Any, number: int, parse: bool) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise OptionError(
            f"message {number}: tool_calls holds {str(call)[:60]!r}; expected objects with 'function', 'name' and 'arguments'"
        )
    arguments = function.get("arguments", {})
    if parse and isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise OptionError(f"message {number}: arguments of {function['name']!r} are no JSON: {str(error)[:100]}") from None
    elif not parse and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def without_tool_turns(
    messages: Sequence[Mapping[str, Any]], form: ToolFormat, tools: Sequence[Tool], *, system: bool
) -> list[dict[str, Any]]:
    """The same conversation for a template that knows no tools: functions are described, calls and results written out as text.

    Args:
        system: the template takes a system message; otherwise the description stands before the first message.
    """
    made: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            name = message.get("name") or "the function"
            made.append({"role": "user", "content": f"Result of {name}:\n{message.get('content') or ''}"})
        elif calls := message.get("tool_calls"):
            written = form.between.join(
                form.before + call["function"]["name"] + form.middle + _json(call["function"]["arguments"]) + form.after for call in calls
            )
            content = "\n".join(part for part in (message.get("content"), form.opens + written + form.closes) if part)
            made.append({"role": "assistant", "content": content})
        else:
            made.append(dict(message))
    text = described(tools, form) if tools else ""
    if text and made and made[0]["role"] == "system":
        made[0]["content"] = f"{made[0].get('content') or ''}\n\n{text}".strip()
    elif text and system:
        made.insert(0, {"role": "system", "content": text})
    elif text:
        made[0]["content"] = f"{text}\n\n{made[0].get('content') or ''}".strip()
    return made


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise OptionError unless this is a non-empty list of dicts with a role."""
    fine = isinstance(messages, (list, tuple)) and bool(messages)
    if not fine or not all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in messages):
        raise OptionError(f"messages is {str(messages)[:80]!r}; expected a list of dicts such as {{'role': 'user', 'content': 'Hello'}}")
