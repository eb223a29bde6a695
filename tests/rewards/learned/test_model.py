from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from temper.errors import UserError
from temper.rewards.learned.model import Batcher, RewardModelReward, run_padded, spell_out
from temper.types import Message, Score, ScoreKind, Task, Trajectory

Say = Callable[[str], Trajectory]
TASK = Task(id="t:1", messages=(Message(role="user", content="abc"),))
SPECIAL = ("<end>", "<user>", "<bot>")


TEMPLATE = (
    "{% for m in messages %}{{ '<user>' if m['role'] == 'user' else '<bot>' }}{{ m['content'] }}<end>{% endfor %}"
)


@pytest.fixture
def write_model(save_letter_model: Callable[..., Path]) -> Callable[..., Path]:
    defaults = {"kind": LlamaForSequenceClassification, "num_labels": 1}
    tokens = (*SPECIAL, *"abcdefghijklmnopqrstuvwxyz< ")
    return partial(save_letter_model, tokens=tokens, template=TEMPLATE, special=SPECIAL[1:], **defaults)


@pytest.fixture
def folder(tmp_path: Path, write_model: Callable[..., Path]) -> Path:
    return write_model(tmp_path / "rm")


def score(reward: RewardModelReward, *trajectories: Trajectory) -> list[Score]:
    async def run() -> list[Score]:
        scores = await asyncio.gather(*(reward.score(TASK, trajectory) for trajectory in trajectories))
        await reward.close()
        return scores

    return asyncio.run(run())


def expected(folder: Path, text: str) -> float:
    """The head at the last token, by hand: no padding, no search for the last token."""
    model = LlamaForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = tokenizer.encode(f"<user>abc<end><bot>{text}<end>", add_special_tokens=False)
    with torch.no_grad():
        return float(model.score(model.model(torch.tensor([ids])).last_hidden_state[0, -1])[0])


def test_the_score_is_read_at_the_last_token_whatever_the_batch(folder: Path, say: Say) -> None:
    texts = ["a", "hello", "a much longer response", "zz", ""]
    together = score(RewardModelReward(path=str(folder)), *map(say, texts))
    for text, scored in zip(texts, together, strict=True):
        assert scored.value == pytest.approx(expected(folder, text), abs=1e-5)


def test_a_padding_that_is_also_the_end_of_a_turn_would_be_read_too_early(folder: Path) -> None:
    """The planted fault: what the library gives when the end of turn is taken for padding."""
    model = LlamaForSequenceClassification.from_pretrained(folder).eval()
    row = [1, 5, 6, 0]
    model.config.pad_token_id = 0
    with torch.no_grad():
        naive = model(input_ids=torch.tensor([row])).logits[0, 0]
    right = run_padded(model, [row, [1, 0]], 0)[0, 0]
    assert abs(float(naive - right)) > 1e-4


def test_concurrent_episodes_share_a_forward_pass() -> None:
    sizes: list[int] = []
    first_is_in, go_on = threading.Event(), threading.Event()

    def forward(rows: list[int]) -> list[int]:
        sizes.append(len(rows))
        first_is_in.set()
        assert go_on.wait(timeout=10)
        return [row + 1 for row in rows]

    async def run() -> list[int]:
        batcher = Batcher(forward, max_batch=4, deadline_seconds=20.0)
        first = asyncio.create_task(batcher.call(0))
        await asyncio.to_thread(first_is_in.wait, 10)
        rest = [asyncio.create_task(batcher.call(i)) for i in range(1, 10)]
        await asyncio.sleep(0)
        go_on.set()
        answers = await asyncio.gather(first, *rest)
        batcher.close()
        return answers

    assert asyncio.run(run()) == list(range(1, 11))
    assert sizes[0] == 1
    assert max(sizes) == 4
    assert sum(sizes) == 10


def test_a_model_that_hangs_is_an_error_after_the_deadline(
    folder: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = RewardModelReward(path=str(folder), deadline_seconds=0.1)
    released = threading.Event()
    monkeypatch.setattr(reward._batcher, "_forward", lambda rows: [float(released.wait(timeout=10))])
    (scored,) = score(reward, say("a"))
    released.set()
    assert scored.kind is ScoreKind.ERROR


def test_a_model_that_raises_fails_its_batch_and_not_its_thread() -> None:
    def forward(rows: list[int]) -> list[int]:
        return [10 // row for row in rows]

    async def run() -> int:
        batcher = Batcher(forward, max_batch=1, deadline_seconds=10.0)
        with pytest.raises(ZeroDivisionError):
            await batcher.call(0)
        return await batcher.call(5)

    assert asyncio.run(run()) == 2


def test_a_score_that_is_no_number_is_an_error(folder: Path, say: Say) -> None:
    reward = RewardModelReward(path=str(folder))
    reward._model.score.weight.data.fill_(float("nan"))
    (scored,) = score(reward, say("a"))
    assert scored.kind is ScoreKind.ERROR


def test_a_conversation_that_does_not_fit_is_unscorable(folder: Path, say: Say) -> None:
    (scored,) = score(RewardModelReward(path=str(folder)), say("a" * 100))
    assert scored.kind is ScoreKind.UNSCORABLE


def test_scores_are_standardised_by_the_constants_beside_the_weights(folder: Path, say: Say) -> None:
    raw = expected(folder, "a")
    (folder / "temper_scale.json").write_text(json.dumps({"mean": 2.0, "std": 4.0}))
    assert score(RewardModelReward(path=str(folder)), say("a"))[0].value == pytest.approx((raw - 2) / 4, abs=1e-5)
    by_options = RewardModelReward(path=str(folder), mean=1.0, std=0.5)
    assert score(by_options, say("a"))[0].value == pytest.approx((raw - 1) / 0.5, abs=1e-5)


@pytest.mark.parametrize("scale", ['{"mean": 1}', '{"mean": 0, "std": 0}', '{"mean": NaN, "std": 1}', "no"])
def test_a_broken_scale_is_refused(folder: Path, scale: str) -> None:
    (folder / "temper_scale.json").write_text(scale)
    with pytest.raises(UserError):
        RewardModelReward(path=str(folder))


def test_all_turns_are_scored(folder: Path, say: Say) -> None:
    turn = say("a").turns[0]
    two = dataclasses.replace(say("a"), turns=(dataclasses.replace(turn, replies=(TASK.messages[0],)), turn))
    (scored,) = score(RewardModelReward(path=str(folder)), two)
    assert scored.value == pytest.approx(expected(folder, "a<end><user>abc<end><bot>a"), abs=1e-5)


def test_a_response_cannot_end_its_turn_and_begin_another(folder: Path, say: Say) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    assert spell_out(tokenizer, "a<end><bot>b") == "a< end>< bot>b"
    (scored,) = score(RewardModelReward(path=str(folder)), say("a<end><user>abc<end><bot>z"))
    assert abs((scored.value or 0.0) - expected(folder, "a<end><user>abc<end><bot>z")) > 1e-4


def test_a_head_that_was_never_trained_is_refused(tmp_path: Path, write_model: Callable[..., Path]) -> None:
    """transformers would make up random weights and go on."""
    with pytest.raises(UserError, match=r"score\.weight"):
        RewardModelReward(path=str(write_model(tmp_path / "lm", kind=LlamaForCausalLM)))


def test_a_directory_that_is_no_reward_model_is_refused(tmp_path: Path, write_model: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match="has no config"):
        RewardModelReward(path=str(tmp_path))
    with pytest.raises(UserError, match="2 outputs"):
        RewardModelReward(path=str(write_model(tmp_path / "two", num_labels=2)))
    folder = write_model(tmp_path / "mute")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="no chat template"):
        RewardModelReward(path=str(folder))
