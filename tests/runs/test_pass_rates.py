"""Prompts that were never or always solved are counted and named."""

from __future__ import annotations

from temper.runs.pass_rates import PassRates


def rates(**rewards: list[float]) -> PassRates:
    made = PassRates()
    for name, given in rewards.items():
        made.add(name, given)
    return made


def test_prompts_are_counted_by_what_all_their_answers_have_in_common() -> None:
    said = rates(a=[0.0, 0.0], b=[1.0, 1.0], c=[0.0, 0.0, 1.0, 1.0]).describe()
    assert said == (
        "8 answers to 3 prompts: 1 all wrong, 1 all right, 1 neither. Pass rates by prompt: 0% of 2 a, 50% of 4 c, "
        "100% of 2 b"
    )


def test_a_prompt_that_was_drawn_again_is_the_same_prompt() -> None:
    made = rates(a=[0.0])
    made.add("a", [1.0, 1.0, 1.0])
    assert (
        "4 answers to 1 prompts: 0 all wrong, 0 all right, 1 neither. Pass rates by prompt: 75% of 4 a"
        in made.describe()
    )


def test_of_many_prompts_the_hardest_and_the_easiest_are_named() -> None:
    said = rates(**{f"p{number}": [float(number >= 7)] for number in range(10)}).describe()
    assert said.endswith("0% of 1 p0, 0% of 1 p1, 0% of 1 p2, ..., 100% of 1 p7, 100% of 1 p8, 100% of 1 p9")
    assert "7 all wrong, 3 all right" in said


def test_partial_credit_is_a_mean_and_no_pass_rate() -> None:
    assert "Mean rewards by prompt: 0.25 of 2 a" in rates(a=[0.25, 0.25]).describe()


def test_the_key_to_change_is_that_of_most_prompts() -> None:
    assert "easier tasks in [[train]]" in rates(a=[0.0], b=[0.0], c=[1.0]).advise()
    assert "harder tasks in [[train]]" in rates(a=[0.0], b=[1.0], c=[1.0]).advise()
    assert "does not tell answers apart" in rates(a=[0.5], b=[0.5], c=[1.0]).advise()
    assert PassRates().describe() == ""
