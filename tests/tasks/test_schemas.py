"""Published shapes of rows become tasks; rows that nothing can be learned from are named with the reason."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from temper.errors import UserError
from temper.tasks.dataset import read_file
from temper.tasks.schemas import BadRow, schema_of
from temper.types import Message, Task

DATA = Path(os.environ.get("TEMPER_TEST_DATA", Path(__file__).parents[2].parent / "shared" / "data"))

ASKED = {"role": "user", "content": "q"}
SAID = {"role": "assistant", "content": "a"}
CHAT = [ASKED, SAID, {"role": "user", "content": "q2"}, {"role": "assistant", "content": "a2"}]
SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
PAIR = {"chosen": "good", "rejected": "bad"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'


def read(folder: Path, *rows: Any) -> tuple[Task, ...]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_file(path).tasks


def shown(task: Task) -> str:
    """user:q assistant:a -> the conversation on one line."""
    return " ".join(f"{message.role}:{message.content}" for message in task.messages)


@pytest.mark.parametrize(
    ("row", "before", "answer", "extra"),
    [
        ({"messages": [ASKED, SAID]}, "user:q", "a", {}),
        ({"messages": CHAT}, "user:q assistant:a user:q2", "a2", {"trained_turns": "all"}),
        ({"messages": [*CHAT, ASKED]}, "user:q assistant:a user:q2", "a2", {"trained_turns": "all"}),
        ({"messages": [{"role": "system", "content": ""}, ASKED, SAID]}, "user:q", "a", {}),
        ({"conversations": SHAREGPT, "system": "s"}, "system:s user:q", "a", {}),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, SAID]}, "user:q", "a", {}),
        ({"prompt": "q", "completion": " a\n"}, "user:q", " a\n", {}),
        ({"prompt": "q", "response": "a", "level": 3, "tags": ["x"]}, "user:q", "a", {"level": 3}),
        ({"question": "q", "answer": "a"}, "user:q", "a", {}),
        ({"prompt": [ASKED], "completion": [SAID]}, "user:q", "a", {}),
        ({"prompt": [ASKED], "completion": CHAT[1:]}, "user:q assistant:a user:q2", "a2", {"trained_turns": "all"}),
        ({"prompt": CHAT[:3], "completion": "a2"}, "user:q assistant:a user:q2", "a2", {}),
        ({"instruction": "do", "input": "", "output": "a"}, "user:do", "a", {}),
        ({"instruction": "do", "input": "it", "output": "a", "system": "s"}, "system:s user:do\nit", "a", {}),
        ({"instruction": "q2", "output": "a2", "history": [["q", "a"]]}, "user:q assistant:a user:q2", "a2",
         {"trained_turns": "all"}),
        ({"prompt": "q", **PAIR}, "user:q", "good", {"rejected": "bad"}),
        ({"prompt": "q", **PAIR, "margin": 2}, "user:q", "good", {"rejected": "bad", "margin": 2.0}),
        ({"instruction": "do", "input": "it", **PAIR}, "user:do\nit", "good", {"rejected": "bad"}),
        ({"conversations": SHAREGPT[:1], "chosen": {"from": "gpt", "value": "good"},
          "rejected": {"from": "gpt", "value": "bad"}}, "user:q", "good", {"rejected": "bad"}),
        ({"prompt": [ASKED], "chosen": [{"role": "assistant", "content": "good"}],
          "rejected": [{"role": "assistant", "content": "bad"}]}, "user:q", "good", {"rejected": "bad"}),
        ({"chosen": CHAT, "rejected": [*CHAT[:3], SAID]}, "user:q assistant:a user:q2", "a2", {"rejected": "a"}),
        ({"prompt": "q", "chosen": [ASKED, {"role": "assistant", "content": "good"}], "rejected": [ASKED, SAID]},
         "user:q", "good", {"rejected": "a"}),
        ({"chosen": "\n\nHuman: q\n\nAssistant: a\n\nHuman: q2\n\nAssistant: good",
          "rejected": "\n\nHuman: q\n\nAssistant: a\n\nHuman: q2\n\nAssistant: bad"},
         "user:q assistant:a user:q2", "good", {"rejected": "bad"}),
        ({"prompt": "q", "completion": "a", "label": False}, "user:q", "a", {"label": False}),
        ({"messages": CHAT, "label": True}, "user:q assistant:a user:q2", "a2", {"label": True}),
        ({"instruction": "q", "output": "a", "kto_tag": True}, "user:q", "a", {"label": True}),
        ({"prompt": "q", "completion": "a", "label": "spam"}, "user:q", "a", {"label": "spam"}),
        ({"prompt": "q", "completions": ["one", "two "], "labels": [True, False]}, "user:q", "one\n\ntwo",
         {"step_labels": "1,0"}),
        ({"conversations": [SHAREGPT[0], {"from": "function_call", "value": '{"name": "add", "arguments": {"x": 1}}'},
                            {"from": "observation", "value": "2"}, SHAREGPT[1]], "tools": '[{"name": "add"}]'},
         f"user:q assistant:{CALL} tool:2", "a", {"trained_turns": "all", "tools": '[{"name": "add"}]'}),
        ({"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}]}]}, "user:q", CALL, {}),
    ],
)  # fmt: skip
def test_published_shapes_become_tasks(
    tmp_path: Path, row: dict[str, Any], before: str, answer: str, extra: dict[str, Any]
) -> None:
    (task,) = read(tmp_path, row)
    assert (shown(task), task.answer, task.extra) == (before, answer, extra)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [ASKED]}, "no assistant turn"),
        ({"messages": []}, "neither text nor a list of messages"),
        ({"messages": [ASKED, {"role": "assistant", "content": " "}]}, "role assistant is empty"),
        ({"messages": [ASKED, ASKED, SAID]}, "roles do not alternate: user speaks after user, where assistant must"),
        ({"messages": [SAID, ASKED, SAID]}, "assistant speaks first, where system or user must"),
        ({"messages": [ASKED, {"role": "system", "content": "s"}, SAID]}, "system speaks after user"),
        ({"messages": [{"role": "critic", "content": "x"}, SAID]}, "role 'critic'; allowed: system"),
        ({"messages": [ASKED, "a"]}, "'a' is no message"),
        ({"messages": [ASKED, {**SAID, "weight": 0}]}, '"weight", which is not read'),
        ({"messages": [ASKED, {**SAID, "reasoning_content": "hm"}]}, '"reasoning_content", which is not read'),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, SAID]}, "only text can be trained"),
        ({"messages": [ASKED, SAID], "images": ["x.png"]}, '"images" is not empty'),
        ({"messages": [ASKED, SAID], "tools": "not json"}, "which is not JSON"),
        ({"conversations": [SHAREGPT[0], {"from": "function_call", "value": "add 1"}]}, "a tool call is 'add 1'"),
        ({"prompt": "q", "completion": ""}, '"completion" is empty'),
        ({"prompt": " ", "completion": "a"}, "role user is empty"),
        ({"prompt": "q", "completion": [ASKED]}, "user speaks after user"),
        ({"instruction": "q", "output": ""}, '"output" is empty'),
        ({"instruction": "q", "output": "a", "history": ["x"]}, r"list of \[asked, answered\]"),
        ({"prompt": "q", "chosen": "same", "rejected": " same\n"}, "chosen and rejected are equal"),
        ({"chosen": CHAT, "rejected": CHAT}, "chosen and rejected are equal"),
        ({"prompt": "q", "chosen": "good", "rejected": ""}, '"rejected" is empty'),
        (PAIR, 'there is no prompt, and "chosen" is no transcript'),
        ({"chosen": CHAT, "rejected": [{"role": "user", "content": "other"}, *CHAT[1:]]}, "differ before their last"),
        ({"prompt": "other", "chosen": CHAT[:2], "rejected": [ASKED, CHAT[3]]}, 'do not begin with "prompt"'),
        ({"prompt": "q", **PAIR, "margin": "big"}, '"margin" is'),
        ({"prompt": "q", "completions": ["a"], "labels": [True, False]}, "one label for each step"),
        ({"prompt": "q", "completions": ["a\n\nb"], "labels": [True]}, "empty line inside"),
        ({"prompt": "q", "completions": ["a"], "labels": [2]}, "true or false"),
        ({"text": "once upon"}, "columns text are of no known schema. Known:\n  pair: "),
        (["q", "a"], "not an object"),
    ],
)  # fmt: skip
def test_a_row_that_nothing_can_be_learned_from_is_named_by_file_line_and_reason(
    tmp_path: Path, row: Any, reason: str
) -> None:
    good = {"messages": [ASKED, SAID]}
    for key, other in {"chosen": {"prompt": "q", **PAIR}, "completion": {"prompt": "q", "completion": "a"},
                       "output": {"instruction": "q", "output": "a"},
                       "completions": {"prompt": "q", "completions": ["a"], "labels": [1]}}.items():  # fmt: skip
        good = other if key in row else good
    with pytest.raises(UserError, match=rf"rows\.jsonl, line 2: (.|\n)*{reason}"):
        read(tmp_path, good, row)


VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.sampled_from(["", "q", "a", "user", "assistant", "gpt", "{}"])
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["role", "content", "from", "value", "tool_calls", "function"]), inner),
    ),
    max_leaves=8,
)
COLUMNS = st.sampled_from(
    ["messages", "conversations", "prompt", "question", "completion", "completions", "labels", "label", "chosen",
     "rejected", "margin", "instruction", "input", "output", "history", "system", "tools"]
)  # fmt: skip


@settings(max_examples=400)
@given(st.dictionaries(COLUMNS, VALUES, min_size=1, max_size=6))
def test_whatever_a_row_holds_it_is_a_task_or_a_bad_row(row: dict[str, Any]) -> None:
    try:
        task = schema_of(row).task("t", row)
    except BadRow:
        return
    assert task.answer
    assert task.messages


def test_two_schemas_in_one_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"line 2: the row is of schema completion .* before it are of schema convers"):
        read(tmp_path, {"messages": [ASKED, SAID]}, {"prompt": "q", "completion": "a"})


def test_all_bad_rows_are_named_at_once_and_may_be_skipped(tmp_path: Path) -> None:
    good, bad = {"prompt": "q", **PAIR}, {"prompt": "q", "chosen": "x", "rejected": "x"}
    with pytest.raises(UserError, match=r"line 2: .*equal(.|\n)*2 more rows are bad: line 3, line 5\."):
        read(tmp_path, good, bad, bad, good, bad)
    source = read_file(tmp_path / "rows.jsonl", skip_bad=True)
    assert [task.id for task in source.tasks] == ["rows.jsonl:1", "rows.jsonl:4"]
    assert [text.partition(":")[0] for text in source.skipped] == ["line 2", "line 3", "line 5"]


def test_named_columns_win_over_schemas(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = {"prompt": "p", "answer": " gold ", "messages": [ASKED, SAID], "chosen": "x", "rejected": "y"}
    path.write_text(json.dumps(row))
    (named,) = read_file(path).tasks
    assert (shown(named), named.answer) == ("user:p", "gold")
    (other,) = read_file(path, prompt_field="chosen", answer_field="").tasks
    assert (shown(other), other.answer) == ("user:x", None)


def test_answer_pattern_reads_answers_of_schemas_too(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "q", "answer": "1+1\n#### 2"}))
    assert read_file(path, answer_pattern="#### (.+)").tasks[0].answer == "2"
    path.write_text(json.dumps({"prompt": "q", **PAIR}))
    with pytest.raises(UserError, match="answer_pattern finds one gold answer"):
        read_file(path, answer_pattern="(o)")


def test_every_format_gives_the_same_tasks(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"messages": CHAT, "level": 1}, {"messages": CHAT[:2], "level": 2}]
    wanted = [(task.messages, task.answer, task.extra) for task in read(tmp_path, *rows)]
    (tmp_path / "rows.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "lines.json").write_text("\n".join(map(json.dumps, rows)))
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as packed:
        packed.write("\n".join(map(json.dumps, rows)))
    saved = datasets.Dataset.from_list(rows)
    saved.to_parquet(str(tmp_path / "rows.parquet"))
    saved.save_to_disk(str(tmp_path / "saved"), num_shards=2)
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(str(tmp_path / "splits"))
    for name in ("rows.json", "lines.json", "rows.jsonl.gz", "rows.parquet", "saved", "splits/train"):
        tasks = read_file(tmp_path / name).tasks
        assert [(task.messages, task.answer, task.extra) for task in tasks] == wanted, name
        assert [task.id for task in tasks] == [f"{Path(name).name}:{i}" for i in (1, 2)]
    with pytest.raises(UserError, match=r"holds the splits train, test. Name one of them: .*splits/train"):
        read_file(tmp_path / "splits")


def test_a_json_list_names_the_line_of_a_bad_object(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('[\n {"prompt": "q",\n  "completion": "a"},\n {"prompt": "q", "completion": ""}\n]\n')
    with pytest.raises(UserError, match=r"rows\.json, row 2, line 4: .*is empty"):
        read_file(path)
    path.write_text('[\n {"prompt": "q", "completion": "a"},\n {"prompt": }\n]\n')
    with pytest.raises(UserError, match=r"rows\.json, line 3: not valid JSON"):
        read_file(path)
    for broken in ('[{"prompt": "q", "completion": "a"}', '"text"', '[{"prompt": "q", "completion": "a"}] x'):
        path.write_text(broken)
        with pytest.raises(UserError, match="not valid JSON"):
            read_file(path)


def test_folders_that_nothing_saved_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a folder without state\.json"):
        read_file(tmp_path)


@pytest.mark.parametrize(
    ("name", "size", "column"),
    [
        ("llamafactory_demo/alpaca_en_demo.json", 999, None),
        ("llamafactory_demo/dpo_en_demo.json", 300, "rejected"),
        ("llamafactory_demo/kto_en_demo.json", 300, "label"),
        ("llamafactory_demo/glaive_toolcall_en_demo.json", 300, None),
        ("hh_rlhf/harmless-base_test.jsonl.gz", 2299, "rejected"),
        ("gsm8k/train.jsonl", 7473, None),
    ],
)
def test_published_files_read_as_they_are(name: str, size: int, column: str | None) -> None:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{path} is not here; set TEMPER_TEST_DATA to the folder with the data files")
    source = read_file(path, skip_bad=True)
    assert source.size == size
    assert len(source.skipped) == (13 if "hh" in name else 0)
    assert all(task.answer and task.messages[-1].role in ("user", "tool") for task in source.tasks)
    assert column is None or all(column in task.extra for task in source.tasks)
    assert not any(Message(role="assistant", content="") in task.messages for task in source.tasks)
