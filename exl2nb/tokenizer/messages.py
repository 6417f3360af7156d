"""Messages as people and clients write them, in the shape that one chat template reads. Nothing that they say is lost on the way."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from exl2nb.core.errors import OptionError
from exl2nb.core.options import shown
from exl2nb.tokenizer.literal import protect
from exl2nb.tokenizer.template import TOOL_VARIABLES, ChatTemplate, check_messages
from exl2nb.tokenizer.tools import Tool, ToolFormat, described, taught

MESSAGE_ROLES = ("system", "developer", "user", "assistant", "tool")
_ROLE_PATTERN = re.compile(r"[A-Za-z0-9_. -]{1,64}")
_PLAIN_TYPES = ("text", "input_text", "output_text")


@dataclass(frozen=True, kw_only=True)
class Shaped:
    """A conversation as a template reads it.

    Attributes:
        messages: The messages; contents are texts.
        variables: What the template is told beside them, such as the functions.
        told: How the model learns of the functions: "template", "words" (described in a message), or "" where there are none.
    """

    messages: list[dict[str, Any]]
    variables: dict[str, Any]
    told: str = ""


def shape_messages(
    messages: Sequence[Mapping[str, Any]],
    template: ChatTemplate,
    form: ToolFormat,
    tools: Sequence[Tool] = (),
    *,
    control: re.Pattern[str] | None = None,
    special: re.Pattern[str] | None = None,
) -> Shaped:
    """Make messages into what the template reads.

    - A content that is a list of parts becomes a text; the parts are joined by line breaks.
    - The role "function" is read as "tool". "developer" becomes "system" unless the template knows it.
    - A system message is put before the first message of the user if the template would leave it out.
    - Ids and names that tool results lack are taken from the calls that they answer.
    - Functions, calls and results are written out in words if the template would leave them out.
    - Texts of control tokens in the messages of users and tools, and in the arguments of calls, are marked, so that they stay text (see
      `literal`). In other messages of the assistant only special tokens are, since templates look for tags such as "</think>" there.

    Args:
        messages: The conversation.
        template: The template that will render it.
        form: How the model writes calls.
        tools: The functions that the model may call.
        control: Matches the texts of control tokens.
        special: Matches the texts of special tokens.

    Raises:
        OptionError: A message without content, of a role that the template does not know, or with a part that is no text.
    """
    check_messages(messages)
    plain = [_plain(message, number, template) for number, message in enumerate(messages)]
    made = _with_names([_protected(message, control, special) for message in plain], form)
    if any(message.get("tool_calls") for message in made):
        made = (
            _calls_in_words(made, form) if template.calls is None else [one for message in made for one in _for_template(message, template)]
        )
    if any(message["role"] == "tool" for message in made) and not template.results:
        made = _results_in_words(made)
    variables: dict[str, Any] = {}
    told, words = "", ""
    if tools:
        told = "template" if template.tools is not None else "words"
        if template.tools in TOOL_VARIABLES:
            variables[template.tools] = [tool.json for tool in tools]
        if template.tools is None:
            words = described(tools, form)
        elif not form.taught:
            words = taught(form)
    if words:
        made = _with_instructions(made, words)
    if tools and template.tools == "system":
        made = _with_instructions(made, "")
        made[0]["tools"] = json.dumps([tool.json["function"] for tool in tools], ensure_ascii=False)
    return Shaped(messages=_with_system(made, template), variables=variables, told=told)


def typed_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with every text as a list of one part, for templates that read nothing else."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]} if isinstance(message.get("content"), str) else dict(message)
        for message in messages
    ]


def _protected(message: dict[str, Any], control: re.Pattern[str] | None, special: re.Pattern[str] | None) -> dict[str, Any]:
    """A message in which no text acts as a control token that its role must not write."""
    role = message["role"]
    if role in ("system", "developer"):  # the author of a program may write control tokens
        return message
    pattern = special if role == "assistant" else control
    made = {key: value if key in ("role", "tool_calls") else protect(value, pattern) for key, value in message.items()}
    if "tool_calls" in made:
        made["tool_calls"] = protect(made["tool_calls"], control)  # the model may have copied them from a user
    return made


def _plain(message: Mapping[str, Any], number: int, template: ChatTemplate) -> dict[str, Any]:
    """One message whose content is a text and whose role the template knows."""
    made = dict(message)
    role = made["role"] = _role(message["role"], number, template)
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        content = "\n".join([_part(part, number, role) for part in content])
    elif content is None and role == "assistant" and any(message.get(key) for key in ("tool_calls", "reasoning_content", "thinking")):
        content = ""
    elif content is None or not isinstance(content, str):
        hint = (
            "a message of the assistant may leave it out only beside tool_calls"
            if role == "assistant"
            else "give a text or a list of parts"
        )
        raise OptionError(f"message {number} ({role}) has the content {shown(content)}; {hint}")
    made["content"] = content
    if calls := message.get("tool_calls"):
        if not isinstance(calls, (list, tuple)):
            raise OptionError(f"message {number}: tool_calls is {shown(calls)}; expected a list of calls")
        made["tool_calls"] = [_call(call, number) for call in calls]
    else:
        made.pop("tool_calls", None)
    return made


def _role(role: str, number: int, template: ChatTemplate) -> str:
    if not _ROLE_PATTERN.fullmatch(role):
        raise OptionError(f"message {number} has the role {shown(role)}; expected one of {', '.join(MESSAGE_ROLES)}")
    if role == "function":
        return "tool"
    if role == "developer" and not template.takes_role("developer"):
        return "system"
    if role not in MESSAGE_ROLES and not template.takes_role(role):
        raise OptionError(
            f"message {number} has the role {role[:40]!r}, which this model's chat template leaves out; "
            f"expected one of {', '.join(MESSAGE_ROLES)}"
        )
    return role


def _part(part: Any, number: int, role: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if (kind in _PLAIN_TYPES or (kind is None and isinstance(part, Mapping) and set(part) == {"text"})) and isinstance(
        part.get("text"), str
    ):
        return part["text"]
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return part["refusal"]
    raise OptionError(
        f"message {number} ({role}) holds a part of type {str(kind)[:40]!r}; this model reads text alone: leave the part out, or say in "
        "words what it shows"
    )


def _call(call: Any, number: int) -> dict[str, Any]:
    """A call with its arguments as data."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise OptionError(
            f"message {number}: tool_calls holds {str(call)[:60]!r}; expected objects with 'function', 'name' and 'arguments'"
        )
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise OptionError(f"message {number}: arguments of {function['name']!r} are no JSON: {str(error)[:100]}") from None
    return {"type": "function", **call, "function": {**function, "arguments": {} if arguments is None else arguments}}


def _with_names(messages: list[dict[str, Any]], form: ToolFormat) -> list[dict[str, Any]]:
    """The messages with an id for every call, and with the name and the id of its call for every result."""
    names: dict[str, str] = {}
    ids: dict[str, str] = {}  # as given, to those that the family writes
    waiting: list[str] = []
    count = 0
    for message in messages:
        if calls := message.get("tool_calls"):
            waiting = []
            for call in calls:
                name, given = call["function"]["name"], call.get("id")
                given = given if isinstance(given, str) and given else f"call_{count}"
                call["id"] = form.id_text.format(name=name, index=count) if form.id_text else _short_id(given, form)
                ids[given] = call["id"]
                count += 1
                names[call["id"]] = name
                waiting.append(call["id"])
        elif message["role"] == "tool":
            given = message.get("tool_call_id")
            found = ids.get(given, _short_id(given, form)) if isinstance(given, str) and given else None
            if found is None:
                name = message.get("name")
                found = next((one for one in waiting if names[one] == name), waiting[0] if waiting and not name else None)
            if found is not None:
                message["tool_call_id"] = found
                waiting = [one for one in waiting if one != found]
            name = message.get("name") or names.get(found or "")
            if name:
                message["name"] = name
    return messages


def _short_id(given: str, form: ToolFormat) -> str:
    """An id as the family of the model writes it: Mistral's templates refuse any that has not nine letters and digits."""
    if form.id_length >= 20 or re.fullmatch(rf"[A-Za-z0-9]{{{form.id_length}}}", given):
        return given
    return hashlib.sha256(given.encode("utf-8", "replace")).hexdigest()[: form.id_length]


def _for_template(message: dict[str, Any], template: ChatTemplate) -> list[dict[str, Any]]:
    """A message with calls in the form that the template renders; two where it renders a content and calls only apart."""
    calls = message.get("tool_calls")
    if not calls:
        return [message]
    if template.calls == "text":
        for call in calls:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    if template.call_content is not None:
        return [message]
    alone = {**message, "content": None}
    if not message["content"]:
        return [alone]
    return [{key: value for key, value in message.items() if key != "tool_calls"}, alone]


def _calls_in_words(messages: Sequence[dict[str, Any]], form: ToolFormat) -> list[dict[str, Any]]:
    """The conversation with calls written out as text, for a template that would leave them out."""
    made: list[dict[str, Any]] = []
    for message in messages:
        if calls := message.get("tool_calls"):
            written = form.written([(call["function"]["name"], _json(call["function"]["arguments"])) for call in calls])
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            message = {**rest, "content": "\n".join(part for part in (message["content"], written) if part)}
        made.append(message)
    return made


def _results_in_words(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with results as words of the user, for a template that would leave them out."""
    return _joined(
        [
            {"role": "user", "content": f"Result of {message.get('name') or 'the function'}:\n{message['content']}"}
            if message["role"] == "tool"
            else message
            for message in messages
        ]
    )


def _joined(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with those of the user that follow each other as one: many templates insist that roles alternate."""
    made: list[dict[str, Any]] = []
    for message in messages:
        if made and message["role"] == "user" == made[-1]["role"]:
            made[-1] = {**made[-1], "content": f"{made[-1]['content']}\n\n{message['content']}"}
        else:
            made.append(message)
    return made


def _with_instructions(messages: Sequence[dict[str, Any]], words: str) -> list[dict[str, Any]]:
    """The messages with `words` in the system message, which is made if there is none."""
    if messages[0]["role"] in ("system", "developer"):
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{words}".strip()}
        return [first, *messages[1:]]
    return [{"role": "system", "content": words}, *messages]


def _with_system(messages: list[dict[str, Any]], template: ChatTemplate) -> list[dict[str, Any]]:
    """The messages with what the system says put before the user's words, if the template would leave a system message out."""
    if not any(message["role"] == "system" for message in messages) or template.system:
        return messages
    said = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
    rest = [message for message in messages if message["role"] != "system"]
    at = next((place for place, message in enumerate(rest) if message["role"] == "user"), None)
    if at is None:
        return [{"role": "user", "content": said}, *rest]
    rest[at] = {**rest[at], "content": f"{said}\n\n{rest[at]['content']}"}
    return rest


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
