"""Chat templates: those of a model or by name, rendered in the helper process, and what a template does with messages.

A chat template is a program, and its source is the only statement of what it supports. Templates that do not support something rarely
say so: functions, system messages or the words of a user simply do not reach the prompt. So each property here is the answer to one
question: does this text appear in the prompt?
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from exl2nb.core.errors import OptionError, TokenizerError
from exl2nb.core.files import read_object, read_text
from exl2nb.core.helper import Helper, HelperError, Limits
from exl2nb.tokenizer.reply import ReplyFormat
from exl2nb.tokenizer.tools import FORMATS, ToolFormat, tool_format


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


_MISTRAL_TEMPLATE = """{{ bos_token or '' }}{% set ns = namespace(system='') %}{% for message in messages %}
{%- if message.role == 'system' %}{% set ns.system = message.content ~ '\n\n' %}
{%- elif message.role == 'assistant' %}{{ ' ' ~ message.content ~ (eos_token or '') }}
{%- else %}{{ '[INST] ' ~ ns.system ~ message.content ~ ' [/INST]' }}{% set ns.system = '' %}{% endif %}{% endfor %}"""
_LLAMA2_TEMPLATE = """{% set ns = namespace(system='') %}{% for message in messages %}
{%- if message.role == 'system' %}{% set ns.system = '<<SYS>>\n' ~ message.content ~ '\n<</SYS>>\n\n' %}
{%- elif message.role == 'assistant' %}{{ ' ' ~ message.content ~ ' ' ~ (eos_token or '') }}
{%- else %}{{ (bos_token or '') ~ '[INST] ' ~ ns.system ~ message.content ~ ' [/INST]' }}{% set ns.system = '' %}{% endif %}{% endfor %}"""
INSTRUCT_TEMPLATES: dict[str, Instruct] = {
    "chatml": Instruct(
        "{% if bos_token and bos_token != '<|im_start|>' %}{{ bos_token }}{% endif %}{% for message in messages %}"
        "{{ '<|im_start|>' ~ message.role ~ '\n' ~ message.content }}"
        "{% if not loop.last or message.role != 'assistant' or add_generation_prompt %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        ("<|im_end|>", "<|im_start|>"),
    ),
    "llama2": Instruct(_LLAMA2_TEMPLATE, ("[INST]",)),
    "mistral": Instruct(_MISTRAL_TEMPLATE, ("[INST]",)),
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
SANDBOX_LIMITS = Limits(cpu_s=2.0, wall_s=30.0, memory_bytes=384 << 20)
TEMPLATE_HELPER = Helper("exl2nb.tokenizer.sandbox", SANDBOX_LIMITS)


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
                f"chat template: {str(error) or f'it needs more than {SANDBOX_LIMITS.memory_bytes >> 20} MiB'}; give another with template="
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


_PROBE_WORDS = "probe_words"
_PROBE_FUNCTION = "probe_function"
_PROBE_CALLED = "probe_called"
_PROBE_RESULT = "probe_result"
_PROBE_ARGUMENT = "probe_argument"
_PROBE_SAID = "probe_said"
_PROBE_IDS = ("abcdefghi", "functions.probe_id:3")  # nine letters, which Mistral's templates insist on; the form of Kimi's
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": _PROBE_FUNCTION,
        "description": "d",
        "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "d"}}, "required": ["x"]},
    },
}
_PROBE_MESSAGE = {"role": "user", "content": "a"}
TOOL_VARIABLES = ("tools", "xml_tools")  # names under which templates expect the functions


class ChatTemplate:
    """A chat template of one model.

    Args:
        source: Its Jinja source.
        special_tokens: Texts of bos_token, eos_token and so on, which templates use by these names.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source, self.special_tokens = source, dict(special_tokens)

    @classmethod
    def of(cls, source: str, special_tokens: Mapping[str, str]) -> ChatTemplate:
        """The template of a source. Its properties are found out once, so equal arguments give the same object."""
        return _cached(source, tuple(sorted(special_tokens.items())))

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """Render a conversation; arguments and errors as for `chat.render`."""
        return render(messages, self.source, special_tokens=self.special_tokens, add_generation_prompt=add_generation_prompt, **variables)

    @cached_property
    def tools(self) -> str | None:
        """How the template is told about functions: the name of a variable, "system" (JSON text in the system message's key `tools`).

        None: functions never reach the prompt.
        """
        for name in TOOL_VARIABLES:
            if name in self.source and _PROBE_FUNCTION in self._try([_PROBE_MESSAGE], **{name: [_PROBE_TOOL]}):
                return name
        if "tools" in self.source and _PROBE_FUNCTION in self._try(
            [{"role": "system", "content": "s", "tools": _PROBE_FUNCTION}, _PROBE_MESSAGE]
        ):
            return "system"
        return None

    @cached_property
    def calls(self) -> Literal["data", "text"] | None:
        """How earlier calls are rendered: with arguments given as data or as JSON text; None = they are not."""
        return self._call_form[0]

    @cached_property
    def call_content(self) -> str | None:
        """The content that a message with calls must have so that they are rendered: an empty text, or None (DeepSeek V3)."""
        return self._call_form[1]

    @cached_property
    def results(self) -> bool:
        """Whether results of functions are rendered."""
        content = self.call_content if self.calls is not None else ""
        return any(_PROBE_RESULT in self._with_call(self.calls or "data", content, one, result=True) for one in _PROBE_IDS)

    @cached_property
    def form(self) -> ToolFormat:
        """How the model writes calls. "json", described to the model, where the calls of the template are in a form that we cannot read."""
        form = tool_format(self.source)
        if self.calls is None:
            return form
        for one in _PROBE_IDS:
            for result in (True, False):
                text = self._with_call(self.calls, self.call_content, one, result=result)
                text = text[text.rfind(_PROBE_SAID) + len(_PROBE_SAID) :]
                if _reads(form, text) or _reads(form, " ".join(text.split())):  # Command R's template breaks lines where the model does not
                    return form
        return FORMATS["json"]

    @cached_property
    def _call_form(self) -> tuple[Literal["data", "text"] | None, str | None]:
        if "tool" not in self.source:
            return None, ""
        kinds: tuple[Literal["data", "text"], ...] = ("data", "text")
        for result in (True, False):  # some templates want a result behind each call
            for content in ("", None):
                for kind in kinds:
                    for one in _PROBE_IDS:
                        text = self._with_call(kind, content, one, result=result)
                        as_repr = f"'{_PROBE_ARGUMENT}'" in text  # a Python dict where JSON is expected
                        if _PROBE_CALLED in text and _PROBE_ARGUMENT in text and not as_repr:
                            return kind, content
        return None, ""

    @cached_property
    def system(self) -> bool:
        """Whether a system message is rendered."""
        return _PROBE_WORDS in self._try(
            [{"role": "system", "content": self._content(_PROBE_WORDS)}, {**_PROBE_MESSAGE, "content": self._content("a")}]
        )

    @cached_property
    def typed(self) -> bool:
        """Whether contents must be lists of parts: with a plain text, the words of a user do not reach the prompt."""
        if _PROBE_WORDS in self._try([{"role": "user", "content": _PROBE_WORDS}]):
            return False
        return _PROBE_WORDS in self._try([{"role": "user", "content": [{"type": "text", "text": _PROBE_WORDS}]}])

    @cached_property
    def turn_end(self) -> str:
        """The text between the words of the assistant and the next turn, or the end of the prompt if there is none."""
        answer = {"role": "assistant", "content": self._content(_PROBE_WORDS)}
        user = {**_PROBE_MESSAGE, "content": self._content(_PROBE_SAID)}
        end = self._try([user, answer], add_generation_prompt=False).partition(_PROBE_WORDS)[2]
        if end.strip():
            return end
        opener, _, rest = self._try([user, answer, {**user, "content": self._content("probe_next")}]).partition(_PROBE_SAID)
        between = rest.partition(_PROBE_WORDS)[2].partition("probe_next")[0]
        while opener and between and opener[-1] == between[-1]:  # what begins the user's next turn does not end this one
            opener, between = opener[:-1], between[:-1]
        return between

    def takes_role(self, role: str) -> bool:
        """Whether the content of messages with this role reaches the prompt."""
        return self._takes_role(role)

    @cached_property
    def _takes_role(self) -> Any:
        @lru_cache(maxsize=64)
        def takes(role: str) -> bool:
            user, words = {**_PROBE_MESSAGE, "content": self._content("a")}, {"role": role, "content": self._content(_PROBE_WORDS)}
            answer = {"role": "assistant", "content": self._content("b")}
            return any(_PROBE_WORDS in self._try(talk) for talk in ([words, user], [user, answer, words], [user, words]))

        return takes

    def _content(self, text: str) -> Any:
        return [{"type": "text", "text": text}] if self.typed else text

    def _with_call(self, kind: Literal["data", "text"], content: str | None, call_id: str, *, result: bool) -> str:
        """The prompt of a conversation with one call, and its result."""
        arguments: Any = {_PROBE_ARGUMENT: "v"} if kind == "data" else f'{{"{_PROBE_ARGUMENT}": "v"}}'
        call = {"id": call_id, "type": "function", "function": {"name": _PROBE_CALLED, "arguments": arguments}}
        talk = [{**_PROBE_MESSAGE, "content": self._content(_PROBE_SAID)}, {"role": "assistant", "content": content, "tool_calls": [call]}]
        if result:
            talk.append({"role": "tool", "name": _PROBE_CALLED, "tool_call_id": call_id, "content": self._content(_PROBE_RESULT)})
        variables = {self.tools: [_PROBE_TOOL]} if self.tools in TOOL_VARIABLES else {}
        return self._try(talk, **variables)

    def _try(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt of a small conversation; "" where the template refuses it.

        Raises:
            TokenizerError: The template was stopped because it takes too long or too much memory.
        """
        for more in ({}, {"tools": [_PROBE_TOOL]}):  # some templates are for conversations with functions only
            try:
                return self.render(messages, **{**more, **variables})
            except TokenizerError as error:
                if isinstance(error.__cause__, HelperError) and error.__cause__.kind in ("Killed", "MemoryError"):
                    raise
            if "tools" not in self.source or "tools" in variables:
                break
        return ""


def _reads(form: ToolFormat, text: str) -> bool:
    """Whether a format finds the call of the probe in what the template wrote for it."""
    begin = 0
    if form.layout != "harmony":
        found = next((match for match in form.head_pattern.finditer(text) if match[1] == _PROBE_CALLED), None)
        if found is None:
            return False
        begin = found.start()
    reply = ReplyFormat(calls=form, channels=form.layout == "harmony").read_text(text[begin:])
    return any((call.name, call.arguments_or_none) == (_PROBE_CALLED, {_PROBE_ARGUMENT: "v"}) for call in reply.tool_calls)


@lru_cache(maxsize=64)
def _cached(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(special_tokens))
