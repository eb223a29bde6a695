"""Leaks are found, templates and unrelated texts are not taken for leaks."""

from __future__ import annotations

import random

import pytest

from temper.evals import contamination
from temper.evals.contamination import Overlap, check, describe, find, prompts_of
from temper.types import Message, Task

LEAK = (
    "Natalia sold clips to forty eight of her friends in April, and then she sold half as many clips in May. "
    "How many clips did Natalia sell altogether?"
)
WORDS = [f"{a}{b}{c}" for a in "bdfgklm" for b in "aeiou" for c in ("n", "r", "st", "lt")]


def unrelated(count: int, name: str, length: int = 40) -> list[tuple[str, str]]:
    random_ = random.Random(name)
    return [(f"{name}:{i}", " ".join(random_.choices(WORDS, k=length))) for i in range(count)]


def test_a_planted_near_duplicate_is_found_among_20_000_and_nothing_else_is() -> None:
    train, heldout = unrelated(20_000, "train"), unrelated(500, "heldout")
    train[12_345] = ("train:leak", f"Here is one!  {LEAK.upper().replace('ALTOGETHER', 'IN TOTAL')}")
    heldout[77] = ("heldout:leak", LEAK)
    (overlap,) = find(train, heldout)
    assert overlap[:2] == ("train:leak", "heldout:leak")
    assert overlap.shared == "natalia sold clips to forty eight of her friends in april and then"


def test_unrelated_texts_are_silent() -> None:
    assert find(unrelated(500, "train"), unrelated(100, "heldout")) == []
    assert find([], unrelated(3, "heldout")) == find(unrelated(3, "train"), []) == []


@pytest.mark.parametrize("swap", [False, True], ids=["held-out is short", "training is short"])
def test_a_text_of_fewer_words_than_n_is_looked_for_as_a_whole(swap: bool) -> None:
    short = ("short", "Which river flows through the city of Bratislava?")
    wrapped = ("long", f"Answer in one word, and only one, please. {short[1]} Do not explain your answer at all.")
    altered = ("altered", wrapped[1].replace("Bratislava", "Budapest"))
    sides = ([wrapped, altered], [short])
    found = find(*(reversed(sides) if swap else sides))
    assert [set(pair[:2]) for pair in found] == [{"short", "long"}]
    assert found[0].shared == "which river flows through the city of bratislava"


def test_long_texts_are_not_accused_of_a_short_overlap_because_others_are_short() -> None:
    eight = "which river flows through the city of bratislava"
    long_train, long_heldout = (
        f"{' '.join(WORDS[i : i + 20])} {eight} {' '.join(WORDS[i + 60 : i + 80])}" for i in (0, 25)
    )
    short = ("short", " ".join(WORDS[110:118]))
    assert find([("train", long_train)], [("heldout", long_heldout), short]) == []


def test_texts_too_short_to_judge_are_left_to_the_check_for_equal_prompts() -> None:
    seven = "Spell the word cat backward, please now"
    assert find([("a", seven)], [("b", seven)]) == []
    assert len(find([("a", f"{seven}!?! ok")], [("b", f"{seven}: ok")])) == 1


def test_a_template_is_no_leak_and_a_leak_inside_a_template_is() -> None:
    template = (
        "Solve the following problem step by step and write the final answer after four number signs. {} Begin now."
    )
    train = [(name, template.format(text)) for name, text in unrelated(300, "train")]
    heldout = [(name, template.format(text)) for name, text in unrelated(60, "heldout")]
    assert find(train, heldout) == []
    leaked = find([*train, ("train:leak", template.format(LEAK))], [*heldout, ("heldout:leak", LEAK)])
    assert [pair[:2] for pair in leaked] == [("train:leak", "heldout:leak")]


def test_a_template_of_which_the_held_out_set_has_only_two_is_known_from_the_training_set() -> None:
    template = "Solve the following problem step by step and write the final answer after four number signs. {}"
    train = [(name, template.format(text)) for name, text in unrelated(300, "train")]
    heldout = [(name, template.format(text)) for name, text in unrelated(2, "heldout")]
    assert find(train, heldout) == []
    assert len(find(train[:3], heldout)) == 6, "three texts are not enough to call it a template"


def test_a_leak_repeated_word_by_word_does_not_pass_for_a_template() -> None:
    train = [*unrelated(100, "train"), *((f"copy:{i}", f"Q: {LEAK}") for i in range(50))]
    heldout = [*unrelated(20, "heldout"), *((f"twin:{i}", LEAK) for i in range(6))]
    assert len(find(train, heldout)) == 50 * 6


def test_scripts_without_spaces_are_compared_by_character() -> None:
    question = "小明有十二个苹果他给了小红三个苹果后来又买了五个"
    assert len(find([("a", f"请回答:{question}?")], [("b", f"{question}。现在一共有几个")])) == 1
    assert find([("a", "今天天气很好我们一起去公园里散步吧")], [("b", question)]) == []


def test_everything_a_task_shows_is_read_and_tasks_that_hide_what_they_ask_are_not_compared() -> None:
    messages = (Message(role="system", content="one"), Message(role="user", content="two"))
    assert list(prompts_of([Task(id="t", messages=messages, answer="three")])) == [("t", "one\ntwo")]
    game = Task(id="t", messages=(Message(role="user", content=LEAK),), extra={"episode_seed": 7})
    assert check([game], [game]) == ""
    shown = Task(id="t", messages=game.messages)
    assert "1 of 1 held-out prompts" in check([shown], [shown])


def test_the_warning_counts_and_gives_examples() -> None:
    overlaps = [Overlap(f"train:{i}", f"heldout:{i % 2}", "eight words") for i in range(5)]
    text = describe(overlaps, 100, 20)
    assert "2 of 20 held-out prompts" in text
    assert "5 of 100 training prompts" in text
    assert text.count("eight words") == contamination.EXAMPLES
    assert text.endswith("and 2 more")
    assert describe([], 100, 20) == ""
