"""The charts of the site show numbers of benchmarks/RESULTS.md, and each of them also as a table."""

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import site_charts  # noqa: E402 - the line above finds it

CHARTS = site_charts.charts()
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")


def points(chart: dict) -> list:
    return [(series["name"], x, y) for series in chart["series"] for x, y in series["points"]]


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart["id"])
def test_every_number_is_in_the_results(chart):
    section = re.search(rf"^## {re.escape(chart['table'])}\n(.*?)(?=^## |\Z)", RESULTS, re.M | re.S)[1]
    numbers = {float(number.replace(",", "")) for number in re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", section)}
    assert len(points(chart)) > 3
    assert not [point for point in points(chart) if float(point[2]) not in numbers]


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart["id"])
def test_a_mark_and_a_row_for_every_number(chart):
    figure = ElementTree.fromstring(site_charts.figure(chart))
    marks = [mark for mark in figure.iter() if mark.tag in ("rect", "circle")]
    assert len(marks) == len(points(chart))
    cells = [cell.text for cell in figure.iter("td")]
    assert sorted(cell for cell in cells if cell) == sorted(str(y) for _, _, y in points(chart))
    svg = next(figure.iter("svg"))
    assert svg.get("role") == "img" and chart["title"] in svg.get("aria-label")
    width, height = map(float, svg.get("viewBox").split()[2:])
    for mark in marks:
        right = float(mark.get("x") or mark.get("cx")) + float(mark.get("width") or mark.get("r"))
        assert 0 <= right <= width and 0 <= float(mark.get("y") or mark.get("cy")) <= height


def test_larger_is_longer_and_higher():
    chart = next(one for one in CHARTS if one["id"] == "batch")
    widths = [float(mark.get("width")) for mark in ElementTree.fromstring(site_charts.figure(chart)).iter("rect")]
    assert widths == sorted(widths) and widths[-1] / widths[0] == pytest.approx(11112 / 657, rel=0.01)
    quality = next(one for one in CHARTS if one["id"] == "quality")
    heights = [float(mark.get("cy")) for mark in ElementTree.fromstring(site_charts.figure(quality)).iter("circle")]
    assert heights[:6] == sorted(heights[:6]), "KL falls as the bits rise: the points go down the page"
