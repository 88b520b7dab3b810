"""The moving picture of the display."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from PIL import Image

from benchmarks.pictures import Options, draw_display, draw_worst_part
from tests.runs import flags, pretrain_here


def test_a_run_is_replayed_to_its_end(text_dataset: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert pretrain_here(flags(text_dataset, run, validation__every=4)) == 0
    content = draw_display(run, Options(output=tmp_path, frames=3)).read_text()
    groups = [each for each in ElementTree.fromstring(content) if each.tag.endswith("}g")]
    shown = [" ".join(text.text or "" for text in group) for group in groups]
    assert len(shown) == 3 and "1/8" in shown[0] and "5/8" in shown[1]
    assert "8/8" in shown[-1] and "noun" in shown[0] and "held out" in shown[-1] and "held out" not in shown[0]
    assert "http" not in content.replace("http://www.w3.org/2000/svg", "")


def test_the_worst_part_is_drawn_from_the_reports(tmp_path: Path) -> None:
    picture = draw_worst_part(Path(__file__).parents[3] / "docs" / "studies", tmp_path)
    with Image.open(picture) as drawn:
        assert drawn.width > 800 and len(drawn.convert("RGB").getcolors(1 << 20) or []) > 10
