"""Every verb of rank 0 is done by the others, with what it needs and no more."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from temper.errors import OutOfMemory, UserError
from temper.trainer.ranks import channel as channels
from temper.trainer.ranks.channel import Channel, RankFailure
from temper.trainer.ranks.ranked import END, OPEN, RankedTrainer, Together, follow
from temper.types import Batch


class FakeTrainer:
    """Writes down what it is told. `cut`: whether its model is in parts."""

    def __init__(self, *, cut: bool = False) -> None:
        self.is_cut, self.version, self.scales = cut, 0, {"kl": 0.5}
        self.told: list[tuple[str, Any]] = []
        self.fails: dict[str, Exception] = {}

    def __getattr__(self, verb: str) -> Any:
        def note(*payload: Any) -> Any:
            self.told.append((verb, payload))
            if verb in self.fails:
                raise self.fails[verb]
            return f"{verb} of {id(self)}"

        return note


class Pair:
    """Rank 0, and a thread in the place of another rank."""

    def __init__(self, *, cut: bool = False) -> None:
        store = HashStore()
        self.own, self.other = FakeTrainer(cut=cut), FakeTrainer(cut=cut)
        self.together = Together(Channel(store, 0, 2, seconds=20))
        self.opened: list[Any] = []
        self.ended: list[Any] = []
        self._thread = threading.Thread(target=self._follow, args=(Channel(store, 1, 2, seconds=20),), daemon=True)
        self._thread.start()
        self.together.do(OPEN, "an order", lambda: None)
        self.trainer = RankedTrainer(self.own, self.together)  # type: ignore[arg-type]

    def _follow(self, channel: Channel) -> None:
        def open_trainer(order: Any) -> Any:
            self.opened.append(order)
            return self.other

        try:
            self.ended.append(follow(channel, open_trainer))
        except Exception as error:
            self.ended.append(error)

    def end(self) -> None:
        self.together.do(END, "over", lambda: None)
        self._thread.join(20)


def test_all_ranks_do_what_the_first_does() -> None:
    pair = Pair()
    trainer, updates = pair.trainer, ((),)
    assert trainer.step(Batch(updates=updates)) == f"step of {id(pair.own)}"
    trainer.score([], "policy")
    trainer.warm_up([])
    trainer.observe(0.25)
    pair.end()
    assert pair.opened == ["an order"]
    assert [verb for verb, _ in pair.other.told] == ["step", "score", "warm_up", "observe"]
    assert pair.other.told[0][1][0].updates == updates
    assert pair.ended == ["over"]


def test_rows_are_sent_once() -> None:
    pair = Pair()
    updates = ((), ())
    pair.trainer.prepack(updates)
    pair.trainer.step(Batch(updates=updates, metrics={"x": 1.0}))
    pair.end()
    assert [verb for verb, _ in pair.other.told] == ["prepack", "step"]
    assert pair.other.told[1][1][0].updates == updates
    assert not pair.other.told[1][1][0].metrics, "the others need rows alone"


@pytest.mark.parametrize("cut", [False, True])
def test_only_parts_are_gathered_for_a_publication_and_a_checkpoint(cut: bool, tmp_path: Path) -> None:
    pair = Pair(cut=cut)
    pair.trainer.publish()
    if cut:  # what a sampler asks for, when it asks
        ((verb, (gather,)),) = pair.own.told
        assert verb == "publish_gathered"
        assert gather(["a", "b"]) == f"gather of {id(pair.own)}"
    pair.trainer.save(tmp_path)
    pair.end()
    assert [verb for verb, _ in pair.own.told] == (
        ["publish_gathered", "gather", "save"] if cut else ["publish", "save"]
    )
    assert pair.other.told == ([("gather", (["a", "b"],)), ("save", (tmp_path,))] if cut else [])


def test_a_failure_elsewhere_ends_the_verb_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "GRACE_SECONDS", 2.0)
    pair = Pair()
    pair.other.fails["step"] = ZeroDivisionError("planted")
    with pytest.raises(RankFailure, match=r"(?s)trainer rank 1 of 2 failed in step: Traceback.*planted"):
        pair.trainer.step(Batch(updates=()))


@pytest.mark.parametrize(
    ("error", "phase"),
    [
        (OutOfMemory("forward_backward", "CUDA out of memory"), "forward_backward"),
        (torch.OutOfMemoryError("CUDA out of memory"), "a pass outside of the step"),
        (ZeroDivisionError("CUDA out of memory"), None),
    ],
)
def test_a_rank_whose_gpu_is_full_says_so(error: Exception, phase: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "GRACE_SECONDS", 2.0)
    pair = Pair()
    pair.other.fails["step"] = error
    with pytest.raises(RankFailure) as raised:
        pair.trainer.step(Batch(updates=()))
    full = raised.value.full
    assert (None if full is None else full.phase) == phase
    assert full is None or re.search(r"trainer rank 1 of 2: \S*OutOfMemory\S*: .*CUDA out of memory", str(full))


def test_what_the_recipe_got_wrong_is_told_as_it_is() -> None:
    pair = Pair()
    pair.own.fails["step"] = UserError("a row is too long")
    with pytest.raises(UserError, match="a row is too long"):
        pair.trainer.step(Batch(updates=()))
