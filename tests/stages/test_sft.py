"""Supervised rows train what assistants said and its ends, nothing else, however they are packed and resumed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from temper.batching.pack import pack
from temper.errors import UserError
from temper.models.load import prepare
from temper.models.tiny import character_tokenizer
from temper.objectives import Objective
from temper.objectives.losses.likelihood import SFT, likelihood
from temper.stages.reading.examples import example_rows
from temper.stages.sft import Examples
from temper.tasks.dataset import Stream, read_file
from temper.tasks.generators import make_source
from temper.tasks.render import Renderer
from temper.trainer.local import LocalTrainer, TrainerSettings
from temper.trainer.optim import OptimizerSettings
from temper.trainer.passes.forward import StepFacts, forward_backward
from temper.types import Batch, Message, Sample, Task

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 \n"
TOKENIZER = character_tokenizer(ALPHABET)
END = TOKENIZER.eos_token_id
# Digits are the system's, a to m the user's, n to z the assistant's: who said a token shows in the token.
SPOKEN = frozenset(TOKENIZER.convert_tokens_to_ids(list("nopqrstuvwxyz")))
CHAT = [
    {"role": "system", "content": "123"},
    {"role": "user", "content": "abc"},
    {"role": "assistant", "content": "nopq"},
    {"role": "user", "content": "de"},
    {"role": "assistant", "content": "rs"},
]
TURN = [{"from": "human", "value": "abc"}, {"from": "gpt", "value": "nop"}]

ROWS: dict[str, list[dict[str, Any]]] = {
    "messages": [{"messages": CHAT}, {"messages": CHAT[:3]}],
    "sharegpt": [{"conversations": TURN, "system": "12"}, {"conversations": [*TURN, *TURN]}],
    "completion": [{"prompt": "abc", "completion": "nop"}, {"prompt": "d", "completion": "zz"}],
    "turns": [{"prompt": CHAT[:2], "completion": CHAT[2:]}, {"prompt": CHAT[:2], "completion": "t"}],
    "instruction": [{"instruction": "ab", "input": "cd", "output": "no"}, {"instruction": "e", "output": "p"}],
    "history": [{"instruction": "ab", "output": "no", "history": [["c", "qr"], ["d", "st"]]}],
    "question": [{"question": "ab", "answer": "no"}, {"question": "c", "answer": "pqr"}],
    "named": [{"prompt": "ab", "answer": "no"}, {"prompt": "c", "answer": "pqr"}],
}


def tiny_model(dtype: torch.dtype = torch.float64) -> Any:
    config = LlamaConfig(
        vocab_size=len(TOKENIZER), hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).to(dtype).eval()


def tasks_of(folder: Path, schema: str) -> tuple[Task, ...]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS[schema]))
    return read_file(path).tasks


class InOrder:
    """Tasks as they come, again and again."""

    def __init__(self, tasks: tuple[Task, ...]) -> None:
        self.tasks, self.draws = tasks, 0

    def next(self) -> tuple[int, Task]:
        self.draws += 1
        return self.draws - 1, self.tasks[(self.draws - 1) % len(self.tasks)]

    def state(self) -> dict[str, Any]:
        return {"draws": self.draws}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.draws = state["draws"]


def batch_of(tasks: tuple[Task, ...], renderer: Renderer | None = None) -> Batch:
    source = Examples(InOrder(tasks), renderer or Renderer(TOKENIZER), SFT, batch_size=len(tasks), max_length=128)
    return asyncio.run(source.take(1))


def gradient(
    model: Any, rows: tuple[Sample, ...], *, budget: int = 4096, objective: Objective = SFT
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss, and the gradient of every parameter, as the trainer makes them."""
    facts = StepFacts(num_batch_tokens=sum(row.num_actions for row in rows), seed=7)
    loss = 0.0
    for microbatch in pack(rows, budget, torch.float64):
        loss += float(forward_backward(model, microbatch, objective, temperature=1.0, facts=facts)[0])
    return loss, {name: parameter.grad for name, parameter in model.named_parameters()}


def reference(rows: tuple[Sample, ...], is_label: Callable[[list[int], int], bool]) -> tuple[float, dict[str, Any]]:
    """The same by transformers' own forward pass, row by row, with labels where `is_label` says so."""
    model = tiny_model()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in rows:
        ids = row.token_ids
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        labels = [t for t in range(1, len(ids)) if is_label(ids, t)]
        total = total - sum(logprobs[t - 1, ids[t]] for t in labels)
        count += len(labels)
    loss = total / count
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def is_spoken(ids: list[int], place: int) -> bool:
    """By letters alone, without the code under test: what the assistant says, and the end after it."""
    return ids[place] in SPOKEN or (ids[place] == END and ids[place - 1] in SPOKEN)


@pytest.mark.parametrize("schema", ROWS)
def test_the_gradient_of_every_schema_is_that_of_the_assistants_tokens_alone(tmp_path: Path, schema: str) -> None:
    (rows,) = batch_of(tasks_of(tmp_path, schema)).updates
    wanted, gradients = reference(rows, is_spoken)
    loss, ours = gradient(prepare(tiny_model()), rows)
    assert loss == pytest.approx(wanted, rel=1e-12)
    assert max(float((ours[name] - g).abs().max()) for name, g in gradients.items()) < 1e-12


@pytest.mark.parametrize("schema", ROWS)
@pytest.mark.parametrize(
    "faulty",
    [
        lambda ids, place: ids[place] in SPOKEN,  # ends are not learned
        lambda ids, place: is_spoken(ids, place) or is_spoken([*ids, 0], place + 1),  # one token too early
        lambda ids, place: is_spoken(ids, place) or place == 1,  # a token of somebody else
        lambda ids, place: True,
    ],
)
def test_a_mask_that_is_wrong_by_one_token_is_seen(tmp_path: Path, schema: str, faulty: Any) -> None:
    (rows,) = batch_of(tasks_of(tmp_path, schema)).updates
    assert abs(reference(rows, faulty)[0] - gradient(prepare(tiny_model()), rows)[0]) > 1e-6


@pytest.mark.parametrize("schema", ROWS)
def test_a_changed_token_changes_the_loss_where_it_is_said_or_asked_for_and_nowhere_else(
    tmp_path: Path, schema: str
) -> None:
    model = prepare(tiny_model())
    with torch.no_grad():  # no token sees another: it matters as what is predicted, and as what predicts the next
        for layer in model.model.layers:  # type: ignore[operator, union-attr]
            layer.self_attn.o_proj.weight.zero_()
    (rows,) = batch_of(tasks_of(tmp_path, schema)).updates
    for row in rows:
        before = gradient(model, (row,))[0]
        for place, token in enumerate(row.token_ids):
            changed = [*row.token_ids]
            changed[place] = (token + 1) % len(TOKENIZER)
            is_seen = gradient(model, (replace(row, token_ids=changed),))[0] != before
            said = [is_spoken(row.token_ids, at) for at in (place, place + 1) if 0 < at < len(row.token_ids)]
            assert is_seen == any(said), (schema, place)


def test_what_follows_the_last_trained_token_changes_nothing() -> None:
    said = tuple(Message(role=m["role"], content=m["content"]) for m in CHAT[:4])
    task = Task(id="t", messages=said, answer="rs", extra={"trained_turns": "all"})
    (row,) = batch_of((task,)).updates[0]

    def followed_by(*ids: int) -> tuple[float, dict[str, torch.Tensor]]:
        blank = {name: [*getattr(row, name), *[0.0] * len(ids)] for name in ("behavior_logprobs", "advantages")}
        longer = replace(
            row,
            token_ids=[*row.token_ids, *ids],
            loss_mask=[*row.loss_mask, *[0] * len(ids)],
            weights=[*row.weights, *[0.0] * len(ids)],
            versions=[*row.versions, *[-1] * len(ids)],
            **blank,
        )
        return gradient(prepare(tiny_model()), (longer,))

    loss, gradients = followed_by()
    for ids in ((9, 10), (11, 12, 13)):
        other_loss, other = followed_by(*ids)
        assert other_loss == pytest.approx(loss, rel=1e-12)
        assert all(torch.allclose(g, other[name], rtol=0, atol=1e-13) for name, g in gradients.items())


def test_a_turn_that_nobody_answers_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = []
    for asked in ("f", "ghi"):
        path.write_text(json.dumps({"messages": [*CHAT, {"role": "user", "content": asked}]}))
        rows += batch_of(read_file(path).tasks).updates
    assert rows[0] == rows[1]


@pytest.mark.parametrize(("turns", "text"), [("all", "nopq<|end|>rs<|end|>"), ("1", "rs<|end|>"), (None, "rs<|end|>")])
def test_trained_turns_says_which_assistants_are_learned(turns: str | None, text: str) -> None:
    said = tuple(Message(role=m["role"], content=m["content"]) for m in CHAT[:4])
    task = Task(id="t", messages=said, answer="rs", extra={} if turns is None else {"trained_turns": turns})
    (row,) = example_rows(Renderer(TOKENIZER), task, max_length=99)
    assert TOKENIZER.decode([i for i, m in zip(row.token_ids, row.loss_mask, strict=True) if m]) == text


@pytest.mark.parametrize(
    "direct_loss", [likelihood(), likelihood(smoothing=0.2), likelihood(noise=5.0), likelihood(0.1, 10.0)], ids=str
)
def test_the_gradient_does_not_depend_on_packing(tmp_path: Path, direct_loss: Any) -> None:
    objective = replace(SFT, loss=direct_loss)
    (rows,) = batch_of((*tasks_of(tmp_path, "messages"), *tasks_of(tmp_path, "history"))).updates
    apart, together = (gradient(prepare(tiny_model()), rows, budget=b, objective=objective) for b in (1, 4096))
    reverse = gradient(prepare(tiny_model()), tuple(reversed(rows)), budget=40, objective=objective)
    for other in (together, reverse):
        assert other[0] == pytest.approx(apart[0], rel=1e-12)
        assert max(float((apart[1][name] - g).abs().max()) for name, g in other[1].items()) < 1e-12


def test_noise_from_one_generator_for_all_rows_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def common(microbatch: Any, width: int, alpha: float, seed: int, device: Any) -> torch.Tensor:
        draw = torch.Generator().manual_seed(seed)
        return torch.rand(len(microbatch.token_ids), width, generator=draw)

    monkeypatch.setattr("temper.trainer.passes.noise.row_noise", common)
    objective = replace(SFT, loss=likelihood(noise=5.0))
    (rows,) = batch_of(tasks_of(tmp_path, "messages")).updates
    apart, together = (gradient(prepare(tiny_model()), rows, budget=b, objective=objective) for b in (1, 4096))
    assert abs(apart[0] - together[0]) > 1e-6


def test_a_template_that_rewrites_history_gives_rows_of_one_trajectory() -> None:
    tokenizer = character_tokenizer(ALPHABET)
    # Writes a mark before the last answer only.
    tokenizer.chat_template = str(tokenizer.chat_template).replace(
        "{{ message['content'] }}", "{% if loop.last and message['role'] == 'assistant' %}9{% endif %}"
        "{{ message['content'] }}",
    )  # fmt: skip
    said = tuple(Message(role=m["role"], content=m["content"]) for m in CHAT[:4])
    task = Task(id="t", messages=said, answer="rs", extra={"trained_turns": "all"})
    (rows,) = batch_of((task,), Renderer(tokenizer)).updates
    spoken = [[i for i, m in zip(row.token_ids, row.loss_mask, strict=True) if m] for row in rows]
    assert [tokenizer.decode(ids) for ids in spoken] == ["9nopq<|end|>", "9rs<|end|>"]
    assert len({(row.group_id, row.index) for row in rows}) == 1
    assert sum(weight for row in rows for weight in row.weights) == pytest.approx(1.0)


def stream() -> Stream:
    return Stream([make_source("spell_backward", {}, seed=1, size=5)], [1.0], seed=0)


def examples(batch_size: int = 4, **options: Any) -> Examples:
    options = {"max_length": 64, **options}
    return Examples(stream(), Renderer(TOKENIZER), SFT, batch_size=batch_size, **options)


def take(source: Examples, step: int) -> tuple[Sample, ...]:
    (samples,) = asyncio.run(source.take(step)).updates
    return samples


def test_weights_of_a_batch_are_one_over_its_answer_tokens() -> None:
    samples = take(examples(), 1)
    weights = torch.tensor([w for sample in samples for w in sample.weights if w])
    assert torch.allclose(weights, torch.full_like(weights, 1 / len(weights)))


def test_a_repeated_task_is_two_rows() -> None:
    samples = take(examples(batch_size=8), 1)  # five tasks, so some are drawn twice
    assert len({sample.group_id for sample in samples}) == 8


def test_state_continues_the_same_examples() -> None:
    one, other = examples(), examples()
    take(one, 1)
    other.load_state(one.state())
    assert take(one, 2) == take(other, 2)


def test_a_resumed_run_trains_the_same_bits_with_the_same_noise(tmp_path: Path) -> None:
    objective = replace(SFT, loss=likelihood(smoothing=0.1, noise=5.0))
    settings = TrainerSettings(optimizer=OptimizerSettings(learning_rate=1e-2), temperature=1.0, total_steps=4, seed=3)

    def begin() -> tuple[LocalTrainer, Examples]:
        model = prepare(tiny_model(torch.float32))
        trainer = LocalTrainer(model, TOKENIZER, objective, settings, pack=lambda samples: pack(samples, 64))
        return trainer, examples()

    def train(trainer: LocalTrainer, source: Examples, steps: int) -> list[float]:
        return [trainer.step(asyncio.run(source.take(1))).metrics["loss/likelihood"] for _ in range(steps)]

    straight, source = begin()
    losses = train(straight, source, 4)
    first, source = begin()
    before = train(first, source, 2)
    first.save(tmp_path / "checkpoint")
    second, resumed = begin()
    second.load(tmp_path / "checkpoint")
    resumed.load_state(source.state())
    assert [*before, *train(second, resumed, 2)] == losses
    pairs = zip(straight.publish().tensors.values(), second.publish().tensors.values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_rows_that_do_not_fit_are_dropped_and_counted_when_asked_for_also_after_a_resume() -> None:
    lengths = sorted(len(row.token_ids) for row in take(examples(batch_size=5), 1))
    one, other = (examples(max_length=lengths[2], drops_long=True) for _ in range(2))
    batch = asyncio.run(one.take(1))
    assert batch.metrics["data/too_long"] > 0
    assert all(len(row.token_ids) <= lengths[2] for row in batch.updates[0])
    assert len(batch.updates[0]) == 4
    other.load_state(one.state())
    assert take(one, 2) == take(other, 2)
    with pytest.raises(UserError, match="more than the limit of 3"):
        take(examples(max_length=3, drops_long=True), 1)


def task(answer: str | None = "ba", **extra: Any) -> Task:
    return Task(id="t", messages=(Message(role="user", content="ab"),), answer=answer, extra=extra)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (task(None), "task t has no answer"),
        (task("  "), "task t has no answer"),
        (task("b" * 90), "task t: the row has 9. tokens, more than the limit of 64"),
        (task("b<|end|>a"), "task t: .*ends its turn"),
        (task("b", trained_turns="some"), 'task t: trained_turns is .* must be "all" or a number'),
    ],
)
def test_rows_that_cannot_be_trained_are_named(bad: Task, message: str) -> None:
    with pytest.raises(UserError, match=message):
        example_rows(Renderer(TOKENIZER), bad, max_length=64)
