"""Names and options in recipes: what does not fit is refused with the nearest thing that does."""

from __future__ import annotations

from pathlib import Path

import pytest

from temper.errors import UserError
from temper.plugins import load_function, require_options


def sample(index: int, *, low: int = 1, share: float = 0.5, name: str) -> None:
    """Something with options."""


def open_ended(index: int, **options: object) -> None:
    """Checks its own."""


def test_a_function_is_found_by_its_name() -> None:
    assert load_function("temper.plugins:load_function", where="generator") is load_function


@pytest.mark.parametrize(
    ("target", "message"),
    [("temper.nothing:f", "cannot import"), ("temper.plugins:load_functio", "Did you mean")],
)
def test_a_wrong_name_is_explained(target: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_function(target, where="generator")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "x", "lo": 1}, 'Did you mean "low"'),
        ({}, 'option "name" is missing'),
        ({"name": "x", "low": 1.5}, "must be of type int"),
        ({"name": "x", "low": True}, "must be of type int"),
        ({"name": 3}, "must be of type str"),
    ],
)
def test_options_are_held_against_the_signature(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        require_options(sample, options, where="generator", skip=1)


def test_options_that_fit_pass() -> None:
    require_options(sample, {"name": "x", "share": 1}, where="generator", skip=1)
    require_options(open_ended, {"anything": [1]}, where="generator", skip=1)


def test_a_misspelt_file_is_answered_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def f(): pass")
    with pytest.raises(UserError, match=r'^reward: .*/rewrad\.py is not there\. Did you mean ".*/reward\.py"\?$'):
        load_function(f"{tmp_path}/rewrad.py:f", where="reward")


def test_a_file_that_fails_when_it_is_run_is_named_with_the_line(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import math\n\nx = nonsense\n")
    with pytest.raises(UserError, match=r"NameError: name 'nonsense' is not defined, in .*broken\.py, line 3\)$"):
        load_function(f"{tmp_path}/broken.py:f", where="reward")
