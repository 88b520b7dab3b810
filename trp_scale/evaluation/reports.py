"""`trp-scale report`, `compare` and `export`: results that are printed or returned."""

from __future__ import annotations

import html
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import RenderableType

from trp_scale.checkpoint.export import export as export_weights
from trp_scale.checkpoint.export import loading_call, while_training
from trp_scale.console import Shown
from trp_scale.errors import RefusedError
from trp_scale.evaluation.arguments import CompareArguments, ExportArguments, ReportArguments
from trp_scale.reporting.comparison import Comparison
from trp_scale.reporting.comparison_page import compare as compare_runs
from trp_scale.reporting.document import can_draw, page_text
from trp_scale.reporting.record import RunRecord, read_run
from trp_scale.reporting.run import run_page, write_page
from trp_scale.training.metrics import newest_run
from trp_scale.training.report import report as report_text
from trp_scale.training.sinks import list_pictures


@dataclass(frozen=True, kw_only=True, repr=False)
class Report(Shown):
    """Report of a run; a notebook shows its page.

    Attributes:
        run: contents of the run directory.
        drawn: lines about the pictures that were drawn.
        pictures: PNG files of the page.
        page: RUN/report.html, or the reason why it was not written.
    """

    run: RunRecord
    drawn: Sequence[str]
    pictures: Sequence[Path]
    page: str

    @property
    def worst_task(self) -> str | None:
        """Balanced task with the largest loss at the end."""
        return self.run.history.worst_task

    @property
    def losses(self) -> dict[str, float | None]:
        """Loss of each task over the last tenth of the steps; `None` if it did not occur there."""
        return {name: task.end for name, task in self.run.history.tasks.items()}

    def parts(self) -> Iterator[RenderableType]:
        """Yield the table, the pictures and the page."""
        yield report_text(self.run.run_dir, self.run.history).rstrip()
        yield from self.drawn
        yield self.page

    def _repr_html_(self) -> str | None:
        """Return a frame with the page; `None` if plotly is missing: a notebook shows the text then."""
        if not can_draw():
            return None
        page = page_text(run_page(self.run, self.pictures))
        page = page.replace("<head>", '<head><base href="about:srcdoc">', 1)  # links stay in the frame
        return f'<iframe srcdoc="{html.escape(page)}" width="100%" height="800" style="border: 0"></iframe>'


def report(arguments: ReportArguments) -> Report:
    """Read a run, draw its pictures, and write its page. Raises RefusedError: no such run, or images without
    pictures."""
    if arguments.images and arguments.pictures is None:
        raise RefusedError(f"--images {arguments.images[0]} needs --pictures DIR, the directory to draw into")
    run_dir, pictures = arguments.run or newest_run(Path("runs")), arguments.pictures
    run = read_run(run_dir)
    drawn: list[str] = []
    if pictures is not None:
        from trp_scale.evaluation.figures.pictures import draw_pictures

        drawn = while_training(draw_pictures)(run_dir, pictures, data=arguments.data, images=arguments.images)
    files = [] if pictures is None else list_pictures(pictures)
    return Report(run=run, drawn=drawn, pictures=files, page=write_page(run, files))


def compare(arguments: CompareArguments) -> Comparison:
    """Compare runs, and write the files of the flags. Raises as `comparison_page.compare`."""
    return compare_runs(arguments.runs, html=arguments.html, markdown=arguments.markdown, csv=arguments.csv)


@dataclass(frozen=True, kw_only=True, repr=False)
class Exported(os.PathLike[str], Shown):
    """Export of a run, usable as the path of its directory.

    Attributes:
        checkpoint: the exported checkpoint.
        call: Python expression that loads the model.
    """

    path: Path
    checkpoint: Path
    call: str

    def parts(self) -> Iterator[RenderableType]:
        """Yield the paths, and the call."""
        yield f"{self.checkpoint} -> {self.path}\nloaded by: {self.call}"
        if self.call.startswith("timm."):
            yield "without pretrained=True timm silently makes random weights"

    def __fspath__(self) -> str:
        return str(self.path)


def export(arguments: ExportArguments) -> Exported:
    """Write a run's weights for another library. Raises as `checkpoint.export.export`."""
    checkpoint = export_weights(
        arguments.run,
        arguments.output,
        to=arguments.to,
        image_size=arguments.image_size,
        weights=arguments.weights,
    )
    return Exported(path=arguments.output, checkpoint=checkpoint, call=loading_call(arguments.output))
