"""A task from outside the package, by --module: trained, measured, gone on with, evaluated and refused without it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.extending import forgetting
from tests.unit.finetuning.test_finetune import tuning_flags
from trp_scale.cli import main as cli
from trp_scale.reporting.results import read_results

TASK = '''
"""How bright an image is: one number, by least squares."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

import trp_scale as trp
from trp_scale.config.finetuning import (ImageDownstreamConfig, ImageTaskConfig)
from trp_scale.data.images.dataset import (agree_images, open_image_dataset)
from trp_scale.data.images.dataset import RowReader
from trp_scale.data.sources import Rows
from trp_scale.data.mixture import parse_paths
from trp_scale.finetuning.finetuned_run import predicting_engine
from trp_scale.evaluation.figures.drawing import (Picture, figure_class)
from trp_scale.finetuning.task import (GatheredRows, ImageTask, open_task_sources)
from trp_scale.models.image_encoder import (ImageEncoder, OnImageEncoder)
from trp_scale.models.initialise import initialise_vision


@dataclass(kw_only=True)
class BrightnessDownstream(ImageDownstreamConfig):
    kind: Literal["brightness"] = "brightness"
    """How bright an image is."""
    darkest: float = trp.setting(0.0, at_least=0, below=1)
    """Darker images count as this."""


@dataclass(kw_only=True)
class BrightnessConfig(ImageTaskConfig):
    """How bright an image is."""

    downstream: BrightnessDownstream = field(default_factory=BrightnessDownstream)


class Crops:
    """Batches of images, their upper left corner alone."""

    def __init__(self, config, datasets, meta):
        self.rows, self.size = RowReader(datasets, meta, verify=False), config.crops.size

    def build(self, addresses, start):
        read = self.rows.read(addresses)
        empty = torch.zeros(3, self.size, self.size, dtype=torch.uint8)
        images = [empty if one is None else one.image[:, : self.size, : self.size] for one in read.samples]
        return read.batch({"images": torch.stack(images)}, addresses, start=start, began=0.0)


class Model(OnImageEncoder):
    def __init__(self, config):
        super().__init__()
        self.encoder, self.head = ImageEncoder(config), nn.Linear(config.model.hidden_size, 1)
        initialise_vision(self, seed=config.training.seed, std=config.model.initializer_range)

    def forward(self, images):
        return self.head(self.encoder(images)[0].mean(1))[:, 0]  # [B]


class SquaredError:
    tasks, balanced, regression = ("brightness",), (0,), (0,)
    in_a_graph = True

    def __init__(self, darkest):
        self.darkest = darkest

    def truth(self, batch):
        return (batch["images"].float() / 255.0).mean((1, 2, 3)).clamp(min=self.darkest)  # [B]

    def count(self, batch):
        return batch["row_weights"].double().sum().reshape(1)

    def outside_weights(self, counts):
        return torch.zeros_like(counts)

    def __call__(self, forward, batch):
        errors = (forward(batch["images"].float() / 255.0) - self.truth(batch)).square().double()  # [B]
        return trp.TaskLosses(sums=(errors @ batch["row_weights"].double()).reshape(1), counts=self.count(batch))


class MeanError:
    def __init__(self):
        self.rows = GatheredRows()

    def add(self, outputs, batch):
        self.rows.add(batch, errors=outputs)

    def finish(self, group):
        return {"error": float(self.rows.gather(group)["errors"].mean())}


def draw(runs, shown, output, environment):
    figure = figure_class()()
    axes = figure.subplots()
    for name, run in runs.items():
        engine = predicting_engine(Model(run.config), run, environment)
        with torch.no_grad():
            axes.plot(engine(shown.images).cpu(), label=name)
    figure.savefig(output / "brightness.png")
    return [Picture(output / "brightness.png", "how bright each image is to each run")]


@trp.component("task", "brightness")
class Brightness(ImageTask[BrightnessConfig]):
    """How bright an image is."""

    Settings = BrightnessConfig
    metric, lower_is_better, pictures = "error", True, "brightness:draw"

    def __init__(self, config, environment):
        paths = parse_paths(config.data.path)
        datasets = [open_image_dataset(path.path, path.name) for path in paths]
        meta = agree_images(datasets)
        rows = Rows(
            blocks=[each.blocks for each in datasets],
            meta=meta,
            limit=0,
            builder=Crops(config, datasets, meta),
            digests=[each.digest() for each in datasets],
        )
        sources = open_task_sources(config, environment, rows, rows, train_paths=paths, measured_paths=None)
        super().__init__(config, sources)
        self.objective = SquaredError(config.downstream.darkest)

    def model(self):
        model = Model(self.config)
        self.take_encoder(model)
        return model

    def predict(self, forward, batch):
        return (forward(batch["images"].float() / 255.0) - self.objective.truth(batch)).abs()

    def metrics(self):
        return MeanError()
'''


def test_a_task_of_one_s_own(image_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module, recipe = tmp_path / "brightness.py", tmp_path / "brightness.yaml"
    module.write_text(TASK, encoding="utf-8")
    sections = {"downstream": {"kind": "brightness", "epochs": 0, "darkest": 0.25}, "balancer": {"kind": "uniform"}}
    recipe.write_text(yaml.dump({**sections, "optimizer": {"lr": 1e-3}}), encoding="utf-8")
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
