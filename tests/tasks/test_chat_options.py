"""Variables that a recipe sets in a chat template: what they change, what is refused, what stays as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from temper.errors import UserError
from temper.models.tiny import character_tokenizer
from temper.tasks.chat_options import option_names, set_chat_options, with_options
from temper.tasks.render import Renderer
from temper.types import Message

OPEN = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
)
# Qwen3's way: an empty thought is put where the model would begin to think.
SWITCHED = OPEN + (
    "{%- if add_generation_prompt %}\n    {{- '<|assistant|>' }}\n"
    "    {%- if enable_thinking is defined and enable_thinking is false %}\n"
    "        {{- '<think>\\n\\n</think>\\n\\n' }}\n    {%- endif %}\n{%- endif %}"
)
# SmolLM3's way: a default, then a word of its own, which a macro could read too.
DEFAULTED = (
    "{# defaults #}\n{%- if enable_thinking is not defined -%}\n{%- set enable_thinking = true -%}\n{%- endif -%}\n"
    "{%- if enable_thinking -%}{%- set mode = 'think' -%}{%- else -%}{%- set mode = 'no_think' -%}{%- endif -%}\n"
    "<|system|>{{ mode }}{% macro ended() %}{{ '' if enable_thinking else '<think></think>' }}{% endmacro %}"
    "{%- for m in messages -%}{{ '<|' + m['role'] + '|>' }}{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{%- endfor -%}{% if add_generation_prompt %}<|assistant|>{{ ended() }}{% endif %}"
)
# GLM's way.
REPEATED = "{% set enable_thinking = enable_thinking if enable_thinking is defined else true %}\n" + SWITCHED
ASKED = (Message(role="user", content="hi"),)


def tokenizer_of(template: Any) -> Any:
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz_<>/\n ")
    tokenizer.chat_template = template
    return tokenizer


def prompt(template: Any, **options: Any) -> str:
    tokenizer = tokenizer_of(template)
    set_chat_options(tokenizer, options)
    return Renderer(tokenizer).render(ASKED, for_generation=True)


@pytest.mark.parametrize("template", [SWITCHED, DEFAULTED, REPEATED], ids=["switched", "defaulted", "repeated"])
def test_thinking_can_be_switched_off_and_on(template: str) -> None:
    plain = prompt(template)
    assert "think>" not in plain
    assert prompt(template, enable_thinking=True) == plain
    closed = prompt(template, enable_thinking=False)
    assert closed != plain
    assert closed.endswith("</think>\n\n" if template != DEFAULTED else "</think>")
    tokenizer = tokenizer_of(template)
    said = tokenizer.apply_chat_template(
        [ASKED[0].as_dict()], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert closed == said, "as transformers writes it when the variable is passed along"


def test_a_template_without_options_is_left_alone_to_the_letter() -> None:
    assert with_options(SWITCHED, {}) == SWITCHED
    tokenizer = tokenizer_of(SWITCHED)
    set_chat_options(tokenizer, {})
    assert tokenizer.chat_template == SWITCHED


@pytest.mark.parametrize("value", [True, 3, 0.5, 'a "b" \\ {{ c }} %}\n\u00e9\U0001f600'])
def test_values_arrive_as_they_are(value: object) -> None:
    template = "{{ messages[0].content }}|{{ option }}|{{ option is string }}"
    text = tokenizer_of(with_options(template, {"option": value})).apply_chat_template(  # type: ignore[dict-item]
        [ASKED[0].as_dict()], tokenize=False
    )
    assert text == f"hi|{value}|{isinstance(value, str)}"


def test_white_space_at_the_start_of_a_template_stays() -> None:
    for template in ("  {% if true %}a{% endif %}{{ option }}", "  a{{ option }}", "\n{{ option }}"):
        changed = tokenizer_of(with_options(template, {"option": "x"})).apply_chat_template(
            [ASKED[0].as_dict()], tokenize=False
        )
        given = tokenizer_of(template).apply_chat_template([ASKED[0].as_dict()], tokenize=False, option="x")
        assert changed == given


def test_a_later_stage_says_otherwise_and_keeps_what_it_does_not_name() -> None:
    template = SWITCHED + "{{ mood }}"
    first = with_options(template, {"enable_thinking": False, "mood": "calm"})
    assert with_options(first, {"enable_thinking": False}) == first, "saying it again changes nothing"
    second = with_options(first, {"enable_thinking": True})
    assert second == with_options(template, {"enable_thinking": True, "mood": "calm"})
    assert option_names(first) == {"enable_thinking", "mood"}, "what is set can be set again"


def test_a_variable_that_the_template_does_not_read_is_refused() -> None:
    with pytest.raises(UserError, match=r"reads no such variable.*Did you mean .enable_thinking.*It reads: enable_t"):
        prompt(SWITCHED, enable_thinkin=False)
    with pytest.raises(UserError, match="It reads: none"):
        prompt(OPEN, enable_thinking=False)
    with pytest.raises(UserError, match=r"prompt\.chat_options\.messages"):
        prompt(SWITCHED, messages="mine")
    with pytest.raises(UserError, match="cannot be read"):
        prompt("{% if %}", enable_thinking=False)


def test_of_several_templates_those_that_read_it_get_it() -> None:
    tokenizer = tokenizer_of({"default": SWITCHED, "tool_use": OPEN})
    set_chat_options(tokenizer, {"enable_thinking": False})
    assert tokenizer.chat_template == {"default": with_options(SWITCHED, {"enable_thinking": False}), "tool_use": OPEN}


def test_a_tokenizer_that_is_saved_and_read_again_writes_the_same_prompts(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(DEFAULTED)
    set_chat_options(tokenizer, {"enable_thinking": False})
    tokenizer.save_pretrained(tmp_path)
    read = AutoTokenizer.from_pretrained(tmp_path)
    assert read.chat_template == tokenizer.chat_template
    assert Renderer(read).prompt_ids(ASKED) == Renderer(tokenizer).prompt_ids(ASKED)


def test_an_answer_that_is_given_stands_behind_what_the_policy_sees() -> None:
    tokenizer = tokenizer_of(SWITCHED)
    set_chat_options(tokenizer, {"enable_thinking": False})
    renderer = Renderer(tokenizer)
    (row,) = renderer.spoken_rows((*ASKED, Message(role="assistant", content="yes")))
    asked = renderer.prompt_ids(ASKED)
    assert tuple(row.token_ids[: len(asked)]) == asked
    assert row.loss_mask == [0] * len(asked) + [1] * (len("yes") + 1)
