"""Charts are valid SVG that shows every point and says what it shows."""

from __future__ import annotations

from xml.etree import ElementTree

from sightline.bench.plot import Panel, Series, draw

SVG = "{http://www.w3.org/2000/svg}"


def panel(*series: Series) -> Panel:
    return Panel("Title <a>", "x label", "y label", series)


def test_a_chart_has_every_point_label_and_name() -> None:
    measured = Series("measured", ((1, 2.5), (2, 30), (64, 700)), colour=0)
    floor = Series("floor & more", ((1, 1), (64, 100)), colour=0, dashed=True)
    root = ElementTree.fromstring(draw('a "caption"', [panel(measured, floor), panel(measured)]))
    texts = {element.text for element in root.iter(f"{SVG}text")}
    assert {"Title <a>", "x label", "y label", "measured", "floor & more", "64", "500", 'a "caption"'} <= texts
    assert len(list(root.iter(f"{SVG}circle"))) == 6
    assert len(list(root.iter(f"{SVG}polyline"))) == 3


def test_equal_factors_are_equal_distances() -> None:
    series = Series("measured", ((1, 1), (10, 10), (100, 100)), colour=0)
    root = ElementTree.fromstring(draw("", [panel(series)]))
    xs = [float(circle.attrib["cx"]) for circle in root.iter(f"{SVG}circle")]
    ys = [float(circle.attrib["cy"]) for circle in root.iter(f"{SVG}circle")]
    assert abs((xs[1] - xs[0]) - (xs[2] - xs[1])) < 0.2
    assert ys[0] > ys[1] > ys[2]


def test_a_single_point_can_be_drawn() -> None:
    root = ElementTree.fromstring(draw("", [panel(Series("measured", ((4, 10),), colour=0))]))
    [circle] = root.iter(f"{SVG}circle")
    assert float(circle.attrib["cx"]) > 0
