"""The part of `LLM` that holds conversations."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from exl2nb.core.errors import OptionError
from exl2nb.core.options import shown
from exl2nb.tokenizer import chat as chat_format
from exl2nb.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from exl2nb.llm.conversation import Conversation
    from exl2nb.llm.rendered import Rendered


_OURS = ("messages", "source", "special_tokens", "add_generation_prompt", "tools")  # given to every template


class Chatting:
    """Conversations, and a look at the prompts that they become."""

    tokenizer: Tokenizer

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]] | str,
        *,
        template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The text a conversation becomes, special tokens by name: look at it when a model answers oddly."""
        if not isinstance(template_options, (Mapping, type(None))):
            raise OptionError(f"template_options is {template_options!r}; expected a dict of the template's variables")
        if tools is not None and (not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools)):
            raise OptionError(f"tools is {str(tools)[:80]!r}; expected a list of JSON schemas of functions, as dicts")
        if wrong := [name for name in template_options or {} if not isinstance(name, str) or name in _OURS]:
            raise OptionError(f"template_options holds {shown(wrong[0])}; expected names of the template's own variables")
        talk = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        source = template if template is not None else self.tokenizer.templates.pick(tools=bool(tools))
        return chat_format.render(
            talk,
            source,
            special_tokens=self.tokenizer.special_tokens,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            **(template_options or {}),
        )

    def render(self, messages: Sequence[Mapping[str, Any]] | str, **options: Any) -> Rendered:
        """The prompt a conversation becomes, token by token, with special tokens marked and a warning where something looks wrong.

        A doubled BOS, one that is missing, and special tokens inside messages are such things.

        Args:
            messages: dicts with "role" and "content", or one text from the user.
            options: template, tools, template_options, add_generation_prompt: as for `render_chat`.

        Raises:
            TokenizerError: the model has no chat template, or the template refuses the messages.

        Example:
            >>> import exl2nb as ex
            >>> with ex.demo(progress=None) as llm:
            ...     shown = llm.render("Hello", template="{{ bos_token }}{{ bos_token }}{{ messages[0].content }}")
            ...     shown.ids[:2], shown.warnings[0][:15]
            ([1, 1], 'BOS is doubled:')
        """
        from exl2nb.llm.rendered import rendered

        talk = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        return rendered(self.render_chat(talk, **options), self.tokenizer, talk)

    def conversation(self, *, system: str | None = None, **options: Any) -> Conversation:
        """A conversation with this model: a tree of turns with `say`, `edit`, `regenerate`, `goto`, `save`.

        Args:
            system: what the model is told first.
            options: of every answer: those of `chat`.

        Raises:
            OptionError: an option that `chat` does not have, or a value out of range.
        """
        from exl2nb.llm.conversation import Conversation

        return Conversation(self, system=system, **options)  # pyright: ignore[reportArgumentType]

    def load_conversation(self, path: str | os.PathLike[str]) -> Conversation:
        """Go on with a conversation that `Conversation.save` wrote.

        Raises:
            ConfigError: the file is no conversation, or is damaged.
        """
        from exl2nb.llm.conversation import Conversation

        return Conversation.load(self, path)  # pyright: ignore[reportArgumentType]
