"""Commands that read a run which was made with a module of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.extending import forgetting, write_files
from tests.grids import always
from tests.runs import image_flags
from tests.unit.finetuning.test_finetune import tuning_flags
from trp_scale.cli import main as cli


class Made(NamedTuple):
    """A run of pre-training, one of fine-tuning, their module and their data."""

    run: Path
    tuned: Path
    module: Path
    data: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, image_dataset: Path) -> Made:
    directory = tmp_path_factory.mktemp("made")
    module = write_files(directory / "own") / "lookahead.py"
    run, tuned = directory / "run", directory / "tuned"
    given = ["--module", str(module), "--hooks", "lookahead", "--lookahead.every", "2"]
    flags = tuning_flags(image_dataset, tuned, "scratch", downstream__epochs=0, training__steps=1)
    with forgetting():
        assert cli.main(["pretrain", *image_flags("mae_vit_b", image_dataset, run, training__steps=1), *given]) == 0
        assert cli.main(["finetune", *flags, *given]) == 0
    return Made(run, tuned, module, image_dataset)


COMMANDS = {
    "export": "--run {run} --output {output} --to hf",
    "probe": "--from {run} --data {data} --method knn --validation_fraction 0.3 --cache {output} --run_dir {output}",
    "represent": "--from {run} --data {data} --output {output} --images 10 --shown 2",
    "represent of fine-tuned": "--from scratch --recipe adpe_tiny --run {seed} --data {data} --output {output} "
    "--images 10 --shown 2",
    "report": "--run {run} --pictures {output}",
    "evaluate": "--run {tuned} --output {output}",
    "finetune": "{finetune}",
}
"""A small use of each."""


def arguments(made: Made, command: str, output: Path) -> list[str]:
    tuning = tuning_flags(made.data, output, str(made.run), downstream__epochs=0, training__steps=1)
    seed = made.tuned / "classification" / "seed_0"
    line = COMMANDS[command].format(**made._asdict(), seed=seed, output=output, finetune=" ".join(map(str, tuning)))
    return [command.split()[0], *line.split()]


@pytest.mark.parametrize("command", always(COMMANDS, "represent", "finetune", "evaluate"))
def test_a_run_is_read_with_its_module_only(
    made: Made, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments(made, command, tmp_path / "without")
    with forgetting():
        assert cli.main(given) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    assert "settings of a run with --module lookahead; give it here too, by its file or its dotted name" in said
    with forgetting():
        assert cli.main([*arguments(made, command, tmp_path / "with"), "--module", str(made.module)]) == 0


def test_the_table_of_a_run_needs_no_module(made: Made) -> None:
    assert cli.main(["report", "--run", str(made.run)]) == 0


def test_a_module_that_is_not_there_is_refused(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", "--run", str(made.run), "--module", "nowhere.py"]) == 2
    assert "--module nowhere.py: there is no such file" in capsys.readouterr().err
