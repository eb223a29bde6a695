"""Charts show what they are given."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

from temper.runs.report.plot import Line, Panel, chart

NAMESPACE = "{http://www.w3.org/2000/svg}"


def paths(text: str, color: str) -> list[str]:
    return [p.attrib["d"] for p in ElementTree.fromstring(text).iter(f"{NAMESPACE}path") if p.get("stroke") == color]


def points(path: str) -> list[tuple[float, float]]:
    pairs = path.replace("M", " ").replace("L", " ").split()
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in pairs)]


def test_a_line_goes_through_its_points_in_proportion() -> None:
    line = Line(label="a", xs=[0, 1, 2], ys=[0, 3, 1], color="#123456")
    (path,) = paths(chart([Panel(title="t", lines=[line])]), "#123456")
    (x0, y0), (x1, y1), (x2, y2) = points(path)
    assert math.isclose(x1 - x0, x2 - x1, abs_tol=0.11)
    assert math.isclose((y0 - y2) * 3, y0 - y1, abs_tol=0.4), "up is smaller, and heights are in proportion"


def test_a_value_that_is_not_a_number_breaks_the_line() -> None:
    line = Line(label="a", xs=[0, 1, 2, 3], ys=[0, math.nan, 1, 2], color="#123456")
    (path,) = paths(chart([Panel(title="t", lines=[line])]), "#123456")
    assert path.count("M") == 2


def test_text_is_escaped_and_several_lines_get_a_legend_and_colours() -> None:
    lines = [Line(label=f"<b{place}>", xs=[0, 1], ys=[0, place]) for place in range(3)]
    root = ElementTree.fromstring(chart([Panel(title="a < b & c", lines=lines, x_label="x", y_label="y")]))
    texts = [text.text for text in root.iter(f"{NAMESPACE}text")]
    assert "a < b & c" in texts
    assert {"<b0>", "<b1>", "<b2>"} <= set(texts)
    strokes = {path.get("stroke") for path in root.iter(f"{NAMESPACE}path") if path.get("stroke-width") == "1.8"}
    assert len(strokes) == 3


def test_long_names_in_the_legend_do_not_run_into_each_other() -> None:
    names = ["the first of two names that are rather long", "the second of two names that are rather long"]
    lines = [Line(label=name, xs=[0, 1], ys=[0, 1]) for name in names]
    root = ElementTree.fromstring(chart([Panel(title="t", lines=lines)]))
    first, second = (text for text in root.iter(f"{NAMESPACE}text") if text.text in names)
    assert first.get("y") != second.get("y"), "a line each, where both do not fit into one"


def test_constant_and_empty_data_have_axes() -> None:
    for ys in ([], [2.0, 2.0]):
        text = chart([Panel(title="t", lines=[Line(label="a", xs=list(range(len(ys))), ys=ys)])])
        assert ElementTree.fromstring(text).tag == f"{NAMESPACE}svg"


def test_the_same_chart_has_the_same_bytes() -> None:
    panel = Panel(title="t", lines=[Line(label="a", xs=[0, 1], ys=[0, 1], low=[0, 0], high=[1, 2])])
    assert chart([panel]) == chart([panel])
