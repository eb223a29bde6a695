"""A recipe's list of controls: names, options and combinations are read or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from temper.errors import UserError
from temper.rollout.controls.control import Control, Setting
from temper.rollout.controls.registry import CONTROLS, read_controls
from temper.rollout.controls.together import Controls


def setting(staleness: int = 2, order: Any = "finished") -> Setting:
    return Setting(groups_per_step=4, max_staleness=staleness, order=order)


@pytest.mark.parametrize(
    ("tables", "staleness", "order", "message"),
    [
        (["partail"], 2, "draw", r"'partail' is unknown. Did you mean \"partial\"\?"),
        ([{"factor": 2.0}], 2, "draw", "None is unknown"),
        ([{"name": "oversample", "facter": 2.0}], 2, "finished", r'option "facter" is unknown. Did you mean "factor"'),
        ([{"name": "oversample", "factor": "2"}], 2, "finished", "must be of type float"),
        (["partial", "partial"], 2, "draw", '"partial" is there twice'),
        (["partial"], 0, "draw", "max_staleness=0 does not train. Use max_staleness = 1"),
        (["oversample"], 2, "draw", r'Add rollout.order = "finished"'),
        ([{"name": "oversample", "factor": 1.0}], 2, "finished", "Use more than 1"),
        ([{"name": "oversample", "factor": float("nan")}], 2, "finished", "Use more than 1"),
        ([{"name": "oversample", "factor": 1.2}], 2, "finished", "no group more than .*=4. Use factor = 1.25"),
        ([{"name": "oversample", "factor": 3.5}], 2, "finished", "admits 3 times groups_per_step"),
        ([{"name": "oversample", "patience": 0}], 0, "finished", "patience=0"),
        ([], 0, "finished", "nobody can be overtaken. Use max_staleness = 1 or more, add"),
        (["tail"], 1, "finished", "is for synchronous runs: with rollout.max_staleness=1"),
        (["tail"], 0, "draw", r'Add rollout.order = "finished"'),
        ([{"name": "tail", "quantile": 1.0}], 0, "finished", "quantile=1"),
        ([{"name": "tail", "window": 7}], 0, "finished", r"Use 8 \(two steps\) or more"),
        ([{"name": "tail", "patience": 0}], 0, "finished", "patience=0"),
        (["tail", "oversample"], 0, "finished", "tail and oversample both put groups off"),
        (["concurrency"], 0, "draw", "Use max_staleness = 1 or more, or limit requests with engine.max_running"),
        ([{"name": "concurrency", "kv_use": 1.5}], 1, "draw", "kv_use=1.5"),
        ([{"name": "concurrency", "least": 13}], 2, "draw", "Use 1 to 12"),
        (["partial"], 0, "finished", "max_staleness=0 does not train"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(tables: list[Any], staleness: int, order: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_controls(tables, setting(staleness, order))


def test_names_alone_take_every_default() -> None:
    controls = read_controls(["partial", "oversample"], setting())
    assert [control.name for control in controls.all] == ["partial", "oversample"]
    assert controls.lead() == 5


def test_every_control_is_listed_under_its_own_name() -> None:
    assert all(name == control.name for name, control in CONTROLS.items())


class Remembering(Control):
    name = "remembering"

    def __init__(self, limit: int | None = None) -> None:
        super().__init__(setting())
        self.limit, self.seen = limit, 0

    def lead(self) -> int | None:
        return self.limit

    def state(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state(self, state: Any) -> None:
        self.seen = state["seen"]


def test_of_several_limits_the_strictest_holds() -> None:
    assert Controls([Remembering(7), Remembering(None), Remembering(5)]).lead() == 5
    assert Controls([Remembering(None)]).lead() is None
    assert Controls().most_running() is None


def test_state_is_kept_by_name_and_one_that_is_new_starts_as_new() -> None:
    old, new = Remembering(), Remembering()
    old.seen = 3
    state = {"draws": 7, **Controls([old]).state()}
    Controls([new]).load_state(state)
    assert new.seen == 3
    fresh = Remembering()
    Controls([fresh]).load_state({"draws": 7})
    assert fresh.seen == 0
