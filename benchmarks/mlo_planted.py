"""Learned masks on a problem with a known answer: a few patches carry an image's class together, the rest is noise.

    python benchmarks/mlo_planted.py [--seeds 3] [--steps 80]

For each seed, the accuracy of a linear probe on the encoder's features after equally many steps, by random masks and by
learned ones, and how many of the masked patches carry the class: by chance 6 of 16.

Each class has a pattern, of one length and at right angles to the others; an image shows its class's at all signal
places, under noise. All other patches are louder noise. Patches can be predicted from each other at the signal places
alone, so that masks which fall there teach the encoder the classes, and others teach it nothing.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.table import Table
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.workloads import Labelled, loop_with_masks, plain_engines
from trp_scale.config import BatchConfig, ModelConfig, OptimizerConfig, PretrainTrainingConfig
from trp_scale.config.images import CropsConfig, MaeMaskingConfig, MaeVisionConfig
from trp_scale.config.registry import make_settings
from trp_scale.core.batch import Batch
from trp_scale.core.run import MakeEngine
from trp_scale.methods.learned_masks.hook import LearnedMasks
from trp_scale.pretraining.mae.model import MaskedAutoencoder
from trp_scale.pretraining.mae.settings import MaeConfig
from trp_scale.pretraining.mae.upstream import MaskedPatchReconstruction
from trp_scale.training.loop import Trainer

GRID, PATCH = 4, 4
PATCHES, VALUES = GRID**2, 3 * PATCH**2
SIGNALS, MASKED, CLASSES = 6, 2, 4
NOISE, OTHER_NOISE = 1.3, 5.0
"""Deviations of a value at the signal places and elsewhere; that of the patterns' values is 1."""
LEVEL, UNIT = 0.45, 0.075
"""Pixel of a value of 0, and difference of pixels for a value of 1; what leaves [0, 1] is cut off."""
LABELLED = 64
"""Images of a batch of D_tr or D_val."""
STEPS = 80
"""After which random masks have hardly begun to teach the classes, and learned ones have."""

D_TR, D_VAL, PROBE, TEST = 10_000_000, 20_000_000, 30_000_000, 40_000_000
"""First positions; D_u begins at 0."""


@dataclass(frozen=True)
class Planted:
    """The images of one seed: where the signal is, the patterns, and every image, a function of its position."""

    seed: int

    def places(self) -> Tensor:
        """[SIGNALS] numbers of the patches that carry the class."""
        return torch.randperm(PATCHES, generator=self.generator("places"))[:SIGNALS].sort().values

    def patterns(self) -> Tensor:
        """[CLASSES, VALUES] at right angles, mean square 1."""
        drawn = torch.randn(VALUES, CLASSES, generator=self.generator("patterns"))
        columns: Tensor = torch.linalg.qr(drawn).Q  # [VALUES, CLASSES]
        return columns.T.mul(VALUES**0.5)

    def generator(self, name: str, position: int = 0) -> torch.Generator:
        number = ("places", "patterns", "images").index(name)
        return torch.Generator().manual_seed((1000 * self.seed + number) * 100_000_000 + position)

    def batch(self, start: int, count: int) -> Batch:
        """Images at these positions, with random masks."""
        generator = self.generator("images", start)
        labels = torch.randint(0, CLASSES, (count,), generator=generator)
        values = OTHER_NOISE * torch.randn(count, PATCHES, VALUES, generator=generator)
        noise = NOISE * torch.randn(count, SIGNALS, VALUES, generator=generator)
        values[:, self.places()] = self.patterns()[labels][:, None] + noise
        pixels = (LEVEL + UNIT * values).clamp(0, 1).view(count, GRID, GRID, PATCH, PATCH, 3)
        images = pixels.permute(0, 5, 1, 3, 2, 4).reshape(count, 1, 3, GRID * PATCH, GRID * PATCH)
        order = torch.rand(count, 1, PATCHES, generator=generator).argsort(-1)  # [count, 1, PATCHES]
        fields = {
            "images": (images * 255).round().to(torch.uint8),
            "labels": labels,
            "masked": order[..., :MASKED].sort(-1).values,
            "visible": order[..., MASKED:].sort(-1).values,
            "row_weights": torch.ones(count),
        }
        return Batch(fields=fields, keys=torch.arange(start, start + count), start=start)


@dataclass
class Windows:
    """One micro-batch after the other."""

    planted: Planted
    size: int
    cursor: int

    def next_window(self) -> list[Batch]:
        batch = self.planted.batch(self.cursor, self.size)
        self.cursor += self.size
        return [batch]


def planted_config(seed: int, steps: int, *, learned: bool, difference: float) -> MaeConfig:
    """A small MAE, and a masking network that does not move much before hypergradients say something.

    Before reconstruction begins to work they are noise, and a hundred times smaller than after; AdamW would follow them
    as far, and masks that no longer fall on the signal do not come back to it. Hence eps. The very first are large,
    since AdamW's first steps have the sign of the gradient alone. Hence the warm-up.
    """
    sizes = {"unroll": 1, "batch_size": LABELLED, "micro_size": LABELLED, "hidden_size": 64}
    rates = {"head_lr": 1e-3, "lr": 0.02, "eps": 1e-3, "difference": difference}
    multilevel = (
        make_settings("multilevel", "head", **sizes, **rates) if learned else make_settings("multilevel", "none")
    )
    return MaeConfig(
        model=ModelConfig(layers=1, hidden_size=32, heads=2, intermediate_size=64, layer_norm_eps=1e-6),
        vision=MaeVisionConfig(
            patch_size=PATCH,
            tokens="visible",
            positions="absolute",
            decoder_layers=1,
            decoder_hidden_size=16,
            decoder_heads=2,
        ),
        crops=CropsConfig(count=1, size=GRID * PATCH),
        masking=MaeMaskingConfig(ratio=MASKED / PATCHES, maskings=0),
        multilevel=multilevel,
        batch=BatchConfig(global_size=16, micro_size=16),
        training=PretrainTrainingConfig(steps=steps, seed=seed),
        optimizer=OptimizerConfig(lr=3e-3, beta2=0.95, warmup_steps=20, schedule="constant"),
        balancer=make_settings("balancer", "uniform"),
    )


@dataclass(kw_only=True)
class PlantedRun:
    """A trainer over the planted images. Attributes: hook: None with random masks."""

    planted: Planted
    config: MaeConfig
    trainer: Trainer
    model: nn.Module
    hook: LearnedMasks | None
    shares: list[float] = field(default_factory=list)
    """Of the masked patches of each step, how many carry the class."""

    def train(self) -> None:
        """All steps."""
        for _ in range(self.config.training.steps):
            self.trainer.train_step()
            if self.hook is not None:
                self.shares.append(self.signal_share())

    def signal_share(self) -> float:
        """Share of the last step's masked patches that carry the class."""
        assert self.hook is not None and self.hook.window is not None
        masked = torch.cat([each.masked for each in self.hook.window.selections])
        return float(torch.isin(masked, self.planted.places()).double().mean())

    @torch.no_grad()
    def features(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """[count, D] means of the encoder's patch tokens of whole images, and [count] classes."""
        batch = self.planted.batch(start, count)
        objective = MaskedPatchReconstruction(self.config.objective, PATCH)
        patches = objective.patches(batch).to(next(self.model.parameters()).dtype)
        every = torch.arange(PATCHES).expand(count, -1)
        tokens = self.model(patches, every, every[:, :0], output="features")  # [count, 1 + N, D]
        return tokens[:, 1:].mean(1).double(), batch["labels"]

    def probe(self, train: int = 40, test: int = 2000) -> float:
        """Accuracy of logistic regression on frozen features of images that no level has seen."""
        features, classes = self.features(PROBE, train)
        asked, answers = self.features(TEST, test)
        mean, deviation = features.mean(0), features.std(0) + 1e-9
        fitted = LogisticRegression(C=0.1, max_iter=500).fit(((features - mean) / deviation).numpy(), classes.numpy())
        return float(fitted.score(((asked - mean) / deviation).numpy(), answers.numpy()))


def planted_run(
    seed: int, *, learned: bool, steps: int = STEPS, dtype: torch.dtype = torch.float32, difference: float = 1e-2
) -> PlantedRun:
    """Parts of a run, joined.

    Args:
        learned: by a masking network, whose hypergradient takes differences of this length (multilevel.difference).
    """
    config, planted = planted_config(seed, steps, learned=learned, difference=difference), Planted(seed)
    plain = plain_engines(torch.device("cpu"))
    make_engine: MakeEngine = lambda module, own: plain(module.to(dtype), own)  # noqa: E731
    model = MaskedAutoencoder(config)
    labelled = Labelled(
        train=Windows(planted, LABELLED, D_TR), validation=Windows(planted, LABELLED, D_VAL), classes=CLASSES
    )
    source = Windows(planted, config.batch.global_size, 0)
    trainer = loop_with_masks(config, model, make_engine, source, labelled)
    hook = next((hook for hook in trainer.hooks.all if isinstance(hook, LearnedMasks)), None)
    return PlantedRun(planted=planted, config=config, trainer=trainer, model=model, hook=hook)


LAST = 10
"""Steps over which the share of masks on the signal is averaged, at the start and at the end."""
COLUMNS = ("untrained", "random masks", "learned masks", "margin", "masks on the signal, start", "end")


def outcome(seed: int, steps: int = STEPS) -> tuple[float, ...]:
    """Train by random and by learned masks; return the values of COLUMNS."""
    random, learned = (planted_run(seed, learned=learned, steps=steps) for learned in (False, True))
    untrained = random.probe()
    random.train()
    learned.train()
    accuracies = random.probe(), learned.probe()
    shares = statistics.fmean(learned.shares[:LAST]), statistics.fmean(learned.shares[-LAST:])
    return untrained, *accuracies, accuracies[1] - accuracies[0], *shares


@dataclass(kw_only=True)
class Options:
    """Size of the experiment."""

    seeds: int = 3
    """Problems and runs, one of each seed."""
    steps: int = STEPS
    """Of the encoder."""


def main(options: Options) -> None:
    torch.set_num_threads(1)
    title = f"Probe after {options.steps} steps; by chance {SIGNALS / PATCHES:.2f} of the masks are on the signal"
    table = Table("seed", *COLUMNS, title=title)
    outcomes = [outcome(seed, options.steps) for seed in range(options.seeds)]
    for seed, values in enumerate(outcomes):
        table.add_row(str(seed), *(f"{value:.3f}" for value in values))
    table.add_row("mean", *(f"{statistics.fmean(column):.3f}" for column in zip(*outcomes, strict=True)))
    Console(width=120).print(table)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__, use_underscores=True))
