"""The tiny models of the trainer's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.fakes.models import FAMILIES, make_family_model


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Any]:
    return make_family_model
