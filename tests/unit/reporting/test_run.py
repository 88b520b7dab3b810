"""The page of a run: each kind of run has its sections and no others, plots have data, and no text becomes markup."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.unit.reporting.small_runs import (
    FAILED,
    FINISHED,
    HOSTILE,
    curve_traces,
    image_lines,
    line,
    mask_lines,
    task,
    text_lines,
    write,
)
from trp_scale.cli import main as cli
from trp_scale.config import registry
from trp_scale.config.loader import load_recipe
from trp_scale.config.registry import MetricPlot, describe_metrics
from trp_scale.errors import RefusedError
from trp_scale.reporting import document
from trp_scale.reporting.document import Plot, page_text
from trp_scale.reporting.record import read_run
from trp_scale.reporting.run import export_format, optimizer_section, pictures_section, run_page

PNG = b"\x89PNG\r\n\x1a\n" + bytes(20)


class Read(HTMLParser):
    """What a browser would see: elements, anchors of sections, text of headings and cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    @property
    def sections(self) -> list[str]:
        return [str(attrs["id"]) for tag, attrs in self.tags if tag == "section"]

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def page_of(run: Path) -> str:
    return page_text(run_page(read_run(run)), served="tested without the script of plotly")


def figures_of(text: str) -> list[dict[str, Any]]:
    (matches,) = re.findall(r'<script type="application/json" id="plots">(.*?)</script>', text, flags=re.DOTALL)
    figures: list[dict[str, Any]] = json.loads(matches)["figures"]
    return figures


def titles_of(text: str) -> list[str]:
    return [html.unescape(title) for title in re.findall(r"<h3>(.*?)</h3>", text)]


def check_plots(text: str) -> None:
    figures = figures_of(text)
    assert len(figures) == len(titles_of(text)) == text.count('class="plot"') > 0
    for title, figure in zip(titles_of(text), figures, strict=True):
        assert curve_traces(figure), title
        for trace in curve_traces(figure):
            assert len(trace["x"]) == len(trace["y"]) > 0, title
            assert trace["x"] == sorted(trace["x"]), title


@pytest.fixture
def text_run(tmp_path: Path) -> Path:
    return write(tmp_path / "text", text_lines(), recipe="pos_bert_tiny", stop=FINISHED)


def test_a_run_on_text(text_run: Path) -> None:
    text = page_of(text_run)
    check_plots(text)
    read = Read(text)
    assert read.sections == ["losses", "optimizer", "hook-balancer", "speed", "settings", "next"]
    titles = titles_of(text)
    assert titles[:3] == ["Training loss", "Held-out loss", "Held-out accuracy"]
    assert {"Weight of each task", "Effective elements", "Throughput", "Memory"} <= set(titles)
    assert "finished" in read.words and "noun · worst" in read.words and "other · not balanced" in read.words
    assert "The worst task, noun, fell from 7.0" in read.words
    # The worst task is thick in both plots of losses; the rest of the weights' plot are the tasks in the balance.
    first, second = figures_of(text)[:2]
    for figure in (first, second):
        assert curve_traces(figure)[-1]["name"] == "noun"
    weights = figures_of(text)[titles.index("Weight of each task")]
    assert {trace["name"] for trace in curve_traces(weights)} == {"noun", "verb", "rare"}
    assert "training.steps" in read.words and "pos_bert_tiny" in read.words
    assert f"trp-scale finetune --recipe glue --from {text_run}" in read.words
    assert "tokens / s" in read.words and "adversary" not in read.sections


def test_a_run_on_images(tmp_path: Path) -> None:
    text = page_of(write(tmp_path / "images", image_lines(), recipe="adpe_tiny", stop=FINISHED))
    check_plots(text)
    read, titles = Read(text), titles_of(text)
    assert read.sections == ["losses", "optimizer", "hook-adversary", "hook-probes", "speed", "settings", "next"]
    assert {"Share of the ball", "Norm", "Saturation", "Accuracy", "RankMe"} <= set(titles)
    assert "eps 1" in read.words and "worst" not in read.words.replace("worst task ends lowest", "")
    accuracy = figures_of(text)[titles.index("Accuracy")]
    assert curve_traces(accuracy)[0]["x"] == [5, 11, 17]  # the steps that the probes name
    assert "--to timm --output EXPORTED" in read.words, "its positions are relative, which transformers' MAE has not"
    assert "images / s" in read.words and "trp-scale probe --from" in read.words


@pytest.mark.parametrize(("recipe", "to"), [("mae_tiny", "hf"), ("mm_mae_tiny", "timm"), ("pos_bert_tiny", "hf")])
def test_the_command_takes_a_model_where_it_fits(recipe: str, to: str) -> None:
    assert export_format(load_recipe(recipe)) == to


def test_of_many_steps_some_are_shown_whole_the_first_and_the_last_among_them(tmp_path: Path) -> None:
    run = write(tmp_path / "masks", mask_lines())
    for step in range(100, 1300, 100):
        for what in ("masks", "reconstructions"):
            path = run / "pictures" / f"step_{step:08d}" / f"{what}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(PNG)
    (block,) = pictures_section(read_run(run)).blocks
    assert isinstance(block, document.Pictures)
    captions = [caption for caption, _ in block.pictures]
    shown = [tuple(caption.split(" / ")) for caption in captions]
    steps = list(dict.fromkeys(step for step, _ in shown))
    assert len(captions) == 12 and (steps[0], steps[-1]) == ("step_00000100", "step_00001200")
    assert all({what for each, what in shown if each == step} == {"masks", "reconstructions"} for step in steps)


def test_a_run_with_learned_masks_and_a_hook_that_nobody_describes(tmp_path: Path) -> None:
    run = write(tmp_path / "masks", mask_lines())
    for name in ("masks_00000010.png", "masks_00000002.png"):
        (run / "pictures").mkdir(exist_ok=True)
        (run / "pictures" / name).write_bytes(PNG)
    (run / "pictures" / "no.png").write_bytes(b"<svg onload=alert(1)>")
    text = page_of(run)
    check_plots(text)
    read, titles = Read(text), titles_of(text)
    assert read.sections == ["losses", "optimizer", "hook-multilevel", "other-metrics", "pictures", "speed", "next"]
    assert {"Entropy of a patch's masking", "Overlap", "Time of each level"} <= set(titles)
    assert {"Speed", "Parts"} <= set(titles) and "limit 3" in read.words
    parts = figures_of(text)[titles.index("Parts")]
    assert [trace["name"] for trace in curve_traces(parts)] == ["left", "right"]
    captions = re.findall(r"<figcaption>(masks.*?)</figcaption>", text)
    assert captions == ["masks 00000002", "masks 00000010"]
    assert "trp-scale export" not in read.words  # without config.yaml nobody knows what it reads


def test_a_run_that_failed(tmp_path: Path) -> None:
    incidents = ({"at": "now", "step": 3, "kind": "unreadable", "key": HOSTILE, "reason": "torn"}, {"kind": 7})
    lines = [line(step, {HOSTILE: task(None if step == 2 else 1.0 / step)}, applied=step != 2) for step in (1, 2, 3)]
    run = write(tmp_path / "a b", iter(lines), recipe="pos_bert_tiny", stop=FAILED, incidents=incidents)
    text = page_of(run)
    read = Read(text)
    assert "failed" in read.words and "ValueError" in read.words and "read the error" in read.words
    assert "incidents" in read.sections and "unreadable" in read.words and "Skipped steps: 2" in read.words
    assert f"trp-scale pretrain --recipe pos_bert_tiny --training.steps 3 --run_dir '{run}'" in read.words
    assert f"trp-scale doctor '{run}'" in read.words


@pytest.mark.parametrize("recorded", [True, False])
def test_a_run_that_patience_ended_has_nothing_left_to_do(tmp_path: Path, recorded: bool) -> None:
    why = "no better validation.loss in 2 measurements: best 3.0 at step 1"
    stop = {"why": why, "status": 0, "step": 3, "again": False, "advice": "nothing is left to do"}
    run = write(tmp_path / "run", text_lines(), recipe="pos_bert_tiny", stop=stop if recorded else None)
    if not recorded:
        (run / "summary.json").write_text(json.dumps({"exit_reason": why}), encoding="utf-8")
    read = Read(page_of(run))
    assert "no better validation.loss in 2 measurements" in read.words and "It was stopped" not in read.words
    assert "trp-scale pretrain" not in read.words, "the command that goes on"


def test_no_name_or_path_becomes_markup(tmp_path: Path) -> None:
    tasks = {HOSTILE: task(1.0), f"{HOSTILE}2": task(2.0)}
    hook = {"kind": HOSTILE, HOSTILE: {HOSTILE: 1.0}, "notice": HOSTILE}
    lines = [line(step, tasks, **{HOSTILE: {**hook, "x": step / 7}}) for step in (1, 2)]
    run = write(tmp_path / "<img src=x onerror=alert(1)>", iter(lines), stop=FAILED, incidents=({"kind": HOSTILE},))
    (run / "config.yaml").write_text(json.dumps({"modules": [HOSTILE], HOSTILE: {"x": HOSTILE}}), encoding="utf-8")
    text = page_of(run)
    assert HOSTILE not in text and "<img" not in text
    scripts = [attrs for tag, attrs in Read(text).tags if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "plots"}, {"src": "plotly.min.js"}, {}]
    assert HOSTILE in Read(text).words and "alert(1)</script" not in json.dumps(text)
    names = [trace["name"] for figure in figures_of(text) for trace in figure["data"]]
    assert not any("<" in name for name in names)


def test_a_run_of_one_step_and_of_none_of_the_fields(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "tasks": {"a": task(1.0)}}) + "\n", encoding="utf-8")
    text = page_of(tmp_path)
    check_plots(text)
    assert Read(text).sections == ["losses", "next"]


def test_a_long_run_says_what_was_averaged(tmp_path: Path) -> None:
    lines = (line(step, {"a": task(100.0 if step == 777 else 1.0)}) for step in range(1, 1501))
    text = page_of(write(tmp_path / "long", lines))
    assert "Means of up to 3 logged steps; the band reaches from least to largest." in Read(text).words
    loss = figures_of(text)[0]["data"]
    assert max(loss[0]["y"]) == 100.0 and max(len(trace["x"]) for trace in loss) <= 2000


def test_a_first_step_that_compiled_leaves_room_for_the_others(tmp_path: Path) -> None:
    lines = (
        {**line(step, {"a": task(1.0)}), "step_seconds": 37.5 if step == 1 else 0.25 + step / 1000}
        for step in range(1, 20)
    )
    text = page_of(write(tmp_path / "compiled", lines))
    time = figures_of(text)[titles_of(text).index("Time of a step")]["data"]
    assert (time[0]["x"][0], max(time[0]["y"])) == (2, 0.269)
    assert "Not drawn: 1 above 20 times the median, the longest of 37.5 s." in Read(text).words


def test_a_hook_from_outside_describes_its_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_described", dict(registry._described))
    plot = MetricPlot(title="How fast", names=("speed",), unit="m / s")
    describe_metrics("own_hook", title="A hook of my own", look_for="That it moves.", plots=[plot])
    text = page_of(write(tmp_path / "masks", mask_lines()))
    assert "How fast" in titles_of(text) and "Parts" in titles_of(text)
    assert "A hook of my own" in Read(text).words and "other-metrics" not in Read(text).sections


def test_a_hook_is_described_once() -> None:
    with pytest.raises(RefusedError, match=r"'adversary' .* by trp_scale.methods.adversary.settings"):
        registry.metrics_description("adversary")
        describe_metrics("adversary", title="mine", look_for="")


def test_what_rooms_describe_is_logged_by_their_hooks() -> None:
    """A metric that was renamed would leave the page without its plot."""
    package = Path(cli.__file__).parents[1]
    rooms = {"adversary": "methods/adversary", "multilevel": "methods/learned_masks", "probes": "evaluation/probe"}
    for name, room in rooms.items():
        described = registry.metrics_description(name)
        assert described is not None
        files = [path for path in (package / room).glob("*.py") if path.name not in ("settings.py", "__init__.py")]
        source = "".join(path.read_text(encoding="utf-8") for path in files)
        for metric in (each for plot in described.plots for each in plot.names):
            assert re.search(rf'["\s]{metric}["\s=,:]', source), (name, metric)


@pytest.fixture
def printed(text_run: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[str]:
    assert cli.main(["report", "--run", str(text_run)]) == 0
    yield capsys.readouterr().out


def test_report_writes_the_page_and_says_where(text_run: Path, printed: str) -> None:
    assert printed.splitlines()[-1] == f"page: {text_run / 'report.html'}"
    assert "Pre-training report" in printed
    text = (text_run / "report.html").read_text(encoding="utf-8")
    assert text.count("plotly.js v") == 1
    addresses = [attrs.get("src") or attrs.get("href") for tag, attrs in Read(text).tags if tag != "a"]
    assert {address for address in addresses if address} == {"data:,"}


def test_without_plotly_the_text_is_printed_and_what_to_install(
    text_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document, "find_spec", lambda name: None)
    assert cli.main(["report", "--run", str(text_run)]) == 0
    output = capsys.readouterr().out
    assert "noun" in output and output.splitlines()[-1].endswith("pip install 'trp-scale[pictures]'")
    assert not (text_run / "report.html").exists()


def test_a_plot_shows_figures_that_measure_the_same(tmp_path: Path) -> None:
    """The weighted sum that is minimised and the mean of held-out tasks have axes of their own."""
    lines = [{**each, "validation": {"loss": 2.0, "tasks": {}}} for each in text_lines(4)]
    run = read_run(write(tmp_path / "run", iter(lines)))
    plots = {
        plot.title: [line.name for line in plot.lines]
        for plot in optimizer_section(run).blocks
        if isinstance(plot, Plot)
    }
    assert plots["Total loss"] == ["training"]
    assert plots["Held-out loss (mean of the balanced tasks)"] == ["held out"]
