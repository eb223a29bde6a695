from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from temper.errors import UserError
from temper.tasks.generators import GENERATORS, make_source
from temper.types import Task


def test_spell_backward_reverses_a_word_of_the_asked_length() -> None:
    source = make_source("spell_backward", {"min_letters": 3, "max_letters": 5}, seed=1, size=0)
    tasks = [source.task(i) for i in range(200)]
    words = [task.messages[0].content for task in tasks]
    assert {len(word) for word in words} == {3, 4, 5}
    assert all(
        task.answer == word[::-1] and word.isalpha() and word.islower() for task, word in zip(tasks, words, strict=True)
    )


def test_rearrange_gives_another_order_of_different_letters() -> None:
    for task in (GENERATORS["rearrange"](i, 7, min_letters=4, max_letters=6) for i in range(100)):
        word, answer = task.messages[0].content, str(task.answer)
        assert 4 <= len(word) <= 6
        assert len(set(word)) == len(word)
        assert sorted(answer) == sorted(word)
        assert answer != word


def test_chain_sum_is_right() -> None:
    for task in (GENERATORS["chain_sum"](i, 7, terms=4, digits=3) for i in range(100)):
        question = task.messages[0].content
        assert question.endswith("=")
        parts = question[:-1].replace("-", "+-").split("+")
        assert len(parts) == 4
        assert all(len(part.lstrip("-")) == 3 for part in parts)
        assert task.answer == str(sum(int(part) for part in parts))


def test_the_working_of_a_chain_sum_is_right_line_by_line_and_changes_no_question() -> None:
    for index in range(100):
        plain, worked = (GENERATORS["chain_sum"](index, 7, terms=4, digits=1, working=times) for times in (0, 2))
        assert worked.messages == plain.messages
        *steps, last = str(worked.answer).split("\n")
        assert last == plain.answer
        assert steps[:3] == steps[3:], "three steps, twice"
        assert all(eval(left) == int(right) for left, right in (step.split("=") for step in steps))
        assert steps[2].endswith(f"={last}")


def test_generators_are_pure_and_equal_in_another_process() -> None:
    expression = "[repr(make(i, 5)) for _, make in sorted(GENERATORS.items()) for i in range(20)]"
    program = f"from temper.tasks.generators import GENERATORS; print({expression})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    here = [repr(make(i, 5)) for _, make in sorted(GENERATORS.items()) for i in range(20)]
    assert ast.literal_eval(done.stdout) == here


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_ids_name_generator_seed_and_index_and_seeds_differ(name: str) -> None:
    first, second = make_source(name, {}, seed=0, size=0), make_source(name, {}, seed=1, size=0)
    assert first.task(3).id == f"{name}:0:3"
    assert [first.task(i).messages for i in range(50)] != [second.task(i).messages for i in range(50)]
    # The trap of seed + index: the second source must not be the first one shifted.
    shifted = sum(first.task(i + 1).messages == second.task(i).messages for i in range(200))
    assert shifted <= 3


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("spell_backwards", {}, 'is unknown. Did you mean "spell_backward"'),
        ("spell_backward", {"min_letter": 3}, 'option "min_letter" is unknown. Did you mean "min_letters"'),
        ("spell_backward", {"min_letters": 9, "max_letters": 3}, "min_letters=9 and max_letters=3"),
        ("spell_backward", {"min_letters": "six"}, "must be of type int"),
        ("chain_sum", {"terms": 0}, "terms=0"),
        ("no_such_module_here:f", {}, "cannot import no_such_module_here"),
        ("temper.tasks.generators:chain_summ", {}, 'Did you mean "chain_sum"'),
        ("os.path:join", {}, "must return a temper.types.Task|failed"),
    ],
)
def test_mistakes_are_named_before_the_run(name: str, options: dict[str, int | str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_source(name, options, seed=0, size=0)  # type: ignore[arg-type]


def test_a_generator_of_the_users_own_beside_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "my_tasks_here.py").write_text(
        "from temper.types import Message, Task\n"
        "def make(index, seed, *, word):\n"
        "    return Task(id=f'my:{index}', messages=(Message(role='user', content=word),), answer=str(index))\n"
    )
    source = make_source("my_tasks_here:make", {"word": "x"}, seed=0, size=4)
    assert (source.size, source.task(2).answer) == (4, "2")
    with pytest.raises(UserError, match='option "word" is missing'):
        make_source("my_tasks_here:make", {}, seed=0, size=0)


def test_generators_from_elsewhere_are_passed_in() -> None:
    def other(index: int, seed: int, **options: int) -> Task:
        return GENERATORS["chain_sum"](index, seed, terms=options["anything"])

    source = make_source("other", {"anything": 3}, seed=0, size=0, generators={**GENERATORS, "other": other})
    assert source.task(0).answer is not None


def test_rejected_answers_have_as_many_wrong_letters_as_asked() -> None:
    for task in (GENERATORS["rearrange_pairs"](i, 7, min_letters=4, max_letters=6, errors=3) for i in range(100)):
        chosen, rejected = str(task.answer), str(task.extra["rejected"])
        assert sorted(chosen) == sorted(task.messages[0].content) != sorted(rejected)
        assert sum(a != b for a, b in zip(chosen, rejected, strict=True)) == 3
    with pytest.raises(UserError, match="errors=5 must satisfy"):
        GENERATORS["rearrange_pairs"](0, 7, min_letters=4, max_letters=6, errors=5)
