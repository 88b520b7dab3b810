"""Plots: plotly takes them as they are, and colours can be told apart and stay."""

from __future__ import annotations

import itertools

import pytest

from tests.unit.reporting.small_runs import curve_traces
from trp_scale.reporting.curves import Points
from trp_scale.reporting.figures import DARK, LIGHT, MOST_LINES, Line, Plot, colours

POINTS = Points(steps=[1.0, 2.0], values=[0.5, 0.25])
BAND = Points(steps=[1.0, 2.0], values=[0.5, 0.25], least=[0.1, 0.2], largest=[0.9, 0.4], averaged=7)


def plot_of(*names: str, points: Points = POINTS, worst: str = "", **settings: object) -> Plot:
    colour_of = colours(names)
    lines = [
        Line(name=name, points=points, colour=colour_of[name], emphasis="worst" if name == worst else "")
        for name in names
    ]
    return Plot(title="losses", lines=lines, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{}, {"unit": "share"}, {"unit": "GiB", "log": True, "edge": (1.0, "<edge>")}])
def test_plotly_takes_the_figure(settings: dict[str, object]) -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects", reason="needs the package plotly")
    figure = plot_of("a", "b", points=BAND, worst="a", **settings).figure()
    made = graph_objects.Figure(figure)  # refuses a property that plotly has not
    assert len(made.data) == 4


def test_each_line_has_a_trace_and_an_averaged_one_its_band() -> None:
    assert len(plot_of("a", "b").figure()["data"]) == 2
    figure = plot_of("a", "b", points=BAND).figure()
    band = next(trace for trace in figure["data"] if trace.get("fill"))
    assert max(band["y"]) == 0.9 and min(band["y"]) == 0.1
    assert [trace["name"] for trace in curve_traces(figure)] == ["a", "b"]


def test_the_worst_is_thick_and_on_top() -> None:
    traces = plot_of("a", "b", "c", worst="a").figure()["data"]
    assert traces[-1]["name"] == "a"
    assert traces[-1]["line"]["width"] > 2 * traces[0]["line"]["width"]


def test_names_are_no_markup_to_plotly() -> None:
    assert plot_of("<b>x</b> & y").figure()["data"][0]["name"] == "&lt;b&gt;x&lt;/b&gt; &amp; y"


def test_as_many_lines_as_can_be_told_apart() -> None:
    names = [f"task {number}" for number in range(MOST_LINES + 6)]
    shown = plot_of(*names, worst=names[-1]).limit_lines()
    assert len(shown.lines) == MOST_LINES and shown.lines[0].name == names[-1]
    assert "6 more are not drawn" in shown.note
    found = colours(names[:MOST_LINES]).values()
    assert len({(one.light, one.dash) for one in found}) == MOST_LINES


def luminance(colour: str) -> float:
    """WCAG's relative luminance."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(("palette", "ground"), [(LIGHT, "#ffffff"), (DARK, "#1b1f26")])
def test_lines_stand_out_from_the_page(palette: tuple[str, ...], ground: str) -> None:
    """WCAG 1.4.11 asks for 3:1 of what is drawn."""
    for colour in palette:
        low, high = sorted((luminance(colour), luminance(ground)))
        assert (high + 0.05) / (low + 0.05) >= 3.0, colour


DEUTERANOPIA = ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881))
PROTANOPIA = ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998))
"""Machado et al. 2009, of linear RGB."""


@pytest.mark.parametrize("palette", [LIGHT, DARK])
@pytest.mark.parametrize("seen", [DEUTERANOPIA, PROTANOPIA])
def test_colour_blind_readers_tell_the_colours_apart(
    palette: tuple[str, ...], seen: tuple[tuple[float, ...], ...]
) -> None:
    """In CIELAB: 10 is seen side by side at once."""
    found = {colour: lab(colour, seen) for colour in palette}
    for one, two in itertools.combinations(palette, 2):
        distance = sum((a - b) ** 2 for a, b in zip(found[one], found[two], strict=True)) ** 0.5
        assert distance >= 10.0, (one, two, distance)


def lab(colour: str, seen: tuple[tuple[float, ...], ...]) -> tuple[float, float, float]:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    red, green, blue = (max(0.0, sum(a * b for a, b in zip(row, linear, strict=True))) for row in seen)
    xyz = (
        (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505,
        0.2126 * red + 0.7152 * green + 0.0722 * blue,
        (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089,
    )
    x, y, z = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize(("largest", "form"), [(0.5, ".0%"), (0.02, ".1%"), (0.004, ".2%"), (2e-7, ".1e")])
def test_ticks_of_shares_differ(largest: float, form: str) -> None:
    plot = plot_of("effect", points=Points(steps=[1.0, 2.0], values=[0.0, largest]), unit="share")
    assert plot.figure()["layout"]["yaxis"]["tickformat"] == form
