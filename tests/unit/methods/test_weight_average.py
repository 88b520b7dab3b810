"""The average of the weights, step by step (methods/weight_average.py), and `--weights average`, which reads it
wherever weights are read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.runs import image_flags, lines, pretrain_here
from tests.synthetic import Layout, RecordingTrainer, small_config, trainer_for
from tests.unit.checkpoint import test_export as text
from tests.unit.checkpoint import test_export_images as images
from tests.unit.checkpoint import test_export_mm_mae as modalities
from tests.unit.checkpoint.fake_engine import FakeEngine, save_step
from tests.unit.models import small_modalities
from tests.unit.models.small_images import small_model
from trp_scale.checkpoint.document import read_document
from trp_scale.checkpoint.export import find_checkpoint
from trp_scale.checkpoint.format import read_full_state
from trp_scale.checkpoint.initial_weights import give_weights
from trp_scale.cli.main import main
from trp_scale.config import ModelConfig, RefusedError
from trp_scale.config.loader import to_dict
from trp_scale.config.registry import find
from trp_scale.core.hooks import Hooks
from trp_scale.core.pieces import WEIGHT_AVERAGE
from trp_scale.errors import CheckpointError
from trp_scale.evaluation.arguments import parse_probe
from trp_scale.finetuning.encoders import open_encoder
from trp_scale.methods.settings import WeightAverageSettings
from trp_scale.methods.weight_average import WeightAverage
from trp_scale.pretraining.pos_bert.settings import PosBertConfig
from trp_scale.pretraining.pos_bert.weights import load_transformers

STEPS = 6


def averaged(settings: WeightAverageSettings, **source: object) -> tuple[RecordingTrainer, WeightAverage]:
    trainer = trainer_for(Layout(), small_config(Layout()), **source)
    hook = WeightAverage(settings, trainer.run_context)
    trainer.hooks = Hooks(trainer.hooks.balancer, [hook])
    trainer.engine.train(True)
    return trainer, hook


def flat(trainer: RecordingTrainer) -> Tensor:
    """All weights, float64."""
    return torch.cat([weight.double().flatten() for weight in trainer.engine.full_weights().values()])


def average_of(hook: WeightAverage) -> Tensor:
    return torch.cat([part.double() for part in hook.average.parts])


@pytest.mark.parametrize(
    ("settings", "decays"),
    [
        (WeightAverageSettings(decay=0.5, warmup=False), [0.5] * STEPS),
        (WeightAverageSettings(decay=0.3), [0.1, 2 / 11, 0.25, 0.3, 0.3, 0.3]),
        (WeightAverageSettings(decay=0.9, start_step=3), [0.0, 0.0, 0.0, 0.1, 2 / 11, 0.25]),
        (WeightAverageSettings(decay=0.0, warmup=False), [0.0] * STEPS),
    ],
)
def test_the_average_is_the_recursion_in_float64(settings: WeightAverageSettings, decays: list[float]) -> None:
    trainer, hook = averaged(settings)
    expected = flat(trainer)
    for decay in decays:
        trainer.train_step()
        expected = decay * expected + (1 - decay) * flat(trainer)
        assert (average_of(hook) - expected).norm() < 1e-6 * expected.norm()
    assert ((expected - flat(trainer)).norm() > 1e-4) == (decays[-1] > 0)
    assert hook.updates == sum(decay > 0 or settings.start_step == 0 for decay in decays)


def test_a_skipped_step_leaves_the_average() -> None:
    trainer, hook = averaged(WeightAverageSettings(decay=0.5, warmup=False))
    trainer.train_step()
    before = average_of(hook)
    trainer.engine.check_gradients = lambda: torch.tensor(torch.nan)  # type: ignore[method-assign]
    trainer.train_step()
    assert not trainer.history[-1].applied
    assert torch.equal(average_of(hook), before) and hook.updates == 1


@pytest.mark.parametrize("validate", [False, True])
def test_validation_reads_the_average_where_asked(validate: bool) -> None:
    trainer, hook = averaged(WeightAverageSettings(decay=0.9, warmup=False, validate=validate))
    for _ in range(3):
        trainer.train_step()
    weights, average = flat(trainer), average_of(hook)
    assert not torch.equal(weights, average)
    with trainer.hooks.validation():
        assert torch.equal(flat(trainer), average if validate else weights)
    assert torch.equal(flat(trainer), weights) and torch.equal(average_of(hook), average)


def write_pair(directory: Path, kind: str) -> tuple[Path, Path]:
    """A run with an average beside its weights, and one whose weights are that average."""
    both, alone = directory / "both", directory / "alone"
    if kind == "text":
        text.write_run(alone, text.our_weights())
    elif kind == "images":
        images.write_run(alone, images.MAE)
    else:
        modalities.write_run(alone, small_modalities.config(inputs=("semseg", "rgb"), outputs=("depth",)))
    average = read_full_state(find_checkpoint(alone))
    generator = torch.Generator().manual_seed(9)
    weights = {name: value + torch.randn(value.shape, generator=generator) for name, value in average.items()}
    document = read_document(find_checkpoint(alone))
    split = {name: [(0, value.numel(), 0)] for name, value in average.items()}
    config = to_dict(PosBertConfig(model=text.MODEL)) if kind == "text" else document.config
    for run, states in ((both, {"weight": weights, WEIGHT_AVERAGE: average}), (alone, {"weight": average})):
        save_step(run, 4, engine=FakeEngine(0, split, states, steps=0), config=config, extra=document.extra)
    if (alone / "tokenizer").is_dir():
        shutil.copytree(alone / "tokenizer", both / "tokenizer")
    return both, alone


def exported(run: Path, output: Path, *flags: str) -> dict[str, bytes]:
    """The files of an export, but for the model card, which names the run."""
    assert main(["export", "--run", str(run), "--output", str(output), *flags]) == 0
    return {path.name: path.read_bytes() for path in output.iterdir() if path.name != "README.md"}


@pytest.mark.parametrize(("kind", "to"), [("text", "hf"), ("images", "hf"), ("images", "timm"), ("modalities", "timm")])
def test_an_export_of_the_average(tmp_path: Path, kind: str, to: str) -> None:
    both, alone = write_pair(tmp_path, kind)
    flags = ("--to", to, "--image_size", "32")
    expected = exported(alone, tmp_path / "expected", *flags)
    assert exported(both, tmp_path / "average", *flags, "--weights", "average") == expected
    assert exported(both, tmp_path / "last", *flags) != expected


@pytest.mark.parametrize("kind", ["text", "images", "modalities"])
def test_an_encoder_of_the_average(tmp_path: Path, kind: str) -> None:
    both, alone = write_pair(tmp_path, kind)
    source, expected = open_encoder(f"{both}@average"), open_encoder(str(alone)).read()
    found, last = source.read(), open_encoder(str(both)).read()
    assert found.keys() == expected.keys() == last.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, equal_nan=True)
        assert "norm" in name or not torch.equal(last[name], value), name
    config = find("task", "glue" if kind == "text" else "classification").settings()
    source.adopt(config)
    assert config.model.weights == f"{find_checkpoint(both)}@average"
    assert open_encoder(config.model.weights).read().keys() == expected.keys()


def test_a_run_starts_from_the_average(tmp_path: Path) -> None:
    both, alone = write_pair(tmp_path, "images")
    model, expected = small_model(images.MAE, dtype=torch.float32), read_full_state(find_checkpoint(alone))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    give_weights(model, ModelConfig(weights=f"{both}@average", heads=2), load_transformers)
    assert all(torch.equal(parameter, expected[name]) for name, parameter in model.named_parameters())


def test_where_there_is_no_average_it_is_refused(tmp_path: Path) -> None:
    _, alone = write_pair(tmp_path, "images")
    with pytest.raises(CheckpointError, match="weight_average"):
        open_encoder(f"{alone}@average").read()
    exported(alone, tmp_path / "timm", "--to", "timm", "--image_size", "32")
    with pytest.raises(RefusedError, match="--weights"):
        open_encoder(f"{tmp_path / 'timm'}@average")


def test_probe_takes_the_flag() -> None:
    flags = ["--from", "runs/one", "--data", "shards"]
    assert parse_probe([*flags, "--weights", "average"]).from_ == "runs/one@average"
    assert parse_probe(flags).from_ == "runs/one"


@pytest.mark.exhaustive
def test_a_run_with_the_hooks_by_the_command_line(image_dataset: Path, tmp_path: Path) -> None:
    """Stopped and resumed it keeps the same average, bit for bit. Its validation is of the average: what another run
    that starts from the average, and stays there, has too."""
    changes = {
        "data__validation_fraction": 0.2,
        "validation__every": 1,
        "balancer__kind": "uniform",
        "optimizer__schedule": "constant",
        "optimizer__warmup_steps": 0,
    }
    averaging = [
        *("--hooks", "weight_average", "gradient_noise_scale", "--weight_average.decay", "0.7"),
        *("--weight_average.warmup", "False", "--weight_average.validate", "True"),
    ]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for run, steps in ((whole, 4), (parts, 2), (parts, 4)):
        flags = image_flags("mae_vit_b", image_dataset, run, training__steps=steps, optimizer__lr=1e-2, **changes)
        assert pretrain_here([*flags, *averaging]) == 0
    average, again = (read_full_state(find_checkpoint(run), WEIGHT_AVERAGE) for run in (whole, parts))
    assert [name for name, value in average.items() if not torch.equal(value, again[name])] == []
    last = lines(whole)[-1]
    assert last["weight_average"]["updates"] == 4 and last["gradient_noise_scale"]["noise_scale"] is not None
    assert lines(parts)[-1]["gradient_noise_scale"] == last["gradient_noise_scale"]
    seen = {}
    for which in ("", "@average"):
        still = image_flags("mae_vit_b", image_dataset, tmp_path / f"still{which}", training__steps=1, **changes)
        assert pretrain_here([*still, "--model.weights", f"{whole}{which}", "--optimizer.lr", "1e-12"]) == 0
        (line,) = lines(tmp_path / f"still{which}")
        seen[which] = line["validation"]["loss"]
    assert seen["@average"] == pytest.approx(last["validation"]["loss"], rel=1e-6)
    assert abs(seen[""] / seen["@average"] - 1) > 1e-4, "too near to tell"
