"""The task of docs/extending.md, by --module: trained, measured, gone on with, evaluated and refused without it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.documents.pages import blocks
from tests.extending import files, forgetting
from tests.unit.finetuning.test_finetune import tuning_flags
from trp_scale.cli import main as cli
from trp_scale.reporting.results import read_results


def test_a_task_of_one_s_own(image_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module, recipe = tmp_path / "brightness.py", tmp_path / "brightness.yaml"
    module.write_text(files()["brightness.py"], encoding="utf-8")
    (shown,) = (block.text for block in blocks(Path("docs/extending.md").name) if "kind: brightness" in block.text)
    recipe.write_text(shown, encoding="utf-8")
    run_dir, given = tmp_path / "run", ["--module", str(module)]
    flags = tuning_flags(image_dataset, run_dir, "scratch", downstream__epochs=0.0, training__steps=4)
    flags = [*flags, "--data.validation_fraction", "0.3", "--optimizer.warmup_steps", "0"]
    own = [*flags[2:], "--recipe", str(recipe)]
    with forgetting():
        assert cli.main(["finetune", *own, *given]) == 0
        first = read_results(run_dir).tasks[0]
        assert (first.task, first.metric, first.lower_is_better) == ("brightness", "error", True)
        assert 0 < first.values[0] < 10
        assert cli.main(["finetune", *own, *given]) == 0, "what is finished was not found"
        assert read_results(run_dir).tasks[0].values == first.values
        assert cli.main(["evaluate", "--run", str(run_dir), "--output", str(tmp_path / "out"), *given]) == 0
        assert read_results(tmp_path / "out").tasks[0].values == pytest.approx(first.values)
        looked_at = ["--from", "scratch", "--recipe", "adpe_tiny", "--image_size", "32", "--data", str(image_dataset)]
        looked_at += ["--images", "8", "--shown", "2", "--output", str(tmp_path / "seen")]
        assert cli.main(["represent", *looked_at, "--run", str(run_dir / "brightness" / "seed_0"), *given]) == 0
        drawn = json.loads((tmp_path / "seen" / "representation.json").read_text(encoding="utf-8"))
        assert drawn["pictures"][-1] == "brightness.png" and (tmp_path / "seen" / "brightness.png").is_file()
        switched = [*flags, "--downstream.kind", "brightness", "--downstream.darkest", "2", *given]
        assert cli.main(["finetune", *switched]) == 2
        assert "--downstream.darkest is 2.0, allowed: from 0 to below 1" in capsys.readouterr().err
        assert cli.main(["finetune", *own, "--augmentation.mixup", "1", *given]) == 2
        assert "a setting of downstream.kind classification; this run's is brightness" in capsys.readouterr().err
    with forgetting():
        assert cli.main(["finetune", *own]) == 2
        assert "downstream.kind is 'brightness'" in capsys.readouterr().err
        assert cli.main(["evaluate", "--run", str(run_dir), "--output", str(tmp_path / "again")]) == 2
        assert "--module" in capsys.readouterr().err
