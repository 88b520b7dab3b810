"""Methods from outside the package, each in one file: those that docs/extending.md shows."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image

from tests.distributed.test_resume import LAYOUTS
from tests.extending import files, forgetting, write_files
from tests.grids import always
from tests.ranks import RankError, Ranks
from tests.runs import flags, image_flags, lines, pretrain_here
from tests.unit.data.images.source_images import stored
from trp_scale.checkpoint.format import read_full_state
from trp_scale.checkpoint.run_directory import checkpoint_path
from trp_scale.cli import main as cli
from trp_scale.config import RefusedError
from trp_scale.config import registry as components
from trp_scale.config.run_flags import parse
from trp_scale.reporting.results import read_results
from trp_scale.training.pretrain import pretrain
from trp_scale.training.report import report

LONGEST = {
    "power.py": 40,
    "lookahead.py": 60,
    "infrared.py": 120,
    "mae_bands.py": 120,
    "brightness.py": 150,
    "checked.py": 40,
}
"""Lines of each file, at most."""
LINES = {name: LAYOUTS[name] for name in ("fsdp", "zero3")}
STEPS, HALF = 5, 3
STATES = ("weight", "exp_avg", "exp_avg_sq", "slow_weights")


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with the files; what they register in this process is forgotten afterwards."""
    with forgetting():
        yield write_files(tmp_path_factory.mktemp("own"))


def own_methods(modules: Path, dataset: Path, run_dir: Path, **changes: Any) -> list[str]:
    """Command line of a small run with the balancer and the hook."""
    names = ["--module", str(modules / "power.py"), "--module", str(modules / "lookahead.py"), "--hooks", "lookahead"]
    own = {"balancer__kind": "power", "balancer__exponent": 2.0, "lookahead__every": 2}
    common = {"model__dropout": 0.0, "optimizer__schedule": "constant", "checkpoint__keep": 0, "training__steps": STEPS}
    return [*names, *flags(dataset, run_dir, **{**common, **own, **changes})]


@pytest.fixture(scope="module")
def plain(modules: Path, text_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process with a checkpoint in the middle, between two moves of the slow weights."""
    run_dir = tmp_path_factory.mktemp("runs") / "plain"
    assert pretrain_here(own_methods(modules, text_dataset, run_dir, checkpoint__every=HALF)) == 0
    return run_dir


def same_states(ours: Path, reference: Path, tolerance: float, states: tuple[str, ...] = STATES) -> None:
    """Weights, moments and slow weights after the last step."""
    for state in states:
        mine, theirs = (read_full_state(checkpoint_path(run, STEPS), state=state) for run in (ours, reference))
        assert mine.keys() == theirs.keys() and mine
        for name, tensor in theirs.items():
            if tolerance == 0.0:
                assert torch.equal(mine[name], tensor), (state, name)
            elif not name.endswith("key.bias"):  # no gradient in exact arithmetic: AdamW scales rounding noise up
                apart = float((mine[name] - tensor).norm() / tensor.norm())
                assert apart < (tolerance if "exp_avg" not in state else 10 * tolerance), (state, name)


@pytest.mark.parametrize("name", LONGEST)
def test_each_is_one_short_file(name: str) -> None:
    assert len(files()[name].splitlines()) <= LONGEST[name]


def test_their_settings_are_in_help(modules: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse([*own_methods(modules, tmp_path, tmp_path / "run"), "--help-all"])
    assert left.value.code == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--balancer.exponent FLOAT" in text and "--lookahead.every INT" in text


def test_they_act_on_a_run_and_are_in_its_metrics(plain: Path) -> None:
    *_, before, last = lines(plain)
    losses = {name: task["loss"] for name, task in before["tasks"].items() if name not in before["outside_tasks"]}
    tasks = {name: task for name, task in last["tasks"].items() if name in losses and task["count"]}
    powers = {name: losses[name] ** 2 for name in tasks if losses[name] is not None}
    for name, power in powers.items():
        # Tasks that were absent from the step before weigh by an older loss: only ratios are known here.
        other = next(iter(powers))
        assert math.isclose(tasks[name]["weight"] / tasks[other]["weight"], power / powers[other], rel_tol=1e-9)
    assert last["balancer"]["kind"] == "power" and last["lookahead"]["distance"] > 0.0
    assert f"steps {STEPS} (finished)" in report(plain)
    weights, slow = (
        read_full_state(checkpoint_path(plain, STEPS), state=state) for state in ("weight", "slow_weights")
    )
    apart = max(float((weights[name] - slow[name]).abs().max()) for name in weights)
    assert 0.0 < apart < 1e-2, "one step of the fast weights since the fourth"


def test_a_run_does_not_go_on_without_its_modules(modules: Path, plain: Path, text_dataset: Path) -> None:
    with pytest.raises(RefusedError, match="--module power --module lookahead"):
        parse(flags(text_dataset, plain))
    given = own_methods(modules, text_dataset, plain)
    with pytest.raises(RefusedError, match="--module power"):
        parse(given[2:])


# A modality

OWN_MAPS = ("weight", "exp_avg", "exp_avg_sq")


@pytest.fixture(scope="module")
def seen_twice(modules: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs beside near-infrared pictures of the same places, sharded by two processes, and verified."""
    directory = tmp_path_factory.mktemp("seen")
    random = np.random.default_rng(0)
    for number in range(32):
        name, coarse = f"c{number % 2}/{number:02d}", random.integers(0, 256, (4, 4, 4), dtype=np.uint8)
        colours, light = (
            Image.fromarray(each).resize((40, 36), Image.Resampling.BICUBIC)
            for each in (coarse[..., :3], coarse[..., 3])
        )
        dark = np.where(random.random((36, 40)) > 0.05, np.asarray(light), np.uint8(255))
        for folder, picture, suffix in (("photographs", colours, "jpg"), ("infrared", Image.fromarray(dark), "png")):
            path = directory / folder / f"{name}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture.save(path)
    output, module = directory / "data", ["--module", str(modules / "infrared.py")]
    given = ["--modality", f"infrared={directory / 'infrared'}"]
    given += ["--infrared.unseen", "255", "--rows_per_block", "4", "--samples_per_shard", "16"]
    inputs = ["--inputs", str(directory / "photographs"), "--output", str(output), "--processes", "2"]
    assert cli.main(["shard-images", *inputs, *given, *module]) == 0
    assert cli.main(["verify", str(output), *module]) == 0
    return output


def own_modality(modules: Path, dataset: Path, run_dir: Path, **changes: Any) -> list[str]:
    """Command line of a small run that sees and predicts infrared light and the image."""
    common = {"optimizer__schedule": "constant", "checkpoint__keep": 0, "training__steps": STEPS}
    common |= {"modalities__visible_tokens": 10, "infrared__error": "absolute", "infrared__stride": 2}
    both = ["rgb", "infrared"]
    lists = ["--modalities.inputs", *both, "--modalities.outputs", *both, "--module", str(modules / "infrared.py")]
    return [*image_flags("mm_mae_tiny", dataset, run_dir, **{**common, **changes}), *lists]


@pytest.fixture(scope="module")
def seeing(modules: Path, seen_twice: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process, and one that loads, with a checkpoint in the middle."""
    run_dir = tmp_path_factory.mktemp("runs") / "seeing"
    changes = {"checkpoint__every": HALF, "data__workers": 1}
    assert pretrain_here(own_modality(modules, seen_twice, run_dir, **changes)) == 0
    return run_dir


def test_a_modality_of_ones_own_is_learned_and_shown(
    modules: Path, seen_twice: Path, seeing: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = lines(seeing)
    assert [list(step["tasks"]) for step in steps] == [["rgb", "infrared"]] * STEPS
    assert all(0 < step["tasks"]["infrared"]["loss"] < 2 for step in steps)
    assert all(step["tasks"]["infrared"]["weight"] > 0 for step in steps)
    module = ["--module", str(modules / "infrared.py")]
    assert cli.main(["report", "--run", str(seeing), "--pictures", str(tmp_path), *module]) == 0
    assert cli.main(["inspect", str(seen_twice), "--rows", "1", "--output", str(tmp_path / "sheet.png"), *module]) == 0
    said = capsys.readouterr().out
    assert "infrared " in said and "infrared.png 40 x 36 L" in said
    with pytest.raises(SystemExit):
        parse([*own_modality(modules, seen_twice, tmp_path / "run"), "--help-all"])
    assert "--infrared.error" in capsys.readouterr().out


def test_its_files_have_settings_of_their_own(
    modules: Path, seen_twice: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are flags of shard-images with --module alone, and its data set holds what they say."""
    maps = [np.asarray(Image.open(io.BytesIO(sample["infrared.png"]))) for sample in stored(seen_twice).values()]
    assert len(maps) == 32 and max(one.max() for one in maps) < 255 and all((one == 0).any() for one in maps)
    given = ["--inputs", str(seen_twice.parent / "photographs"), "--output", str(tmp_path / "out")]
    module = ["--module", str(modules / "infrared.py")]
    for wrong, said in (
        (["--infrared.unseen", "256"], "--infrared.unseen is 256"),
        (["--infrared.unseen", "9"], "--infrared.unseen 9: "),
    ):
        assert cli.main(["shard-images", *given, *wrong, *module]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["shard-images", "--help", *module])
    assert "\n  infrared" in capsys.readouterr().out.replace("│", "")
    with forgetting(), pytest.raises(SystemExit) as left:
        components._components.pop(("modality", "infrared"))
        cli.main(["shard-images", *given, "--infrared.unseen", "9"])
    assert left.value.code == 2


def test_its_data_and_settings_are_refused_without_it(
    modules: Path, seen_twice: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with forgetting():
        components._components.pop(("modality", "infrared"))
        assert cli.main(["verify", str(seen_twice)]) == 1
        assert "'infrared.png'" in (said := capsys.readouterr().err) and "--module" in said
    given = own_modality(modules, seen_twice, seen_twice / "none")
    with pytest.raises(RefusedError, match=r"--infrared\.stride .*3"):
        parse([*given, "--infrared.stride", "3"])


# An upstream


def own_upstream(modules: Path, dataset: Path, run_dir: Path, **changes: Any) -> list[str]:
    """Command line of a small run whose tasks are bands of frequency, with an adversary on its positions."""
    common = {"optimizer__schedule": "constant", "checkpoint__keep": 0, "training__steps": STEPS}
    common |= {"balancer__kind": "minimax", "objective__bands": 3, "optimizer__eps": 1e-4}  # as in tests/parity
    own = ["--module", str(modules / "mae_bands.py"), "--upstream", "mae_bands"]
    return [*own, *image_flags("adpe_tiny", dataset, run_dir, **{**common, **changes})]


@pytest.fixture(scope="module")
def banded(modules: Path, image_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process with a checkpoint in the middle."""
    run_dir = tmp_path_factory.mktemp("runs") / "banded"
    assert pretrain_here(own_upstream(modules, image_dataset, run_dir, checkpoint__every=HALF)) == 0
    return run_dir


def test_an_upstream_of_ones_own_splits_mae_s_loss(image_dataset: Path, banded: Path, tmp_path: Path) -> None:
    """The bands' losses of the first step add up to MAE's: the transform keeps squares."""
    changes = {"optimizer__schedule": "constant", "training__steps": 1}
    assert pretrain_here(image_flags("adpe_tiny", image_dataset, tmp_path, **changes)) == 0
    (whole,), (first, *_) = lines(tmp_path), lines(banded)
    assert list(first["tasks"]) == ["band_0", "band_1", "band_2"]
    total = sum(task["loss"] for task in first["tasks"].values())
    assert math.isclose(total, whole["tasks"]["reconstruction"]["loss"], rel_tol=1e-6)
    weights = [task["weight"] for task in first["tasks"].values()]
    assert math.isclose(sum(weights), 1.0, rel_tol=1e-6) and max(weights) > 1.01 / 3
    assert "band_2" in report(banded)


def test_its_losses_are_measured_again(modules: Path, image_dataset: Path, tmp_path: Path) -> None:
    """The run's own validation says what is expected; the upstream says nothing of how it is measured."""
    changes = {"validation__every": 2, "training__steps": 2, "data__validation_fraction": 0.2}
    assert pretrain_here(own_upstream(modules, image_dataset, tmp_path, **changes)) == 0
    module = str(modules / "mae_bands.py")
    assert cli.main(["evaluate", "--run", str(tmp_path), "--output", str(tmp_path / "out"), "--module", module]) == 0
    expected = lines(tmp_path)[-1]["validation"]["tasks"]
    found = {task.task: task.mean for task in read_results(tmp_path / "out").tasks}
    assert found == {name: pytest.approx(one["loss"], rel=1e-6) for name, one in expected.items()}


def test_its_settings_are_its_own(modules: Path, image_dataset: Path, tmp_path: Path) -> None:
    given = own_upstream(modules, image_dataset, tmp_path)
    for flag, said in (
        (["--multilevel.kind", "head"], "mae_bands"),
        (["--objective.other", "task"], "pos_bert.*mae_bands"),
    ):
        with pytest.raises(RefusedError, match=said):
            parse([*given, *flag])


OWN: dict[str, tuple[Callable[..., list[str]], str, str, tuple[str, ...]]] = {
    "methods": (own_methods, "text_dataset", "plain", STATES),
    "modality": (own_modality, "seen_twice", "seeing", OWN_MAPS),
    "upstream": (own_upstream, "image_dataset", "banded", OWN_MAPS),
}
"""The command line of each, the fixtures of its data and of its run, and what its checkpoints hold."""


@pytest.mark.parametrize("own", OWN)
def test_one_process_goes_on_bit_for_bit(
    request: pytest.FixtureRequest, modules: Path, tmp_path: Path, own: str
) -> None:
    command, data, begun, states = OWN[own]
    run_dir: Path = request.getfixturevalue(begun)
    words = command(modules, request.getfixturevalue(data), tmp_path, resume=checkpoint_path(run_dir, HALF))
    assert pretrain_here(words) == 0
    assert lines(tmp_path)[-1]["tasks"] == lines(run_dir)[-1]["tasks"]
    same_states(tmp_path, run_dir, 0.0, states)


@pytest.mark.parametrize(("own", "layout"), always(product(OWN, LINES), ("methods", "fsdp")))
def test_two_ranks_go_on_bit_for_bit_and_from_one_process(
    request: pytest.FixtureRequest, two_ranks: Ranks, modules: Path, tmp_path: Path, own: str, layout: str
) -> None:
    """They stop half way and go on bit for bit, and go on from a run of one process, which they equal throughout."""
    command, data, begun, states = OWN[own]
    plain: Path = request.getfixturevalue(begun)
    words = partial(command, modules, request.getfixturevalue(data))
    whole, halves, other = (tmp_path / name for name in ("whole", "halves", "other"))
    two_ranks(pretrain_here, words(whole, checkpoint__every=HALF, **LINES[layout]))
    for run_dir, start in ((halves, whole), (other, plain)):
        two_ranks(pretrain_here, words(run_dir, resume=checkpoint_path(start, HALF), **LINES[layout]))
    assert lines(halves)[-1]["tasks"] == lines(whole)[-1]["tasks"]
    same_states(halves, whole, 0.0, states)
    same_states(other, plain, 1e-5, states)
    same_states(whole, plain, 1e-5, states)


# An engine


def pretrain_drifting(arguments: list[str]) -> int:
    """A weight of rank 1 changes by itself in the first step."""
    parsed = parse(arguments)
    engine = components.find("engine", "checked").load()
    check_gradients = engine.check_gradients

    def drift(self: Any) -> torch.Tensor:
        if self.calls == 0 and dist.get_rank() == 1:
            next(self.module.parameters()).data.flatten()[0].add_(1e-3)
        return check_gradients(self)  # type: ignore[no-any-return]

    with mock.patch.object(engine, "check_gradients", drift):
        return pretrain(parsed).status


def test_an_engine_of_ones_own_trains_and_goes_on_from_the_packages(
    two_ranks: Ranks, modules: Path, plain: Path, text_dataset: Path, tmp_path: Path
) -> None:
    own = ["--module", str(modules / "checked.py"), "--engine", "checked"]
    given = {"resume": checkpoint_path(plain, HALF)}
    two_ranks(pretrain_here, [*own, *own_methods(modules, text_dataset, tmp_path / "run", **given)])
    same_states(tmp_path / "run", plain, 1e-5)
    with pytest.raises(RankError, match="the weights of two ranks differ after 2 steps"):
        two_ranks(pretrain_drifting, [*own, *own_methods(modules, text_dataset, tmp_path / "drifting", **given)])


def test_an_engine_of_ones_own_is_planned_and_others_are_named(
    modules: Path, text_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["--module", str(modules / "checked.py"), "--recipe", "pos_bert_tiny", "--gpus", "2"]
    assert cli.main(["plan", *own, "--engine", "checked"]) == 0
    assert "launch/pretrain.py --engine checked --recipe pos_bert_tiny" in capsys.readouterr().out
    assert cli.main(["plan", *own, "--engine", "chequed"]) == 2
    assert "--engine" in (said := capsys.readouterr().err) and "checked" in said
