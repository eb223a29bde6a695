"""The discriminator learns to tell two voices, deterministically; what it has learned survives a resume to the bit."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from temper.errors import TaskError, UserError
from temper.objectives.losses.reward_models import discriminator_loss as specified_loss
from temper.rewards.learned.discriminator import DiscriminatorReward, Learned, discriminator_loss, score_of
from temper.types import Group, Message, Score, ScoreKind, Task, Trajectory

Say = Callable[[str], Trajectory]
TASK = Task(id="t:1", messages=(Message(role="user", content="q"),), answer="abab")
SPECIAL = ("<end>", "<user>", "<bot>")
TEMPLATE = (
    "{% for m in messages %}{{ '<user>' if m['role'] == 'user' else '<bot>' }}{{ m['content'] }}<end>{% endfor %}"
)
STUDENTS = ("zz", "yzyz", "zyzzy")


@pytest.fixture
def write_model(save_letter_model: Callable[..., Path]) -> Callable[..., Path]:
    tokens = (*SPECIAL, *"abcdefghijklmnopqrstuvwxyz< ")
    return partial(save_letter_model, tokens=tokens, template=TEMPLATE, special=SPECIAL[1:], num_labels=1)


@pytest.fixture
def folder(tmp_path: Path, write_model: Callable[..., Path]) -> Path:
    return write_model(tmp_path / "lm", kind=LlamaForCausalLM)


def group(say: Say, texts: Sequence[str] = STUDENTS, task: Task = TASK) -> Group:
    members = [dataclasses.replace(say(text), index=i, score=Score.of(0.0)) for i, text in enumerate(texts)]
    return Group(id="g", draw=0, task=task, trajectories=tuple(members))


def evolve(reward: DiscriminatorReward, *groups: Group) -> list[Learned]:
    async def run() -> list[Learned]:
        return [learned for one in groups if (learned := await reward.evolve(one)) is not None]

    return asyncio.run(run())


def score(reward: DiscriminatorReward, *trajectories: Trajectory, task: Task = TASK) -> list[Score]:
    async def run() -> list[Score]:
        return await asyncio.gather(*(reward.score(task, trajectory) for trajectory in trajectories))

    return asyncio.run(run())


def make(folder: Path, **options: object) -> DiscriminatorReward:
    return DiscriminatorReward(path=str(folder), **{"learning_rate": 3e-3, **options})  # type: ignore[arg-type]


def test_its_loss_is_that_worked_out_by_hand() -> None:
    assert discriminator_loss(torch.tensor(1.5), torch.tensor([0.5])).item() == pytest.approx(0.313262, abs=1e-6)
    teacher, students = torch.tensor(0.3), torch.tensor([0.9, -0.4])
    expected = specified_loss(teacher.expand(2), students).mean()
    assert discriminator_loss(teacher, students).item() == pytest.approx(expected.item())
    assert discriminator_loss(students[0], teacher[None]).item() != pytest.approx(expected.item(), abs=1e-3)


def test_it_learns_to_tell_the_students_text_from_the_teachers(folder: Path, say: Say) -> None:
    reward = make(folder, learning_rate=1e-2)
    assert reward.learns
    assert [s.value for s in score(reward, *map(say, STUDENTS))] == [0.0, 0.0, 0.0]  # a head of zeros
    learned = evolve(reward, *[group(say)] * 12)
    assert learned[0].loss == pytest.approx(0.693147, abs=1e-6)
    assert learned[-1].loss < 0.1
    assert learned[-1].accuracy == 1.0
    teacher, student = score(reward, say("abab"), say("zz"))
    assert teacher.value is not None
    assert student.value is not None
    assert teacher.value > student.value + 1.0


def test_one_update_is_adamw_on_the_loss_of_all_pairs(folder: Path, tmp_path: Path, say: Say) -> None:
    """Row after row backward is the gradient of the whole loss."""
    reward, plain = make(folder, max_grad_norm=1e9), make(folder)
    evolve(reward, group(say))  # past the zero head, where only the head has a gradient
    reward.save(tmp_path)
    plain.load(tmp_path)
    evolve(reward, group(say))
    rows = [plain._encode([*TASK.messages, Message(role="assistant", content=text)]) for text in ("abab", *STUDENTS)]
    scores = torch.stack([score_of(plain._model, row) for row in rows])
    plain._optimizer.zero_grad()
    discriminator_loss(scores[0], scores[1:]).backward()  # type: ignore[no-untyped-call]
    plain._optimizer.step()
    for one, other in zip(reward._model.parameters(), plain._model.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-6)
    embeddings = plain._model.get_input_embeddings().weight.grad
    assert embeddings is not None
    assert embeddings.any()


def test_what_it_learned_survives_a_resume_to_the_bit(folder: Path, tmp_path: Path, say: Say) -> None:
    groups = [group(say, texts) for texts in (STUDENTS, ("abz",), ("q", "zz"), STUDENTS)]
    whole = make(folder)
    expected = evolve(whole, *groups)
    first = make(folder)
    begun = evolve(first, *groups[:2])
    saved = tmp_path / "saved"
    saved.mkdir()
    first.save(saved)
    second = make(folder)
    second.load(saved)
    second.load_state(first.state())
    assert begun + evolve(second, *groups[2:]) == expected
    assert second.state() == whole.state() == {"groups_seen": 4}
    for one, other in zip(whole._model.parameters(), second._model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert score(whole, say("ab")) == score(second, say("ab"))
    # Planted fault: weights without moments go on to other weights.
    forgetful = make(folder)
    forgetful.load(saved)
    forgetful._optimizer.state.clear()
    assert begun + evolve(forgetful, *groups[2:]) != expected


def test_a_score_does_not_depend_on_what_else_is_asked(folder: Path, say: Say) -> None:
    reward = make(folder)
    evolve(reward, group(say))
    texts = ["a", "zzzz", "a longer answer", "abab"]
    together = [s.value for s in score(reward, *map(say, texts))]
    assert together == [score(reward, say(text))[0].value for text in texts]
    assert len(set(together)) == 4


def test_until_it_is_warm_every_text_is_worth_the_same(folder: Path, say: Say) -> None:
    reward = make(folder, warmup_groups=2)
    for expected in ([0.0, 0.0], [0.0, 0.0]):
        assert [s.value for s in score(reward, say("abab"), say("zz"))] == expected
        evolve(reward, group(say))
    first, second = (s.value for s in score(reward, say("abab"), say("zz")))
    assert first != second


def test_the_end_of_a_turn_that_is_also_the_padding_is_read(folder: Path) -> None:
    reward = make(folder)
    torch.nn.init.ones_(reward._model.score.weight)
    row = [1, 5, 6, 0]
    hidden = reward._model.model(torch.tensor([row])).last_hidden_state[0]
    assert score_of(reward._model, row).item() == pytest.approx(hidden[-1].sum().item(), abs=1e-5)
    assert abs(hidden[-1].sum().item() - hidden[-2].sum().item()) > 1e-3


def test_a_trained_head_is_kept(tmp_path: Path, write_model: Callable[..., Path], say: Say) -> None:
    classifier = write_model(tmp_path / "rm", kind=LlamaForSequenceClassification)
    assert score(make(classifier), say("ab"))[0].value != 0.0


def test_texts_that_do_not_fit_are_not_scored_and_teach_nothing(folder: Path, say: Say) -> None:
    reward = make(folder)
    assert score(reward, say("z" * 80))[0].kind is ScoreKind.UNSCORABLE
    assert evolve(reward, group(say, ["z" * 80])) == []
    assert len(evolve(reward, group(say, ["z" * 80, "zz"]))) == 1
    long = dataclasses.replace(TASK, answer="a" * 80)
    assert evolve(reward, group(say, task=long)) == []


def test_a_task_without_the_teachers_text_is_refused(folder: Path) -> None:
    reward = make(folder)
    assert reward.check(TASK) is None
    assert "teacher's text" in str(reward.check(dataclasses.replace(TASK, answer=None)))
    assert "does not fit" in str(reward.check(dataclasses.replace(TASK, answer="a" * 1000)))


def test_a_step_that_takes_too_long_is_an_error_of_the_step(folder: Path, say: Say) -> None:
    reward = make(folder, deadline_seconds=1e-6)
    with pytest.raises(TaskError, match="in time"):
        evolve(reward, group(say))


@pytest.mark.parametrize("wrong", [{"learning_rate": 0.0}, {"warmup_groups": -1}, {"max_grad_norm": 0.0}])
def test_settings_outside_their_range_are_refused(folder: Path, wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        make(folder, **wrong)


def test_files_of_another_model_are_refused(folder: Path, tmp_path: Path) -> None:
    reward = make(folder)
    with pytest.raises(UserError, match="no discriminator"):
        reward.load(tmp_path)
    reward.save(tmp_path)
    reward._model.register_parameter("more", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(UserError, match="another shape"):
        reward.load(tmp_path)
    with pytest.raises(UserError, match=r"no config\.json"):
        make(tmp_path)
