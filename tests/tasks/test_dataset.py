"""Rows that cannot be read are named; the stream is a pure function of its seed and survives any interruption."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from temper.errors import UserError
from temper.tasks.dataset import FileSource, Stream, fingerprint, read_file, take_all
from temper.tasks.generators import make_source
from temper.types import Message, Task

DATA = Path(os.environ.get("TEMPER_TEST_DATA", Path(__file__).parents[2].parent / "shared" / "data"))


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def numbered(name: str, size: int) -> FileSource:
    tasks = [Task(id=f"{name}:{i}", messages=(Message(role="user", content=f"{name} {i}"),)) for i in range(size)]
    return FileSource(name, tuple(tasks))


def ids(stream: Stream, count: int) -> list[str]:
    return [stream.next()[1].id for _ in range(count)]


def test_jsonl_rows_become_tasks_with_line_numbers_and_the_rest_as_extra(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1"}]
    path = write(
        tmp_path / "train.jsonl",
        {"prompt": "hello", "answer": " olleh ", "level": 3, "tags": ["x"]},
        "",
        {"prompt": messages, "answer": 2},
    )
    first, second = read_file(path).tasks
    assert (first.id, second.id) == ("train.jsonl:1", "train.jsonl:3")
    assert first.messages == (Message(role="user", content="hello"),)
    assert (first.answer, second.answer) == ("olleh", "2")
    assert first.extra == {"level": 3}
    assert [message.role for message in second.messages] == ["system", "user"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"prompt": "x", ', r"bad.jsonl, line 2: not valid JSON .* one JSON object per line"),
        ("[1, 2]", r"line 2: the row is \[1, 2\], not an object"),
        ({"promt": "x", "answer": "y"}, r'no column "prompt". Did you mean "promt"\? Columns: promt, answer'),
        ({"prompt": "x"}, r'line 2: there is no column "answer".* or to "" when there are no gold answers'),
        ({"prompt": "  ", "answer": "y"}, "line 2: .*is empty"),
        ({"prompt": 5, "answer": "y"}, "line 2: .*must be text or a list"),
        ({"prompt": [], "answer": "y"}, "line 2: .*must be text or a list"),
        ({"prompt": [{"role": "user"}], "answer": "y"}, "line 2: .*each message must be"),
        ({"prompt": [{"role": "usr", "content": "x"}], "answer": "y"}, "line 2: .*role 'usr'; allowed"),
        ({"prompt": [{"role": "assistant", "content": "x"}], "answer": "y"}, "line 2: .*ends with an assistant"),
        ({"prompt": "x", "answer": ["y"]}, "line 2: .*must be text or a number"),
    ],
)  # fmt: skip
def test_a_malformed_row_is_named_by_file_and_line(tmp_path: Path, row: object, message: str) -> None:
    path = write(tmp_path / "bad.jsonl", {"prompt": "x", "answer": "y"}, row)
    with pytest.raises(UserError, match=message):
        read_file(path)


def test_bytes_that_are_not_text_are_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"prompt": "x", "answer": "y"}\n{"prompt": "\xff", "answer": "y"}\n')
    with pytest.raises(UserError, match="line 2: not valid JSON"):
        read_file(path)


def test_files_that_are_missing_empty_too_short_or_of_another_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_file(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="has no rows"):
        read_file(write(tmp_path / "empty.jsonl", "", ""))
    with pytest.raises(UserError, match=r'"\.csv" files cannot be read'):
        read_file(write(tmp_path / "x.csv", "a,b"))
    path = write(tmp_path / "short.jsonl", {"prompt": "x", "answer": "y"})
    with pytest.raises(UserError, match="size=2 is more than its 1 tasks"):
        read_file(path, size=2)


def test_answer_pattern_takes_its_first_group_and_names_rows_without_it(tmp_path: Path) -> None:
    path = write(tmp_path / "g.jsonl", {"prompt": "x", "answer": "1+1=2\n#### 2"}, {"prompt": "x", "answer": "two"})
    assert read_file(path, answer_pattern="#### (.+)", size=1).tasks[0].answer == "2"
    with pytest.raises(UserError, match=r"g\.jsonl, line 2: .*does not match answer_pattern"):
        read_file(path, answer_pattern="#### (.+)")
    with pytest.raises(UserError, match="has no group"):
        read_file(path, answer_pattern="#### .+")
    with pytest.raises(UserError, match="not a regular expression"):
        read_file(path, answer_pattern="(")


def test_answer_field_may_be_absent_on_purpose(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "x"})
    assert read_file(path, answer_field="").tasks[0].answer is None


def test_parquet_gives_the_same_tasks_as_jsonl(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"prompt": [{"role": "user", "content": f"q{i}"}], "answer": str(i), "level": i} for i in range(5)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "t.parquet")
    from_parquet = read_file(tmp_path / "t.parquet").tasks
    from_jsonl = read_file(write(tmp_path / "t.jsonl", *rows)).tasks
    assert [(t.messages, t.answer, t.extra) for t in from_parquet] == [
        (t.messages, t.answer, t.extra) for t in from_jsonl
    ]
    assert from_parquet[4].id == "t.parquet:5"
    (tmp_path / "broken.parquet").write_bytes(b"nothing of the sort")
    with pytest.raises(UserError, match="not a readable Parquet file"):
        read_file(tmp_path / "broken.parquet")


def test_gsm8k_reads_as_published() -> None:
    path = DATA / "gsm8k" / "train.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not here; set TEMPER_TEST_DATA to the folder with the data files")
    source = read_file(path, prompt_field="question", answer_pattern="#### (.+)")
    assert source.size == 7473
    assert source.task(0).answer == "72"


def test_fingerprint_ignores_id_spacing_and_unicode_form_but_not_roles() -> None:
    def task(content: str, role: str = "user", name: str = "a") -> Task:
        return Task(id=name, messages=(Message(role=role, content=content),))

    assert fingerprint(task("caf\u00e9  au\nlait")) == fingerprint(task(" cafe\u0301 au lait", name="b"))
    assert fingerprint(task("x")) != fingerprint(task("x", role="system"))
    assert fingerprint(task("x")) != fingerprint(task("X"))


def test_take_all_keeps_the_first_of_equal_prompts() -> None:
    same = Task(id="again", messages=numbered("a", 1).tasks[0].messages)
    source = FileSource("a", (*numbered("a", 3).tasks, same))
    assert [task.id for task in take_all([source, source])] == ["a:0", "a:1", "a:2"]


def test_every_epoch_of_a_file_is_a_new_permutation_of_all_its_tasks() -> None:
    stream = Stream([numbered("a", 20)], [1.0], seed=3)
    epochs = [ids(stream, 20) for _ in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert ids(Stream([numbered("a", 20)], [1.0], seed=3), 60) == [name for epoch in epochs for name in epoch]
    assert ids(Stream([numbered("a", 20)], [1.0], seed=4), 20) != epochs[0]


@settings(max_examples=50)
@given(
    sizes=st.lists(st.one_of(st.none(), st.integers(1, 7)), min_size=1, max_size=3),
    seed=st.integers(0, 2**32),
    before=st.integers(0, 40),
    held_out=st.sets(st.integers(1, 6)),
)
def test_a_resumed_stream_continues_as_if_nothing_had_happened(
    sizes: Sequence[int | None], seed: int, before: int, held_out: set[int]
) -> None:
    def make() -> Stream:
        sources = [
            make_source("chain_sum", {"digits": 1}, seed=i, size=0) if size is None else numbered(str(i), size)
            for i, size in enumerate(sizes)
        ]
        excluded = {fingerprint(task) for i in range(3) for j in held_out for task in [numbered(str(i), 7).task(j)]}
        return Stream(sources, [1.0 + i for i in range(len(sizes))], seed, excluded)

    whole = make()
    whole_draws = [whole.next() for _ in range(before + 40)]
    first = make()
    for _ in range(before):
        first.next()
    resumed = make()
    resumed.load_state(json.loads(json.dumps(first.state())))
    assert [resumed.next() for _ in range(40)] == whole_draws[before:]
    assert resumed.state() == whole.state()
    assert [draw for draw, _ in whole_draws] == list(range(before + 40))


def test_a_state_of_other_data_is_refused() -> None:
    state = Stream([numbered("a", 5)], [1.0], seed=0).state()
    with pytest.raises(UserError, match="start a new run"):
        Stream([numbered("a", 6)], [1.0], seed=0).load_state(state)


def test_held_out_prompts_are_never_drawn_and_the_others_stay_equally_likely() -> None:
    source = numbered("a", 12)
    excluded = {fingerprint(source.task(i)) for i in (0, 5, 11)}
    counts = Counter(ids(Stream([source], [1.0], seed=1, excluded=excluded), 9 * 40))
    assert counts == {f"a:{i}": 40 for i in range(12) if i not in (0, 5, 11)}


def test_a_conversation_that_answers_a_held_out_prompt_is_never_drawn() -> None:
    """What is said after its prompt does not make it another one."""
    source, more = numbered("a", 3), (Message(role="assistant", content="well"), Message(role="user", content="so?"))
    told = FileSource("a", tuple(replace(task, messages=(*task.messages, *more)) for task in source.tasks))
    stream = Stream([told], [1.0], seed=0, excluded={fingerprint(source.task(1))})
    assert set(ids(stream, 20)) == {"a:0", "a:2"}


def test_a_source_that_is_held_out_entirely_is_an_error_and_not_a_hang() -> None:
    source = numbered("a", 4)
    with pytest.raises(UserError, match="nothing is left to train on"):
        Stream([source], [1.0], seed=0, excluded=map(fingerprint, source.tasks)).next()  # type: ignore[arg-type]
    constant = make_source("chain_sum", {"terms": 1, "digits": 1}, seed=0, size=0)
    everything = {fingerprint(constant.task(i)) for i in range(300)}
    with pytest.raises(UserError, match="nothing is left to train on"):
        Stream([constant], [1.0], seed=0, excluded=everything).next()


def chi_square(counts: Counter[str], expected: dict[str, float]) -> float:
    return sum((counts[name] - share) ** 2 / share for name, share in expected.items())


def test_the_mixture_follows_its_weights() -> None:
    draws = 20_000
    stream = Stream([numbered("a", 7), numbered("b", 50), numbered("c", 3)], [1.0, 2.5, 0.5], seed=11)
    counts = Counter(name.split(":")[0] for name in ids(stream, draws))
    expected = {"a": draws * 1 / 4, "b": draws * 2.5 / 4, "c": draws * 0.5 / 4}
    # 99.9th percentile of chi-square with 2 degrees of freedom; the seed is fixed, so this cannot flicker.
    assert chi_square(counts, expected) < 13.8
    # The check can fail: equal weights are far outside.
    assert chi_square(counts, dict.fromkeys("abc", draws / 3)) > 1000


def test_tasks_are_drawn_as_often_as_the_data_holds_them() -> None:
    draws, size = 20_050, 50
    counts = Counter(ids(Stream([numbered("a", size), numbered("b", 3)], [1.0, 1.0], seed=5), draws))
    own = {name: count for name, count in counts.items() if name.startswith("a:")}
    assert len(own) == size
    # Walking permutations is evener than chance: no task is ever more than one draw ahead of another.
    assert max(own.values()) - min(own.values()) <= 1


def test_every_column_stays_with_the_task(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = {"question": "2 + 2 =", "solution": "so\n#### 4", "level": 3, "tests": [1, {"a": 2}], "hint": None}
    path.write_text(json.dumps(row))
    (task,) = read_file(path, "question", "solution", "#### (.+)").tasks
    assert task.answer == "4"
    assert {**task.extra, **task.columns} == row, "also the whole of a column of which a part is the answer"
    path.write_text(json.dumps({"prompt": "2 + 2 =", "completion": "4", "tests": [1, 2]}))
    (task,) = read_file(path).tasks
    assert task.columns == {"tests": [1, 2]}


def test_a_misspelt_file_is_answered_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").touch()
    with pytest.raises(UserError, match=r'no such file\. Did you mean ".*/train\.jsonl"\?'):
        read_file(tmp_path / "trian.jsonl")
