"""Every chooser that a recipe can name.

Owns: the table, and reading the key data.choose. A new chooser is a file with its class, and a line here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from temper.errors import UserError
from temper.plugins import require_options, split_named
from temper.tasks.choice.adaptive_sources import AdaptiveSources
from temper.tasks.choice.band import Band
from temper.tasks.choice.chooser import Chooser
from temper.tasks.choice.no_positive_resampling import NoPositiveResampling
from temper.tasks.choice.pools import Pools
from temper.types import Scalar

CHOOSERS: dict[str, type[Chooser]] = {
    chooser.name: chooser for chooser in (NoPositiveResampling, Band, Pools, AdaptiveSources)
}


def read_choosers(entries: Sequence[str | Mapping[str, Scalar]]) -> tuple[Chooser, ...]:
    """From a recipe's data.choose: names, or tables such as {name = "band", low = 0.2}. None is opened yet."""
    choosers = [_read(entry) for entry in entries]
    names = [chooser.name for chooser in choosers]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"data.choose: {twice[0]} is named twice. Keep one of them")
    return tuple(choosers)


def _read(entry: str | Mapping[str, Scalar]) -> Chooser:
    example = 'choose = [{name = "band", low = 0.1, high = 0.9}]'
    name, options = split_named(entry, CHOOSERS, where="data.choose:", example=example)
    require_options(CHOOSERS[name], options, where=f"data.choose: {name}")
    return CHOOSERS[name](**options)
