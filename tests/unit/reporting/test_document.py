"""The pages in a real browser: no errors, no network, all plots drawn, tables sorted, dark where it is asked for, and
no scrolling sideways on a phone."""

from __future__ import annotations

import io
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.unit.reporting.small_runs import FAILED, FINISHED, HOSTILE, image_lines, mask_lines, text_lines, write
from trp_scale.cli import main as cli
from trp_scale.reporting import watch
from trp_scale.reporting.document import page_text
from trp_scale.reporting.record import read_run
from trp_scale.reporting.run import run_page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on PATH")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield opened
        opened.close()


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


@pytest.mark.parametrize("number", range(4))
def test_it_loads_alone_and_draws_every_plot(browser: Any, pages: list[Path], number: int) -> None:
    with Opened(browser, pages[number], viewport={"width": 400, "height": 800}) as opened:
        assert opened.drawn() and all(opened.drawn())
        asked = {address for address in opened.asked if not address.startswith(("data:", "blob:"))}
        assert asked == {opened.address} and not opened.wrong
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= 400


@pytest.mark.parametrize("width", [400, 1280])
def test_runs_side_by_side(browser: Any, pages: list[Path], tmp_path: Path, width: int) -> None:
    page = tmp_path / "compared.html"
    assert cli.main(["compare", str(pages[0].parent), str(pages[1].parent), "--html", str(page)]) == 0
    with Opened(browser, page, viewport={"width": width, "height": 800}) as opened:
        assert opened.drawn() and all(opened.drawn()) and not opened.wrong
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
        assert opened.colours() > 20


@pytest.mark.parametrize("width", [400, 1280])
def test_a_page_that_follows_its_run_is_drawn_again(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    run = write(tmp_path / "run", text_lines(3))
    monkeypatch.setattr(watch, "REST", 0)
    with watch.make_server(watch.RunningPage(run), 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            address = f"http://{watch.HOST}:{server.server_address[1]}/"
            with Opened(browser, address, viewport={"width": width, "height": 800}) as opened:
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
    line = ".scatterlayer .trace path"
    with (
        Opened(browser, pages[0], color_scheme="light") as light,
        Opened(browser, pages[0], color_scheme="dark") as dark,
    ):
        ground = [opened.colour("body", "backgroundColor") for opened in (light, dark)]
        assert ground[0] != ground[1]
        strokes = [opened.colour(line, "stroke") for opened in (light, dark)]
        assert strokes[0] != strokes[1]
        light.page.click("#theme")
        assert light.colour("body", "backgroundColor") == ground[1] and light.colour(line, "stroke") == strokes[1]
        light.page.reload()
        assert light.colour("body", "backgroundColor") == ground[1]
        dark.page.emulate_media(color_scheme="light")
        assert dark.colour("body", "backgroundColor") == ground[0]
        assert not light.wrong and not dark.wrong


def test_a_click_in_the_legend_hides_a_line_with_its_band(browser: Any, pages: list[Path]) -> None:
    with Opened(browser, pages[3]) as opened:
        before = opened.drawn()[0]
        opened.page.click(".legend .strong >> nth=0")
        assert opened.drawn()[0] == before - 2
        opened.page.click(".legend .strong >> nth=0")
        assert opened.drawn()[0] == before
