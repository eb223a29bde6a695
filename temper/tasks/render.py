"""Messages to token ids and back, through the tokenizer's own chat template.

Owns: what the model sees. Refuses: encoding again what the policy drew; the next prompt is the drawn ids and new ones.
Text that is not the template's own is never encoded to control tokens (markers.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from temper.errors import UserError
from temper.markers import markers_of
from temper.types import Message, Task

Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of what an environment lets the policy call."""

PROMPTS_KEPT = 256
"""Rendered prompts whose ids are remembered."""
TEXTS_KEPT = 4
"""Any texts whose ids are remembered."""
# A template that edits what assistants said, e.g. drops their reasoning, shows it on this text.
PROBE = "<think>\nprobe one\n</think>\n\nprobe two"


class ToolsUnseen(UserError):
    """The chat template writes the same with tools and without them."""


@dataclass(slots=True)
class SpokenRow:
    """Ids of a conversation with those marked that an assistant said."""

    text: str
    """What the ids were made of."""
    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)

    def add(self, ids: Sequence[int], *, is_trained: bool) -> None:
        self.token_ids += ids
        self.loss_mask += [int(is_trained)] * len(ids)


def decode_ids(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text, special tokens left out."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:  # what transformers ends up with, after a look at every single id
        return str(backend.decode(list(ids), skip_special_tokens=True))
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


class Renderer:
    """One tokenizer with the recipe's system message and prompt template."""

    def __init__(
        self,
        tokenizer: Any,
        system: str = "",
        template: str = "{prompt}",
        eos_ids: Sequence[int] = (),
        by_source: Mapping[str, tuple[str, str]] | None = None,
    ) -> None:
        """`by_source`: system message and template of tasks from sources that have their own."""
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                "the tokenizer has no chat template. Put a chat_template.jinja into the model directory, or use an "
                "instruction-tuned checkpoint."
            )
        self._tokenizer = tokenizer
        self._markers = markers_of(tokenizer)
        self._words = (system, template)
        self._words_of = by_source or {}
        own = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
        self.stop_ids = tuple(dict.fromkeys((*own, *(int(eos) for eos in eos_ids))))
        """Every id that ends a completion: the tokenizer's own, and those of generation_config.json."""
        # The members of a group ask for the same prompt: it is written once and encoded once.
        self._text_of = lru_cache(PROMPTS_KEPT)(lambda messages: self.render(messages, for_generation=True))
        # A given answer is looked through for ends of a turn, and then encoded.
        self._ids_of = lru_cache(TEXTS_KEPT)(lambda text: tuple(tokenizer.encode(text, add_special_tokens=False)))
        self._prompt_of = lru_cache(PROMPTS_KEPT)(lambda text: tuple(self.encode(text)))
        if not self.stop_ids:
            raise UserError("the tokenizer has no end-of-sequence token, so no completion could end. Set eos_token.")

    def prompt_messages(self, task: Task) -> tuple[Message, ...]:
        """What is said to the model: the system message, and a lone user message put into the template."""
        messages, (system, template) = task.messages, self._words_of.get(task.source, self._words)
        if len(messages) == 1 and messages[0].role == "user":
            # Not str.format: a template such as "... in \boxed{}. {prompt}" has braces of its own.
            text = template.replace("{prompt}", messages[0].content)
            messages = (Message(role="user", content=text),)
        if not system:
            return messages
        if messages[0].role == "system":
            raise UserError(
                f"task {task.id} brings its own system message and prompt.system is set. Remove one of them."
            )
        return (Message(role="system", content=system), *messages)

    def prompt_ids(self, messages: Sequence[Message], tools: Tools = ()) -> tuple[int, ...]:
        """The ids up to where the model begins to speak. `tools` are JSON schemas that the template shows."""
        text = self.render(messages, for_generation=True, tools=tools) if tools else self._text_of(tuple(messages))
        return self._prompt_of(text)

    def completion_ids(self, text: str) -> list[int]:
        """The ids a model should draw to say this text: the text and the end of its turn."""
        return [*self.encode(text), self.end_of_turn_id]

    def spoken_rows(self, messages: Sequence[Message], turns: int | None = 1, tools: Tools = ()) -> list[SpokenRow]:
        """A conversation that was given, not drawn, with its last `turns` assistant messages to be learned (None: all).

        Each is what the template makes of it, behind exactly what a policy would see before it speaks. That is one row
        as long as further messages only append to it; where the template rewrites what was said, a new row begins.
        What the template writes behind the last of them is left out: nobody learns it.
        """
        places = [place for place, message in enumerate(messages) if message.role == "assistant"]
        places = places if turns is None else places[-turns:]
        for place in places:
            self._require_no_end(messages[place].content)
        messages = [self.take_apart(message) for message in messages]
        rows: list[SpokenRow] = []
        for place in places:
            begun = self.render(messages[:place], for_generation=True, tools=tools)
            if not rows or not begun.startswith(rows[-1].text):
                rows.append(SpokenRow(text=""))
            row = rows[-1]
            row.add(self.encode(begun[len(row.text) :]), is_trained=False)
            said = self._said(begun, messages[: place + 1], tools)
            row.add(self.completion_ids(said), is_trained=True)
            row.text = begun + said + self._end_text
        return rows

    def _said(self, begun: str, messages: Sequence[Message], tools: Tools) -> str:
        """The last message as the template writes it: trimmed, or with an empty thought before it.

        As it was given where the template would leave some of it out, such as its reasoning: that is to be learned.
        """
        given = messages[-1].content
        whole, after = self.render(messages, for_generation=False, tools=tools), self._after_probe(())
        if whole.startswith(begun) and whole.endswith(after):
            written = whole[len(begun) : len(whole) - len(after)]
            return written if given.strip() in written else given
        return given

    def _require_no_end(self, text: str) -> None:
        if not set(self.stop_ids).isdisjoint(self._raw_ids(text)):
            raise UserError(
                f"an assistant's message holds a token that ends its turn, in {text!r:.80}. Remove it: the template "
                "writes the end of a turn itself."
            )

    @cached_property
    def _end_text(self) -> str:
        """How the template writes end_of_turn_id; empty when it does not."""
        text = str(self._tokenizer.convert_ids_to_tokens(self.end_of_turn_id))
        return text if self._after_probe(()).startswith(text) else ""

    def decode(self, ids: Sequence[int]) -> str:
        """The text, special tokens left out."""
        return decode_ids(self._tokenizer, ids)

    @cached_property
    def end_of_turn_id(self) -> int:
        """The stop id that the template writes after an assistant's message, or the tokenizer's when it writes none."""
        glue = self.encode(self._after_probe(()))
        return next((token for token in glue if token in self.stop_ids), self.stop_ids[0])

    @cached_property
    def is_append_only(self) -> bool:
        """Whether a further message leaves the text before it as it was."""
        asked = (Message(role="user", content="probe zero"),)
        begun = self.render(asked, for_generation=True) + PROBE
        continued = (*asked, Message(role="assistant", content=PROBE), *asked)
        return self.render(continued, for_generation=True).startswith(begun)

    def extend_ids(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        replies: Sequence[Message],
        history: Sequence[Message] = (),
        tools: Tools = (),
    ) -> tuple[int, ...]:
        """The next turn's prompt: what was seen and drawn, untouched, then the template's glue and the replies.

        A template that rewrites history cannot be appended to. Then the whole `history`, all messages before the
        replies, is rendered anew; the result does not begin with the earlier ids, and the caller starts a new row.
        """
        if not self.is_append_only:
            assert history, "a template that rewrites history needs the whole conversation"
            return self.prompt_ids((*history, *replies), tools)
        glue = self.encode(self._after_probe(replies))
        if completion_ids and completion_ids[-1] in self.stop_ids and glue and glue[0] in self.stop_ids:
            glue = glue[1:]  # the model has drawn the end of its turn already
        return (*prompt_ids, *completion_ids, *glue)

    def _after_probe(self, replies: Sequence[Message]) -> str:
        """What the template writes after an assistant's message: end of turn, replies, start of the next turn."""
        said = (Message(role="user", content="probe zero"), Message(role="assistant", content=PROBE))
        return self.render((*said, *replies), for_generation=bool(replies)).rpartition("probe two")[2]

    @cached_property
    def has_tool_role(self) -> bool:
        """Whether the template has words of its own for what a tool says."""
        said = (Message(role="user", content="probe zero"), Message(role="assistant", content=PROBE))
        try:
            text = self._render_as_given((*said, Message(role="tool", content="probe three", name="probe")), False, ())
        except UserError:
            return False
        unknown = self._tokenizer.unk_token_id
        return "probe three" in text and (unknown is None or unknown not in self._raw_ids(text))

    def render(
        self, messages: Sequence[Message], *, for_generation: bool, tools: Tools = (), is_drawn: bool = False
    ) -> str:
        """The conversation as text. Raises ToolsUnseen where the template leaves the tools out without a word.

        is_drawn: what assistants say is the text of drawn ids, with the control tokens among them, and is compared with
        such text, never encoded.
        """
        messages = [m if is_drawn and m.role == "assistant" else self.take_apart(m) for m in messages]
        if not self.has_tool_role:  # then the user speaks for the tools
            messages = [_as_user(message) if message.role == "tool" else message for message in messages]
        text = self._render_as_given(messages, for_generation, self._markers.take_apart_all(tools))
        if tools and text == self._render_as_given(messages, for_generation, ()):
            raise ToolsUnseen(
                f"the chat template of this model shows no tools, so it would never see the {len(tools)} given. In an "
                'environment set env.options.show_tools = "text": they then stand in words before the question. In '
                "rows of data describe them in the system message and leave the column tools out"
            )
        return text

    def take_apart(self, message: Message) -> Message:
        """The message without markers of the chat format: nobody must end his turn and speak as another.

        Policies too: where a template rewrites history, what they drew as ordinary letters is encoded again.
        """
        content = self._markers.take_apart(message.content, message.role)
        return replace(message, content=content, name=self._markers.take_apart(message.name, "tool"))

    def _render_as_given(self, messages: Sequence[Message], for_generation: bool, tools: Tools) -> str:
        conversation = [message.as_dict() for message in messages]
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    conversation,
                    tokenize=False,
                    add_generation_prompt=for_generation,
                    **({"tools": list(tools)} if tools else {}),
                )
            )
        except Exception as error:  # jinja's TemplateError: the template refuses these roles or their order
            roles = ", ".join(message.role for message in messages)
            raise UserError(f"the chat template refuses messages with roles {roles}: {error}") from error

    def encode(self, text: str) -> list[int]:
        # Without special tokens: the template writes its own, and a tokenizer that adds BOS would write a second one.
        ids = self._raw_ids(text)
        unknown = self._tokenizer.unk_token_id
        if unknown is None:
            is_lossy = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False) != text
        else:
            is_lossy = ids.count(unknown) > text.count(self._tokenizer.unk_token)
        if is_lossy:
            self._require_known(text)
        return ids

    def _require_known(self, text: str) -> None:
        """Names the characters that the tokenizer replaces or drops: the model would answer another question."""
        unknown = self._tokenizer.unk_token_id
        for added in self._tokenizer.get_added_vocab():  # one id each, whatever characters their names have
            text = text.replace(added, "")
        lost = [c for c in sorted(set(text)) if (ids := self._raw_ids(c)) == [] or unknown in ids]
        if unknown is None:
            lost = [c for c in lost if not c.isspace()]  # some tokenizers drop space by design
        if lost:
            raise UserError(
                f"the tokenizer cannot encode {' '.join(map(repr, lost))} in {text!r:.80}. "
                "Remove these characters, or use a model that knows them."
            )

    def _raw_ids(self, text: str) -> list[int]:
        return list(self._ids_of(text))


def _as_user(message: Message) -> Message:
    return Message(role="user", content=message.content)
