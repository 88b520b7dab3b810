"""A run starts at most as many loader workers as its rank has CPUs, says so, and learns the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runs import flags, image_flags, lines, pretrain_here
from tests.unit.data.images.stored import sample, write_images
from trp_scale.config.loader import load_recipe
from trp_scale.data.fetch import MicroBatches
from trp_scale.distributed import environment

CPUS = 2


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Loader workers of each source that a run opens, on a machine of 2 CPUs."""
    monkeypatch.setattr(environment, "cpus_of_rank", lambda world: CPUS)
    found: list[int] = []
    make = MicroBatches.__init__

    def watched(self: MicroBatches, *arguments: object, workers: int, **others: object) -> None:
        found.append(workers)
        make(self, *arguments, workers=workers, **others)  # type: ignore[arg-type]

    monkeypatch.setattr(MicroBatches, "__init__", watched)
    return found


def test_workers_are_capped_and_change_nothing(
    text_dataset: Path, tmp_path: Path, started: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    losses = []
    for asked in (0, 64):
        run_dir = tmp_path / str(asked)
        changes = {"data__workers": asked, "training__steps": 3, "validation__every": 3}
        assert pretrain_here(flags(text_dataset, run_dir, **changes)) == 0
        losses.append([(line["loss"], line["tasks"], line.get("validation")) for line in lines(run_dir)])
        assert load_recipe(run_dir / "config.yaml").data.workers == asked
        summary = json.loads((run_dir / "summary.json").read_text())
        assert (summary["loader_workers"], summary["loader_workers_asked"]) == (min(asked, CPUS), asked)
    assert losses[0] == losses[1]
    assert started == [0, 0, 1, CPUS], "validation, then training, of each run"
    assert "--data.workers 64: 2 " in capsys.readouterr().out
    assert "--data.workers" not in (tmp_path / "0" / "report.txt").read_text()
    assert "loader workers: 0)" in (tmp_path / "0" / "report.txt").read_text()
    assert "loader workers: 2 of 64" in (tmp_path / "64" / "report.txt").read_text()


@pytest.mark.exhaustive
def test_what_learned_masks_share_is_the_capped_number(tmp_path: Path, started: list[int]) -> None:
    samples = [sample(number, 40, 40) for number in range(60)]
    data = write_images(tmp_path / "data", [samples], rows_per_block=2)
    masks = {"multilevel__network": "patchwise", "multilevel__kind": "head", "multilevel__unroll": 1}
    argv = image_flags("mae_vit_b", data, tmp_path / "run", training__steps=1, data__workers=12, **masks)
    assert pretrain_here(argv) == 0
    assert started == [1, 1, 1], "each source has at least one"
