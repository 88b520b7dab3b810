"""A study of a few steps from the command line to its report: data, runs, judging, all by the commands themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trp_scale.cli import main as cli
from trp_scale.config.files import write_yaml

SETTINGS = {
    "data.path": "{scenes}",
    "data.workers": 0,
    "data.validation_fraction": 0.2,
    "model.layers": 1,
    "model.hidden_size": 16,
    "model.heads": 2,
    "model.intermediate_size": 32,
    "vision.patch_size": 8,
    "vision.decoder_layers": 1,
    "vision.decoder_hidden_size": 16,
    "vision.decoder_heads": 2,
    "crops.size": 32,
    "batch.global_size": 8,
    "batch.micro_size": 8,
    "training.steps": 4,
    "training.precision": "fp32",
    "optimizer.warmup_steps": 1,
    "optimizer.lr": 0.001,
    "checkpoint.every": 0,
    "validation.every": 0,
    "logging.every": 1,
    "logging.progress": "false",
}


@pytest.mark.exhaustive
def test_a_study_from_the_command_to_the_report(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    study = {
        "title": "Mask ratios",
        "source": {"paper": "MAE", "arxiv": "2111.06377", "place": "Figure 5"},
        "question": "Which ratio?",
        "baseline": "r75",
        "outcome": {"judges": ["held_out"], "row": "average"},
        "variants": {
            "r75": {"title": "0.75"},
            "r50": {"title": "0.5", "settings": {"masking.ratio": 0.5}},
        },
        "scales": {
            "cpu": {
                "recipe": "mae_vit_b",
                "seeds": 2,
                "settings": SETTINGS,
                "data": {
                    "scenes": {
                        "command": "shard-images",
                        "flags": {"embedded": True, "count": 64, "size": 32, "rows_per_block": 4, "processes": 1},
                    }
                },
                "judges": {"held_out": {"command": "evaluate", "flags": {}}},
            }
        },
    }
    path, run_dir = tmp_path / "ratios.yaml", tmp_path / "study"
    path.write_text(write_yaml(study))
    assert cli.main(["study", "run", str(path), "--run_dir", str(run_dir), "--jobs", "2"]) == 0
    assert "9 of 9 finished" in capfd.readouterr().out
    assert cli.main(["study", "run", str(path), "--run_dir", str(run_dir)]) == 0
    assert len(list((run_dir / "logs").iterdir())) == 9
    assert cli.main(["study", "report", str(run_dir)]) == 0
    printed = capfd.readouterr().out
    assert "0.5: " in printed and "paired t test" in printed
    figures = json.loads((run_dir / "report" / "figures.json").read_text())
    (row,) = figures["figures"]
    assert row["lower_is_better"] and {len(seeds) for seeds in row["values"].values()} == {2}
