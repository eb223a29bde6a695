"""Pictures of the guide, drawn from what the command of a page computed: `temper guide 6 --picture FILE.svg`.

Owns: which page has one, and its lines. Refuses: computing anything of its own beyond what a page defines; another
figure in a page is another picture.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from temper.errors import UserError
from temper.guide.pages import GuidePage
from temper.guide.running import require_clone
from temper.runs.report.plot import Line, Panel, chart
from temper.simulate.lengths import read_lengths

Names = Mapping[str, Any]
"""What the command of a page left behind, by name."""
WIDTH = 460


def run_python(page: GuidePage) -> tuple[dict[str, Any], str]:
    """The names that the command of a page leaves behind in this process, and what it printed."""
    assert page.language == "python", page.path
    names: dict[str, Any] = {"__name__": "__main__"}
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(page.command, page.path.name, "exec"), names)
    return names, output.getvalue()


def draw_page(page: GuidePage) -> str:
    """As SVG."""
    if page.number not in PICTURES:
        raise UserError(f"question {page.number} draws no picture. Use one of {', '.join(map(str, PICTURES))}")
    require_clone(page, Path.cwd())
    return draw_picture(page.number, run_python(page)[0])


def draw_picture(number: int, names: Names) -> str:
    return chart([PICTURES[number](names)], width=WIDTH)


def _doubling(values: Sequence[float]) -> tuple[list[float], dict[float, str]]:
    """Places and ticks of numbers of which each is a multiple of the one before."""
    places = [math.log2(value) for value in values]
    return places, {place: f"{value:g}" for place, value in zip(places, values, strict=True)}


def _exploration(names: Names) -> Panel:
    start, train = names["start"], names["train"]
    plain = train(bonus=0.0)
    tables = {
        "before training": start,
        "trained": plain,
        "trained with an entropy bonus": train(bonus=0.02),
        "trained, sampled at temperature 2": plain / 2.0,
    }
    counts = [2**power for power in range(9)]
    places, ticks = _doubling(counts)
    lines = []
    for label, logits in tables.items():
        right = logits.softmax(1)[:, 0]
        shares = [100 * (1 - (1 - right) ** count).mean().item() for count in counts]
        lines.append(Line(label=label, xs=places, ys=shares))
    return Panel(
        title="what training leaves to be found by trying", lines=lines, x_label="samples of a prompt, k",
        y_label="pass@k, %", y_range=(0.0, 100.0), x_names=ticks,
    )  # fmt: skip


def _boundary(names: Names) -> Panel:
    places, ticks = _doubling(list(names["base"]))
    lines = [
        Line(label=label, xs=places, ys=[100 * share for share in names[label].values()])
        for label in ("base", "trained")
    ]
    return Panel(
        title="sharpened: ahead at one sample, behind at many", lines=lines, x_label="samples of a prompt, k",
        y_label="pass@k, %", y_range=(0.0, 100.0), x_names=ticks,
    )  # fmt: skip


def _scaling(names: Names) -> Panel:
    places, ticks = _doubling(names["steps"])
    lines = [Line(label="score", xs=places, ys=names["scores"].tolist())]
    for label, shape, known in (("fit to 4 rows", names["early"], 4), ("fit to 6 rows", names["late"], 6)):
        said = shape[0] * torch.sigmoid(shape[1] * (names["x"] - shape[2]))
        lines.append(Line(label=label, xs=places[known - 1 :], ys=said.tolist()[known - 1 :], is_dashed=True))
    ceiling = float(names["truth"])
    lines.append(Line(label="ceiling", xs=[places[0], places[-1]], ys=[ceiling, ceiling]))
    return Panel(
        title="a fit before the bend and one after it", lines=lines, x_label="steps", y_label="score",
        y_range=(0.0, 1.0), x_names=ticks,
    )  # fmt: skip


def _precision(names: Names) -> Panel:
    """Rows whose largest number is 1, so that its size is the only thing that differs."""
    powers = list(range(-16, 0))
    noise = torch.Generator().manual_seed(0)
    mantissas = 1 + torch.rand(1023, generator=noise)
    lines = []
    for label, quantize in (("INT8", names["by_int8"]), ("FP8 (E4M3)", names["by_fp8"])):
        errors = []
        for power in powers:
            row = torch.cat([mantissas * 2.0**power, torch.ones(1)])[None]
            errors.append(100 * ((quantize(row) - row)[0, :-1].norm() / row[0, :-1].norm()).item())
        lines.append(Line(label=label, xs=powers, ys=errors))
    return Panel(
        title="error of a number by its size", lines=lines, x_label="size, the largest of its row being 1",
        y_label="relative error, %", y_range=(0.0, 100.0),
        x_names={float(power): f"1/{2**-power:,}" for power in range(-16, 0, 3)},
    )  # fmt: skip


def _long_tail(names: Names) -> Panel:
    """One step of groups with the page's lengths: what is still being drawn after so many tokens."""
    asked = names["asked"]
    length_of = read_lengths(asked.lengths, asked.seed)
    lines = []
    for label, started, wanted in (("32 groups, all are waited for", 32, 32), ("40 groups, 32 are waited for", 40, 32)):
        lengths = sorted(length_of(f"group {number}", 0) for number in range(started))
        places = range(lengths[wanted - 1] + 1)
        under_way = [4.0 * sum(length > place for length in lengths) for place in places]
        lines.append(Line(label=label, xs=places, ys=[*under_way[:-1], 0.0]))
    return Panel(
        title="a step waits for its longest answers", lines=lines, x_label="tokens drawn of each answer",
        y_label="answers under way", y_range=(0.0, 160.0),
    )  # fmt: skip


def _staleness(names: Names) -> Panel:
    found = names["found"]
    places = [float(place) for place in range(len(found))]
    ticks = {place: f"{staleness}" for place, staleness in zip(places, found, strict=True)}
    lines = [
        Line(label=label, xs=places, ys=[100 * pair[column] for pair in found.values()])
        for column, label in enumerate(("plain", "truncated importance weights"))
    ]
    return Panel(
        title="success after 60 steps by age of the samples", lines=lines, x_label="versions behind, S",
        y_label="success, %", y_range=(75.0, 90.0), x_names=ticks,
    )  # fmt: skip


PICTURES: dict[int, Callable[[Names], Panel]] = {
    6: _exploration, 15: _boundary, 16: _scaling, 22: _precision, 23: _long_tail, 33: _staleness,
}  # fmt: skip
"""By number of the page. Pages 7 and 27 show pictures of other pages of docs/."""
