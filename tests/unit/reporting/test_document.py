"""The pages in a real browser: no errors, no network, all plots drawn, tables sorted, dark where it is asked for, and
no scrolling sideways on a phone."""

from __future__ import annotations

import io
import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.grids import always
from tests.unit.reporting.small_runs import FAILED, FINISHED, HOSTILE, image_lines, mask_lines, text_lines, write
from trp_scale.cli import main as cli
from trp_scale.reporting import watch
from trp_scale.reporting.document import DARK, LIGHT, MOST_LINES, Line, Plot, colours, page_text
from trp_scale.reporting.record import Points, read_run
from trp_scale.reporting.run import run_page


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of a run on text, on images, with masks and a long unbroken name, and one that failed."""
    place = tmp_path_factory.mktemp("pages")
    runs = [
        write(place / "text", text_lines(), recipe="pos_bert_tiny", stop=FINISHED),
        write(place / "images", image_lines(), recipe="adpe_tiny", stop=FINISHED),
        write(place / f"masks{'_long' * 20}", mask_lines(), recipe="mlo_mae_tiny"),
        write(
            place / "failed", text_lines(700), stop=FAILED, incidents=({"kind": HOSTILE, "step": 1, "key": "k" * 300},)
        ),
    ]
    for run in runs:
        (run / "report.html").write_text(page_text(run_page(read_run(run))), encoding="utf-8")
    return [run / "report.html" for run in runs]


class Opened:
    """A page in a window, with what went wrong and what was asked for."""

    def __init__(self, browser: Any, page: Path | str, **context: Any) -> None:
        self.context = browser.new_context(**context)
        self.page = self.context.new_page()
        self.wrong: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.wrong.append(message.text) if message.type != "log" else None)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.address = page if isinstance(page, str) else page.as_uri()
        self.page.goto(self.address)

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *error: object) -> None:
        self.context.close()

    def drawn(self) -> list[int]:
        """Curves that each plot shows."""
        script = "holders => holders.map(one => one.querySelectorAll('.scatterlayer .trace').length)"
        found: list[int] = self.page.eval_on_selector_all(".plot", script)
        return found

    def colour(self, selector: str, name: str) -> str:
        return str(self.page.eval_on_selector(selector, f"one => getComputedStyle(one).{name}"))

    def colours(self) -> int:
        """Different ones in a picture of the window: a page that shows nothing has one."""
        picture = Image.open(io.BytesIO(self.page.screenshot())).convert("RGB")
        return len(picture.getcolors(maxcolors=picture.width * picture.height) or ())


@pytest.mark.parametrize("number", always(range(4), 1, 2))
def test_it_loads_alone_and_draws_every_plot(browser: Any, pages: list[Path], number: int) -> None:
    with Opened(browser, pages[number], viewport={"width": 400, "height": 800}) as opened:
        assert opened.drawn() and all(opened.drawn())
        asked = {address for address in opened.asked if not address.startswith(("data:", "blob:"))}
        assert asked == {opened.address} and not opened.wrong
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= 400


def test_runs_side_by_side(browser: Any, pages: list[Path], tmp_path: Path) -> None:
    page = tmp_path / "compared.html"
    assert cli.main(["compare", str(pages[0].parent), str(pages[1].parent), "--html", str(page)]) == 0
    with Opened(browser, page, viewport={"width": 400, "height": 800}) as opened:
        for width in (400, 1280):
            opened.page.set_viewport_size({"width": width, "height": 800})
            assert opened.drawn() and all(opened.drawn()) and not opened.wrong
            assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
            assert opened.colours() > 20


def test_a_page_that_follows_its_run_is_drawn_again(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write(tmp_path / "run", text_lines(3))
    monkeypatch.setattr(watch, "REST", 0)
    with watch.make_server(watch.RunningPage(run), 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            address = f"http://{watch.HOST}:{server.server_address[1]}/"
            with Opened(browser, address, viewport={"width": 400, "height": 800}) as opened:
                assert "up to step 3." in opened.page.inner_text("body")
                write(run, text_lines(5))
                opened.page.get_by_text("up to step 5.").first.wait_for(timeout=60_000)
                opened.page.locator(".plot .trace").last.wait_for()
                assert opened.drawn() and all(opened.drawn()) and not opened.wrong
                assert opened.colours() > 20
        finally:
            server.shutdown()
            thread.join()


def test_a_click_on_a_heading_sorts_and_another_the_other_way(browser: Any, pages: list[Path]) -> None:
    with Opened(browser, pages[0]) as opened:

        def column(place: int) -> list[str]:
            script = f"rows => rows.map(row => row.cells[{place}].dataset.order ?? '')"
            found: list[str] = opened.page.eval_on_selector_all("#losses tbody tr", script)
            return found

        before = column(1)
        opened.page.click("#losses th:nth-child(2) button")
        falls = [float(value) for value in column(1) if value]
        assert falls == sorted(falls, reverse=True) and sorted(column(1)) == sorted(before) != column(1)
        opened.page.click("#losses th:nth-child(2) button")
        assert [float(value) for value in column(1) if value] == falls[::-1]
        opened.page.click("#losses th:nth-child(3) button")
        assert column(2)[-1] == "" and column(2)[0] != ""  # what has no value comes last
        assert opened.page.get_attribute("#losses th:nth-child(3)", "aria-sort") == "descending"
        assert opened.page.get_attribute("#losses th:nth-child(2)", "aria-sort") is None


def test_light_and_dark(browser: Any, pages: list[Path]) -> None:
    """As the system asks, until the switch is used; plots and their legends change with the page."""
    with Opened(browser, pages[0], color_scheme="dark") as opened:

        def shown() -> list[str]:
            line = ".scatterlayer .trace path"
            return [opened.colour("body", "backgroundColor"), opened.colour(line, "stroke")]

        dark = shown()
        opened.page.emulate_media(color_scheme="light")
        light = shown()
        assert light[0] != dark[0] and light[1] != dark[1]
        opened.page.click("#theme")
        assert shown() == dark
        opened.page.reload()
        assert shown() == dark
        assert not opened.wrong


def test_a_click_in_the_legend_hides_a_line_with_its_band(browser: Any, pages: list[Path]) -> None:
    with Opened(browser, pages[3]) as opened:
        before = opened.drawn()[0]
        opened.page.click(".legend .strong >> nth=0")
        assert opened.drawn()[0] == before - 2
        opened.page.click(".legend .strong >> nth=0")
        assert opened.drawn()[0] == before


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


def test_as_many_lines_as_can_be_told_apart() -> None:
    names = [f"task {number}" for number in range(MOST_LINES + 6)]
    shown = plot_of(*names, worst=names[-1]).limit_lines()
    assert len(shown.lines) == MOST_LINES and shown.lines[0].name == names[-1]
    assert "6 more are not drawn" in shown.note
    found = colours(names[:MOST_LINES]).values()
    assert len({(one.light, one.dash) for one in found}) == MOST_LINES


def linear(colour: str) -> list[float]:
    """Red, green and blue of sRGB as linear shares."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def luminance(colour: str) -> float:
    """WCAG's relative luminance."""
    red, green, blue = linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


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
    red, green, blue = (max(0.0, sum(a * b for a, b in zip(row, linear(colour), strict=True))) for row in seen)
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
