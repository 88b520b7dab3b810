"""Pictures of a run's page in a browser, light and dark, wide and on a phone.

python benchmarks/page_pictures.py --run runs/tiny [--output docs/pictures] [--browser chromium]

The pages are made anew. Needs the packages plotly and playwright, and Chromium or Chrome.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from trp_scale.errors import RefusedError
from trp_scale.reporting.document import page_text
from trp_scale.reporting.record import read_run
from trp_scale.reporting.run import run_page

BROWSERS = ("chromium", "chromium-browser", "google-chrome")

VIEWS: dict[str, tuple[int, int, Literal["light", "dark"]]] = {
    "report_light": (1280, 1340, "light"),
    "report_dark": (1280, 1340, "dark"),
    "report_phone": (400, 1300, "light"),
}
"""Name of the file: width and height of the window, and the scheme that the system asks for."""


@dataclass(kw_only=True)
class Options:
    """Draw a run's page."""

    run: Path
    """Its directory."""
    output: Path = Path("docs/pictures")
    """Directory of the PNG files."""
    browser: str = ""
    """Program; empty = chromium, chromium-browser or google-chrome, whichever is there."""


def draw(options: Options) -> list[Path]:
    """Write the pictures; gives their paths.

    Raises:
        RefusedError: no browser is there, or no run.
    """
    program = next(filter(None, map(shutil.which, [options.browser] if options.browser else BROWSERS)), None)
    if program is None:
        raise RefusedError(f"none of {', '.join(BROWSERS)} is on PATH; give --browser PROGRAM")
    from playwright.sync_api import sync_playwright

    options.output.mkdir(parents=True, exist_ok=True)
    written = []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = Path(folder) / "report.html"
        page.write_text(page_text(run_page(read_run(options.run))), encoding="utf-8")
        # Chromium starts as root, as in a container, without its sandbox alone; the page is our own.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for name, (width, height, scheme) in VIEWS.items():
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
            tab = context.new_page()
            tab.goto(page.as_uri())
            tab.wait_for_function("[...document.querySelectorAll('.plot')].every(one => one.querySelector('.trace'))")
            path = options.output / f"{name}.png"
            # All colours stay: a palette of 256 would mix those of tasks.
            Image.open(io.BytesIO(tab.screenshot())).convert("RGB").save(path, optimize=True)
            written.append(path)
            context.close()
        browser.close()
    return written


if __name__ == "__main__":
    for path in draw(tyro.cli(Options)):
        print(f"{path}: {path.stat().st_size:,} bytes")
