"""Every address of the dashboard against the run store's own reader, and everything it must refuse."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from temper.dashboard import pages, queries, suites
from temper.dashboard.database import OutOfTime, connect, reading
from temper.dashboard.registry import Registry, find_runs
from temper.dashboard.series import by_stage, thin, together
from temper.dashboard.server import static_files
from temper.dashboard.tokens import REPLACEMENT, Pieces, Tokenizers
from temper.errors import UserError
from temper.runs import results
from temper.runs.reader import RunReader, TrajectoryRecord
from temper.runs.records import AlarmRecord, AuditRecord
from temper.runs.results import PromptResult, SampleResult, SuiteResult, save
from temper.runs.store.arrays import ARRAY_TYPES, PLANES, unpack_array
from temper.runs.store.run_store import open_run
from temper.runs.store.schema import OLD_LAYOUTS
from temper.runs.store.transcripts import limit_transcripts
from temper.types import Message, Status

Serve = Callable[..., Any]
STAGE, STEP = 1, 8


@pytest.fixture
def rollouts(trained: Path) -> list[TrajectoryRecord]:
    """Rollouts of the last step."""
    with RunReader(trained) as reader:
        return reader.trajectories(STAGE, STEP)


def key_of(record: TrajectoryRecord) -> dict[str, Any]:
    return {"stage": record.stage, "step": record.step, "group_id": record.group_id}


def copy_of(run: Path, folder: Path) -> Path:
    """A run that may be written to."""
    shutil.copytree(run, folder)
    with sqlite3.connect(folder / "run.db") as connection:
        connection.execute("DELETE FROM meta WHERE name = 'finished'")
    connection.close()
    return folder


def test_the_list_of_runs_says_where_each_is(trained: Path, serve: Serve) -> None:
    (run,) = serve(trained.parent).get("/api/runs")
    with RunReader(trained) as reader:
        stages = [dataclasses.asdict(stage) for stage in reader.stages()]
    assert run["name"] == "tiny"
    assert run["folder"] == str(trained)
    assert (run["state"], run["last_stage"], run["last_step"], run["stages"]) == ("finished", STAGE, STEP, stages)
    assert run["updated"] == (trained / "run.db").stat().st_mtime


def test_curves_of_the_overview_are_those_of_the_run(trained: Path, serve: Serve) -> None:
    server = serve(trained)
    overview = server.get(f"{server.run()}/overview")
    with RunReader(trained) as reader:
        for name, curves in overview["series"].items():
            told = [(c["stage"], *pair) for c in curves for pair in zip(c["steps"], c["values"], strict=True)]
            if name == "loss":
                assert told == [(step.stage, step.step, step.loss) for step in reader.steps()]
            else:
                assert told == [(point.stage, point.step, point.value) for point in reader.metric(name)]
        scores = [(row["stage"], row["step"], row["name"], row["score"]) for row in overview["evaluations"]]
        assert scores == reader_scores(reader)
    assert {"reward/mean", "policy/entropy", "gen/len_mean", "loss"} <= overview["series"].keys()


def reader_scores(reader: RunReader) -> list[tuple[Any, ...]]:
    rows = reader.query("SELECT stage, step, name, score FROM evaluations ORDER BY stage, step, name")
    return [tuple(row.values()) for row in rows]


def test_every_metric_of_the_run_is_listed_and_can_be_asked_for(trained: Path, serve: Serve) -> None:
    server = serve(trained)
    listed = server.get(f"{server.run()}/metrics")
    with RunReader(trained) as reader:
        names = {row["name"] for row in reader.query("SELECT DISTINCT name FROM metrics")}
    assert {metric["name"] for metric in listed} == names | {"loss"}
    assert next(metric for metric in listed if metric["name"] == "reward/mean")["unit"] == "reward"
    curves = server.get(f"{server.run()}/series", names="policy/grad_norm,no/such")
    assert len(curves["policy/grad_norm"]) == 2, "one curve per stage"
    assert curves["no/such"] == []


def test_rollouts_come_newest_first_in_draw_order(
    trained: Path, serve: Serve, rollouts: list[TrajectoryRecord]
) -> None:
    server = serve(trained)
    answer = server.get(f"{server.run()}/rollouts", limit=len(rollouts))
    assert [(row["group_id"], row["member"]) for row in answer["rows"]] == [(r.group_id, r.index) for r in rollouts]
    for row, record in zip(answer["rows"], rollouts, strict=True):
        assert row["text"] == record.text[:300]
        assert row["prompt"] == record.prompt[-1].content[:300]
        for name in ("task_id", "status", "score", "score_kind", "reason", "num_tokens", "outcome"):
            assert row[name] == getattr(record, name)
    assert answer["more"], "earlier steps follow"


@pytest.mark.parametrize(
    ("asked", "is_wanted"),
    [
        ({"min_reward": 0.5}, lambda r: r.score >= 0.5),
        ({"max_reward": 0.2, "stage": STAGE}, lambda r: r.score <= 0.2),
        ({"status": "truncated_length"}, lambda r: r.status == "truncated_length"),
        ({"min_length": 3, "max_length": 3}, lambda r: r.num_tokens == 3),
        ({"task": ":1:1"}, lambda r: ":1:1" in r.task_id),
        ({"q": "A"}, lambda r: "a" in (r.text + r.prompt[0].content).lower()),
        ({"q": "%"}, lambda r: False),
        ({"task": "spell_b_ckward"}, lambda r: False),
    ],
)
def test_filters_find_exactly_what_they_say(
    trained: Path, serve: Serve, asked: dict[str, Any], is_wanted: Callable[[TrajectoryRecord], bool]
) -> None:
    server = serve(trained)
    answer = server.get(f"{server.run()}/rollouts", step=2, step_to=7, limit=500, **asked)
    with RunReader(trained) as reader:
        everything = [record for step in range(7, 1, -1) for record in reader.trajectories(STAGE, step)]
    wanted = [(r.step, r.group_id, r.index) for r in everything if is_wanted(r)]
    assert [(row["step"], row["group_id"], row["member"]) for row in answer["rows"]] == wanted
    assert not answer["more"]
    part = server.get(f"{server.run()}/rollouts", step=2, step_to=7, limit=1, **asked)
    assert (part["total"], part["is_whole"]) == (len(wanted), True), "counted, also beyond what is shown"


def test_pages_of_rollouts_join_without_gap_or_overlap(trained: Path, serve: Serve) -> None:
    server = serve(trained)
    whole = server.get(f"{server.run()}/rollouts", limit=500)
    parts = [server.get(f"{server.run()}/rollouts", offset=offset, limit=50) for offset in (0, 50, 100)]
    assert [row for part in parts for row in part["rows"]] == whole["rows"]
    assert [part["more"] for part in parts] == [True, True, False]
    assert {part["total"] for part in parts} == {len(whole["rows"])}
    assert set(whole["statuses"]) == {status.value for status in Status}


def test_text_is_found_where_it_is_stored_as_json(tmp_path: Path, serve: Serve, trained: Path) -> None:
    run = copy_of(trained, tmp_path / "run")
    said = json.dumps([{"role": "tool", "content": 'a "quoted\nword" \\ 100%'}])
    with sqlite3.connect(run / "run.db") as connection:
        connection.execute("UPDATE trajectories SET messages = ? WHERE step = 3 AND member = 0", (said,))
    connection.close()
    server = serve(run)
    for text in ('"quoted\nword"', "\\ 100%"):
        found = server.get(f"{server.run()}/rollouts", q=text)["rows"]
        assert {(row["step"], row["member"]) for row in found} == {(3, 0)}


def test_a_search_that_runs_out_of_time_says_that_there_may_be_more(trained: Path) -> None:
    with reading(trained) as database:
        database._connection.set_progress_handler(lambda: True, 1)  # small runs end before the first look at the clock
        assert queries.rollouts(database, queries.RolloutFilter(stage=1, q="zebra"), 0, 50) == ([], True)
        assert queries.count_rollouts(database, queries.RolloutFilter(q="zebra")) == (None, False)
    with reading(trained) as database:
        assert queries.rollouts(database, queries.RolloutFilter(q="zebra"), 0, 50) == ([], False)


def test_a_page_that_runs_out_of_time_says_so(trained: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(database: Any) -> Any:
        raise OutOfTime("this question takes too long")

    monkeypatch.setattr(queries, "group_rates", slow)
    server = serve(trained)
    answer = server.ask(f"{server.run()}/data")
    assert (answer.status_code, answer.json()) == (503, {"error": "this question takes too long"})


def test_a_group_shows_its_members_with_their_credit(
    trained: Path, serve: Serve, rollouts: list[TrajectoryRecord]
) -> None:
    server = serve(trained)
    group = server.get(f"{server.run()}/group", **key_of(rollouts[0]))
    members = [record for record in rollouts if record.group_id == rollouts[0].group_id]
    assert (group["task_id"], group["answer"], group["outcome"]) == (
        members[0].task_id, members[0].answer, members[0].outcome,
    )  # fmt: skip
    assert group["prompt"] == [message.as_dict() for message in members[0].prompt]
    for told, record in zip(group["members"], members, strict=True):
        assert (told["member"], told["text"], told["score"]) == (record.index, record.text, record.score)
        assert (told["parts"], told["weighted"]) == (record.parts, record.weighted)
        row = record.rows[0]
        expected = None if row.advantages is None else row.advantages[row.loss_mask == 1].mean()
        assert told["mean_advantage"] == (None if expected is None else pytest.approx(expected))


def test_a_trajectory_shows_every_token_with_its_numbers(
    trained: Path, serve: Serve, rollouts: list[TrajectoryRecord]
) -> None:
    server = serve(trained)
    record = next(record for record in rollouts if record.rows[0].advantages is not None)
    told = server.get(f"{server.run()}/trajectory", **key_of(record), member=record.index)
    assert told["messages"] == [message.as_dict() for message in record.messages]
    assert (told["status"], told["score"], told["events"]) == (record.status, record.score, [])
    (row,) = told["rows"]
    for name in ("token_ids", "loss_mask", "versions"):
        assert row[name] == getattr(record.rows[0], name).tolist()
    for name in ("behavior_logprobs", "policy_logprobs", "advantages", "weights", "entropies"):
        stored = getattr(record.rows[0], name)
        assert row[name] == (None if stored is None else pytest.approx(stored.tolist(), rel=1e-5, abs=1e-12))
    drawn = [piece for piece, mask in zip(row["pieces"], row["loss_mask"], strict=True) if mask]
    assert "".join(drawn).removesuffix("<|end|>") == record.text
    assert row["pieces"][0].startswith("<|")


def test_pages_say_that_a_transcript_was_dropped(
    trained: Path, tmp_path: Path, serve: Serve, rollouts: list[TrajectoryRecord]
) -> None:
    run = copy_of(trained, tmp_path / "run")
    with closing(sqlite3.connect(run / "run.db")) as connection, connection:
        limit_transcripts(connection, 9, 1, 0.0)  # a step without rollouts: the newest of the others stays
    server, kept = serve(run), rollouts[0]
    rows = server.get(f"{server.run()}/rollouts", limit=1000)["rows"]
    dropped = [row for row in rows if row["text"] is None]
    assert {row["step"] for row in rows if row["text"] is not None} == {kept.step}
    assert dropped
    assert all(row["num_tokens"] and row["status"] for row in dropped)
    place = {name: dropped[0][name] for name in ("stage", "step", "group_id")}
    group = server.get(f"{server.run()}/group", **place)
    assert {(member["text"], member["mean_advantage"]) for member in group["members"]} == {(None, None)}
    told = server.get(f"{server.run()}/trajectory", **place, member=0)
    assert (told["text"], told["messages"], told["rows"]) == (None, [], [])
    assert told["prompt"], "what was asked is kept"
    assert server.get(f"{server.run()}/systems")["staleness"]["ages"], "of the steps that still have their tokens"


def test_tokens_are_shown_as_ids_when_the_run_has_no_tokenizer(
    trained: Path, tmp_path: Path, serve: Serve, rollouts: list[TrajectoryRecord]
) -> None:
    run = copy_of(trained, tmp_path / "run")
    shutil.rmtree(run / "model")
    shutil.rmtree(run / "checkpoints")
    server = serve(run)
    told = server.get(f"{server.run()}/trajectory", **key_of(rollouts[0]), member=0)
    assert told["rows"][0]["pieces"] == [str(token) for token in told["rows"][0]["token_ids"]]


def test_a_damaged_tokenizer_gives_way_to_the_next(trained: Path, tmp_path: Path) -> None:
    run = copy_of(trained, tmp_path / "run")
    (run / "model" / "tokenizer.json").write_text("{")
    whole = Tokenizers().pieces(trained, [5, 6, 7])
    assert Tokenizers().pieces(run, [5, 6, 7]) == whole != ["5", "6", "7"]


def test_pieces_of_byte_tokens_add_up_and_half_characters_stay_where_they_are() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(["the cat sat on the mat"] * 5, tokenizers.trainers.BpeTrainer(initial_alphabet=alphabet))
    pieces = Pieces(lambda ids: made.decode(ids, skip_special_tokens=False), made.get_vocab_size())
    plain = made.encode("the cat sat").ids
    assert len(plain) < len("the cat sat")
    assert "".join(pieces.of(plain)) == "the cat sat"
    assert pieces.of(made.encode("né").ids) == ["n", REPLACEMENT, REPLACEMENT]


def test_pieces_keep_the_blank_before_a_word() -> None:
    """Decoders of the SentencePiece kind drop it at the start of a text."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"▁the": 0, "▁cat": 1, "s": 2}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    made.decoder = tokenizers.decoders.Metaspace()
    pieces = Pieces(lambda ids: made.decode(ids), 3)
    assert made.decode([1]) == "cat"
    assert pieces.of([0, 1, 2]) == [" the", " cat", "s"]


def test_the_data_page_counts_what_the_ledger_holds(trained: Path, serve: Serve) -> None:
    server = serve(trained)
    data = server.get(f"{server.run()}/data")
    with RunReader(trained) as reader:
        ledger = reader.ledger()
        groups: dict[tuple[int, str], list[float]] = {}
        for step in range(1, STEP + 1):
            for record in reader.trajectories(STAGE, step):
                groups.setdefault((step, record.group_id), []).append(float(record.score or 0))
    assert data["ledger"]["drawn"] == len(ledger)
    assert data["ledger"]["distinct"] == len({entry.task_id for entry in ledger})
    assert data["ledger"]["trained"] == sum(entry.outcome == "trained" for entry in ledger)
    assert sum(data["ledger"]["dropped"].values()) == len(ledger) - data["ledger"]["trained"]
    for name, steps in (("early", (1, 2)), ("late", (7, 8))):
        rates = [np.mean(scores) for (step, _), scores in groups.items() if step in steps]
        assert data["histogram"][name] == np.histogram(rates, data["histogram"]["edges"])[0].tolist()
    assert data["hardest"][0]["rate"] == pytest.approx(min(np.mean(scores) for scores in groups.values()))
    assert data["hardest"][0]["rate"] <= data["easiest"][0]["rate"]
    assert data["curriculum"] is None, "one family of tasks is no curriculum"
    assert set(data["series"]) == {"data/all_pass", "data/all_fail", "data/degenerate"}


def test_the_systems_page_splits_the_time(trained: Path, serve: Serve) -> None:
    server = serve(trained)
    systems = server.get(f"{server.run()}/systems")
    with RunReader(trained) as reader:
        totals = reader.seconds()
        trained_count = sum(record.rows[0].advantages is not None
                            for step in range(1, STEP + 1) for record in reader.trajectories(STAGE, step))  # fmt: skip
    for name, curves in systems["seconds"].items():
        for curve in curves:
            assert sum(curve["values"]) == pytest.approx(totals[curve["stage"], name])
    assert systems["staleness"] == {"ages": [0], "counts": [trained_count]}, "synchronous training has no age"
    assert 0 < systems["idle"]["trainer"] < 1
    assert 0 < systems["idle"]["sampler"] < 1
    assert "sys/kv_use" in systems["series"]


def test_evaluations_audits_alarms_and_suites_are_shown(trained: Path, tmp_path: Path, serve: Serve) -> None:
    run = copy_of(trained, tmp_path / "run")
    store = open_run(run, config=(run / "config.toml").read_text(), resume=True)
    asked = (Message(role="user", content="<script>alert(1)</script>"),)
    audit = AuditRecord(stage=1, step=8, evaluation="greedy", kind="top", place=0, task_id="t", prompt=asked,
                        text="</script>", reward=1.0, heldout=math.nan)  # fmt: skip
    alarm = AlarmRecord(stage=1, step=8, time=5.0, rule="kl_spike", level="warn", value=math.inf, text="saw",
                        meaning="means", advice="try")  # fmt: skip
    store.audit([audit])
    store.alarm(alarm)
    store.event("note", "something")
    store.close()
    save(suite_result(), run / "evaluations" / "sums.json")
    (run / "evaluations" / "other.json").write_text("[1, 2]")
    server = serve(run)
    told = server.get(f"{server.run()}/evaluations")
    (planted,) = [one for one in told["audits"] if one["task_id"] == "t"]
    assert planted == {**dataclasses.asdict(audit), "prompt": [asked[0].as_dict()], "heldout": None}
    (suite,) = told["suites"]
    assert [one["file"] for one in told["unreadable"]] == ["other.json"]
    assert suite["suite"] == "sums"
    assert suite["prompts"] == [{"task_id": "t", "scores": [1.0, None]}]
    assert suite["curves"]["pass"] == [{"k": 1, "score": 0.5, "low": 0.1, "high": 0.9},
                                       {"k": 4, "score": 0.9, "low": 0.7, "high": 1.0}]  # fmt: skip
    assert [point["k"] for point in suite["curves"]["pass^"]] == [4]
    assert "secret words" not in json.dumps(told)
    overview = server.get(f"{server.run()}/overview")
    assert {**dataclasses.asdict(alarm), "value": None} in overview["alarms"]
    assert overview["events"][-1]["text"] == "something"


def suite_result() -> SuiteResult:
    def score(middle: float, low: float, high: float) -> dict[str, float]:
        return {"score": middle, "low": low, "high": high}

    samples = (
        SampleResult(score=1.0, num_tokens=3, text="secret words"),
        SampleResult(score=None, reason="no verdict", num_tokens=3, text="secret words"),
    )
    return SuiteResult(
        suite="sums", checkpoint="c", weights_sha256="ab", created=1.0, budget={"samples": 2}, constant_score=None,
        metrics={"pass@4": score(0.9, 0.7, 1.0), "pass@1": score(0.5, 0.1, 0.9), "pass^4": score(0.2, 0.1, 0.3)},
        prompts=(PromptResult(task_id="t", prompt="1 + 1?", gold="2", samples=samples),),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda whole: b"", "it is not JSON (Expecting value"),
        (lambda whole: whole[: len(whole) // 2], "it is not JSON ("),
        (lambda whole: b"\xff" + whole, "it is not JSON ("),
        (lambda whole: b"[" * 100_000, "it is not JSON ("),
        (lambda whole: b"[1, 2]", "it is not a result of temper eval in format 1 (found None)"),
        (lambda whole: whole.replace(b'"format": 1', b'"format": 2'), "it is not a result of temper eval in format 1"),
        (lambda whole: whole.replace(b'"prompts"', b'"prompt"'), "(KeyError: 'prompts')"),
        (lambda whole: whole.replace(b'"created": 1.0', b'"created": "noon"'), "it is a damaged result of temper eval"),
        (lambda whole: whole.replace(b'"samples": [', b'"samples": 3, "more": ['), "it is a damaged result"),
    ],
    ids=["empty", "cut", "bytes", "nested", "a list", "format", "key", "time", "type"],
)
def test_a_result_that_cannot_be_read_is_named_with_its_reason(
    trained: Path, tmp_path: Path, serve: Serve, damage: Callable[[bytes], bytes], reason: str
) -> None:
    run = copy_of(trained, tmp_path / "run")
    save(suite_result(), run / "evaluations" / "whole.json")
    whole = (run / "evaluations" / "whole.json").read_bytes()
    assert damage(whole) != whole
    (run / "evaluations" / "hurt.json").write_bytes(damage(whole))
    server = serve(run)
    told = server.get(f"{server.run()}/evaluations")
    assert [suite["file"] for suite in told["suites"]] == ["whole.json"], "the others are shown all the same"
    (hurt,) = told["unreadable"]
    assert hurt["file"] == "hurt.json"
    assert reason in hurt["reason"]


def test_results_that_cannot_be_opened_are_named_and_a_mended_one_is_shown(
    trained: Path, tmp_path: Path, serve: Serve
) -> None:
    run = copy_of(trained, tmp_path / "run")
    (run / "evaluations" / "folder.json").mkdir(parents=True)
    (run / "evaluations" / "gone.json").symlink_to(tmp_path / "nowhere.json")
    (run / "evaluations" / "sums.json").write_text("{")
    server = serve(run)
    told = server.get(f"{server.run()}/evaluations")
    assert told["suites"] == []
    reasons = {one["file"]: one["reason"] for one in told["unreadable"]}
    assert reasons["folder.json"] == "it cannot be opened (Is a directory)"
    assert reasons["gone.json"] == "it cannot be opened (No such file or directory)"
    assert "not JSON" in reasons["sums.json"]
    save(suite_result(), run / "evaluations" / "sums.json")
    told = server.get(f"{server.run()}/evaluations")
    assert [suite["file"] for suite in told["suites"]] == ["sums.json"]
    assert "sums.json" not in {one["file"] for one in told["unreadable"]}


def test_the_dashboard_knows_the_format_that_is_written() -> None:
    assert suites.FORMAT == results.FORMAT


def test_configurations_are_shown_and_compared_key_by_key(trained: Path, tmp_path: Path, serve: Serve) -> None:
    other = tmp_path / "other"
    shutil.copytree(trained, other)
    text = (other / "config.toml").read_text()
    (other / "config.toml").write_text(text.replace("learning_rate = 0.001", "learning_rate = 0.5"))
    server = serve(trained, other)
    config = server.get(f"{server.run('tiny')}/config")
    assert config["toml"] == text
    assert [stage["kind"] for stage in config["stages"]] == ["sft", "rl"]
    ids = {run["name"]: run["id"] for run in server.get("/api/runs")}
    assert server.get("/api/config-diff", a=ids["tiny"], b=ids["other"]) == [
        {"key": "rl.optim.learning_rate", "a": 0.001, "b": 0.5}
    ]
    assert server.get("/api/config-diff", a=ids["tiny"], b=ids["tiny"]) == []


def test_a_run_of_the_earlier_layout_still_opens(trained: Path, tmp_path: Path, serve: Serve) -> None:
    run = copy_of(trained, tmp_path / "run")
    assert "2" in OLD_LAYOUTS
    with sqlite3.connect(run / "run.db") as connection:
        for name in ARRAY_TYPES:
            connection.create_function(
                "raw", 1, lambda blob, name=name: blob and unpack_array(blob, name, PLANES).tobytes()
            )
            connection.execute(f"UPDATE token_rows SET {name} = raw({name})")
        connection.execute("ALTER TABLE token_rows DROP COLUMN codec")
        connection.execute("DROP TABLE loads")
        connection.execute("DROP TABLE prompts")
        connection.execute("DROP TABLE transcripts")
        connection.execute("DROP TABLE audits")
        connection.execute("DROP TABLE alarms")
        connection.execute("DROP TABLE verdicts")
        connection.execute("ALTER TABLE token_rows DROP COLUMN entropies")
        connection.execute("ALTER TABLE evaluations DROP COLUMN details")
        connection.execute("UPDATE meta SET value = '2' WHERE name = 'schema'")
    connection.close()
    server = serve(run)
    for page in ("overview", "metrics", "data", "systems", "evaluations", "config", "rollouts"):
        server.get(f"{server.run()}/{page}")
    row = server.get(f"{server.run()}/rollouts", limit=1)["rows"][0]
    key = {name: row[name] for name in ("stage", "step", "group_id", "member")}
    shown = server.get(f"{server.run()}/trajectory", **key)
    assert (shown["rows"][0]["entropies"], shown["verdicts"]) == (None, [])


def test_what_judges_said_is_shown_beside_the_rollout(trained: Path, tmp_path: Path, serve: Serve) -> None:
    run = copy_of(trained, tmp_path / "run")
    server = serve(run)
    row = server.get(f"{server.run()}/rollouts", limit=1)["rows"][0]
    key = {name: row[name] for name in ("stage", "step", "group_id", "member")}
    with sqlite3.connect(run / "run.db") as connection:
        for member, value in ((key["member"], 0.7), (key["member"] + 1, 0.1)):
            place = (key["stage"], key["step"], "judge", "t", key["group_id"], member)
            said = (*place, "value", value, None, "abc", '{"criterion": "<b>"}')
            connection.execute(f"INSERT INTO verdicts VALUES ({', '.join('?' * len(said))})", said)
    connection.close()
    assert server.get(f"{server.run()}/trajectory", **key)["verdicts"] == [
        {"part": "judge", "kind": "value", "value": 0.7, "reason": None, "fingerprint": "abc",
         "detail": {"criterion": "<b>"}}
    ]  # fmt: skip


def test_a_run_of_a_later_layout_is_listed_with_its_fault_and_spoils_no_other(
    trained: Path, tmp_path: Path, serve: Serve
) -> None:
    run = copy_of(trained, tmp_path / "runs" / "later")
    shutil.copytree(trained, tmp_path / "runs" / "fine")
    with sqlite3.connect(run / "run.db") as connection:
        connection.execute("UPDATE meta SET value = '99' WHERE name = 'schema'")
    connection.close()
    server = serve(tmp_path / "runs")
    faults = {told["name"]: told["error"] for told in server.get("/api/runs")}
    assert faults["fine"] is None
    assert "99" in faults["later"]
    answer = server.ask(f"{server.run('later')}/overview")
    assert answer.status_code == 409
    assert "99" in answer.json()["error"]


def test_runs_that_come_and_go_are_noticed(
    trained: Path, tmp_path: Path, serve: Serve, eventually: Callable[[Callable[[], bool]], None]
) -> None:
    server = serve(tmp_path)
    assert server.get("/api/runs") == []
    shutil.copytree(trained, tmp_path / "new")
    eventually(lambda: [run["name"] for run in server.get("/api/runs")] == ["new"])
    address = server.run("new")
    shutil.rmtree(tmp_path / "new")
    assert server.ask(f"{address}/overview").status_code in (404, 409), "gone, whether or not it was noticed yet"
    eventually(lambda: server.get("/api/runs") == [])
    assert server.ask(f"{address}/overview").status_code == 404


def test_runs_are_found_below_a_folder_and_not_inside_of_runs(tmp_path: Path) -> None:
    for name in ("a", "deep/er/b", "a/inner/c", "unbegun/checkpoints/c", ".hidden/d", "way/too/deep/down/e"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "run.db").touch()
    assert find_runs(tmp_path) == [tmp_path / "a", tmp_path / "deep" / "er" / "b"]
    with pytest.raises(UserError, match="not a directory"):
        Registry([tmp_path / "nowhere"])


def test_unknown_things_are_answered_in_words(trained: Path, serve: Serve) -> None:
    server = serve(trained)
    run = server.run()
    for path, status in [
        ("/api/runs/nothing/overview", 404),
        ("/api/runs/..%2f..%2fetc/overview", 404),
        ("/api/stream?run=nothing", 404),
        ("/api/nothing", 404),
        (f"{run}/nothing", 404),
        (f"{run}/group?stage=1&step=1&group_id=nothing", 404),
        (f"{run}/group?stage=1", 400),
        (f"{run}/rollouts?step=abc", 400),
        (f"{run}/rollouts?step={10**30}", 400),
        (f"{run}/rollouts?q={'x' * 2000}", 400),
    ]:
        answer = server.ask(path)
        assert answer.status_code == status, path
        assert answer.headers["content-type"] == "application/json"
        assert list(answer.json()) == ["error"]


def test_nothing_but_reading_is_possible(trained: Path, serve: Serve) -> None:
    server = serve(trained)
    for method in ("POST", "DELETE", "PATCH", "OPTIONS"):
        assert exchange(server, method, "/api/runs").startswith("HTTP/1.1 405")
    for path in ("/api/runs", "/api/table", f"{server.run()}/config", f"{server.run()}/overview", "/"):
        assert server.put(path, {"tags": [], "note": ""}).status_code == 405, path  # notes alone are written
    connection = connect(trained / "run.db")
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        connection.execute("DELETE FROM steps")
    connection.close()


def test_another_sites_name_for_this_machine_is_refused(trained: Path, serve: Serve) -> None:
    server = serve(trained)
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil", "[::2]", ""):
        assert exchange(server, "GET", "/api/runs", host).startswith("HTTP/1.1 403"), host
    for host in ("127.0.0.1", "localhost:9999", "LOCALHOST", "[::1]:80"):
        assert exchange(server, "GET", "/api/runs", host).startswith("HTTP/1.1 200"), host


def exchange(server: Any, method: str, path: str, host: str = "127.0.0.1") -> str:
    """A request as it is written, with nothing tidied up by a client library."""
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=20) as wire:
        wire.sendall(f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        return b"".join(iter(lambda: wire.recv(65536), b"")).decode("latin-1")


def test_no_path_leads_out_of_the_static_files(trained: Path, serve: Serve) -> None:
    server = serve(trained)
    for path in (
        "/static/../server.py", "/static/..%2fserver.py", "/static/%2e%2e/server.py", "/static/%2e%2e%2fserver.py",
        "/static/..%5cserver.py", "/static//etc/passwd", "/static/%2fetc%2fpasswd", "/static/....//server.py",
        "/static/%252e%252e%252fserver.py", "/static/", "/static/.", "/../../etc/passwd", "/static/index.html%00.js",
    ):  # fmt: skip
        answer = exchange(server, "GET", path)
        assert answer.startswith(("HTTP/1.1 404", "HTTP/1.1 400")), path
        assert "import" not in answer
        assert "root:" not in answer


def test_static_files_are_sent_once_and_plotly_is_the_installed_one(trained: Path, serve: Serve) -> None:
    server = serve(trained)
    answer = server.ask("/static/plotly.min.js")
    assert answer.content == static_files()["plotly.min.js"].read_bytes()
    assert answer.headers["content-type"].startswith("text/javascript")
    again = server.ask("/static/plotly.min.js", **{"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_every_answer_tells_the_browser_to_run_nothing_foreign(trained: Path, serve: Serve) -> None:
    server = serve(trained)
    for path in ("/", "/api/runs", "/api/nothing", "/static/plotly.min.js"):
        headers = server.ask(path).headers
        policy = dict(part.strip().partition(" ")[::2] for part in headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == "'self'", "no inline script, no eval, no other site"
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers


def test_numbers_that_are_not_finite_are_null(trained: Path, tmp_path: Path, serve: Serve) -> None:
    run = copy_of(trained, tmp_path / "run")
    with sqlite3.connect(run / "run.db") as connection:
        connection.execute("UPDATE metrics SET value = 9e999 WHERE name = 'reward/mean' AND step = 3")
        connection.execute("UPDATE metrics SET value = NULL WHERE name = 'reward/mean' AND step = 4")
    connection.close()
    server = serve(run)
    (curve,) = server.get(f"{server.run()}/series", names="reward/mean")["reward/mean"]
    assert [step for step, value in zip(curve["steps"], curve["values"], strict=True) if value is None] == [3, 4]


def test_thinning_keeps_peaks_ends_and_holes() -> None:
    values: list[float | None] = [math.sin(k / 50) for k in range(5000)]
    values[1234], values[4321] = 99.0, -99.0
    values[2000:2100] = [None] * 100
    kept = thin(values, 1000)
    assert len(kept) <= 1000
    assert {0, 1234, 4321, 4999} <= set(kept)
    assert kept == sorted(set(kept))
    assert any(values[place] is None for place in kept)
    assert thin(values[:1000], 1000) == list(range(1000))


def test_curves_of_several_stages_share_the_points() -> None:
    points = [(stage, step, float(step)) for stage, size in ((0, 100), (1, 9900)) for step in range(size)]
    curves = by_stage(points, 1000)
    assert [curve["stage"] for curve in curves] == [0, 1]
    assert sum(len(curve["steps"]) for curve in curves) <= 1000
    assert [curve["steps"][-1] for curve in curves] == [99, 9899]


def test_parts_of_a_whole_are_thinned_to_the_same_steps() -> None:
    rollout = [(0, step, 9.0 if step == 777 else 1.0) for step in range(3000)]
    publish = [(0, step, 5.0 if step == 778 else 0.5) for step in range(3000)]
    parts = together({"rollout": rollout, "publish": publish}, 500)
    (one,), (other,) = parts["rollout"], parts["publish"]
    assert one["steps"] == other["steps"]
    assert 777 in one["steps"]
    assert len(one["steps"]) <= 500


def test_a_curriculum_is_shown_by_family() -> None:
    rates = [(0, 1, "a", 0.0), (0, 1, "b", 1.0), (0, 2, "c", 0.5), (0, 2, "d", 1.0)]
    tasks = {(0, 1, "a"): "sums:1:1", (0, 1, "b"): "poems:1:1", (0, 2, "c"): "sums:1:2", (0, 2, "d"): "sums:1:3"}
    assert pages._curriculum(rates, tasks) == {
        "sums": [{"stage": 0, "steps": [1, 2], "values": [0.0, 0.75]}],
        "poems": [{"stage": 0, "steps": [1], "values": [1.0]}],
    }


def test_the_dashboard_starts_without_torch() -> None:
    code = "import sys, temper.commands.watch; assert 'torch' not in sys.modules and 'fastapi' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
