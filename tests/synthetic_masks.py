"""Runs with learned masks over small synthetic images, on any engine."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from tests.synthetic import Layout, RecordingTrainer, Result, data_group, engine_of
from tests.synthetic_images import PATCH, SyntheticImages, TwoHalves, batch, by_projection, image_config
from trp_scale.config import Config
from trp_scale.config.registry import find
from trp_scale.core.batch import Batch
from trp_scale.core.engine import Engine
from trp_scale.core.hooks import Hook, built
from trp_scale.core.run import RunContext
from trp_scale.data.sources import JoinedWindows
from trp_scale.distributed.groups import Group
from trp_scale.methods.learned_masks.hook import LearnedMasks
from trp_scale.methods.learned_masks.second_levels import JointObjective
from trp_scale.pretraining.mae.model import MaskedAutoencoder
from trp_scale.pretraining.mae.upstream import MaskedPatchReconstruction, Uniformity, UniformPatchReconstruction

CLASSES = 3
D_TR, D_VAL = 1000, 2000
"""First positions of the two labelled sources."""


def labelled(positions: range) -> Batch:
    """Synthetic images whose class is the channel that is brightest on the whole."""
    found = batch(positions)
    found.fields["labels"] = found["images"].float().mean((1, 3, 4)).argmax(1)
    return found


@dataclass
class LabelledImages:
    """Serves slices of the global batches of D_tr or D_val."""

    config: Config
    group: Group
    first: int
    cursor: int = 0
    micro_size: int = 0
    waiting: list[list[Batch]] = field(default_factory=list)

    def next_window(self) -> list[Batch]:
        window = self.waiting.pop(0) if self.waiting else self._window(self.cursor)
        self.cursor += self.size
        return window

    def peek(self, count: int) -> list[list[Batch]]:
        while len(self.waiting) < count:
            self.waiting.append(self._window(self.cursor + len(self.waiting) * self.size))
        return self.waiting[:count]

    @property
    def size(self) -> int:
        size: int = self.config.multilevel.batches(self.config)[0]
        return size

    def _window(self, cursor: int) -> list[Batch]:
        _, micro = self.config.multilevel.batches(self.config)
        share = self.size // self.group.size
        first = self.first + cursor + self.group.rank * share
        return [labelled(range(start, start + micro)) for start in range(first, first + share, micro)]


@dataclass
class SyntheticDownstream:
    """Stands for data.downstream.Downstream."""

    train: LabelledImages
    validation: LabelledImages
    classes: int = CLASSES


@dataclass
class PeekedImages(SyntheticImages):
    """Serves windows that may be looked at before they are due."""

    waiting: list[list[Batch]] = field(default_factory=list)

    def next_window(self) -> list[Batch]:
        return self.waiting.pop(0) if self.waiting else super().next_window()

    def peek(self, count: int) -> list[list[Batch]]:
        while len(self.waiting) < count:
            self.waiting.append(super().next_window())
        return self.waiting[:count]


@dataclass
class SyntheticSources:
    """Stands for data.sources.Sources."""

    train: PeekedImages
    downstream: SyntheticDownstream | None


def mask_config(layout: Layout, **changes: Any) -> Config:
    """The small masked autoencoder with a masking network of 8 between its layers; of our own settings those that the
    kind of learning has."""
    kind = changes.get("multilevel", {}).get("kind", "head")
    ours = {"hidden_size": 8, "head_lr": 0.03, "lr": 0.02, "unroll": 2}
    known = {field.name for field in fields(find("multilevel", kind).settings)}
    settings: dict[str, dict[str, Any]] = {
        "multilevel": {"kind": kind, **{name: value for name, value in ours.items() if name in known}},
        "vision": {"tokens": "visible", "positions": "absolute", "decoder_layers": 1},
        "optimizer": {"lr": 3e-3, "eps": 1e-4},
    }
    for section, values in changes.items():
        settings[section] = {**settings.get(section, {}), **values}
    return image_config(layout, **settings)


@dataclass(kw_only=True)
class MasksRun:
    """A trainer and its parts."""

    trainer: RecordingTrainer
    hook: LearnedMasks
    adversary: Hook | None
    engine: Engine
    model: nn.Module
    networks: list[nn.Module]


def masks_run(
    layout: Layout,
    config: Config,
    *,
    dtype: torch.dtype = torch.float32,
    halves: bool = False,
    group: Group | None = None,
) -> MasksRun:
    """A trainer over synthetic images with learned masks, and whatever else the settings name."""
    group = group or data_group(config)
    networks: list[nn.Module] = []

    def make_engine(module: nn.Module, own: Config) -> Engine:
        networks.append(module.to(dtype))
        return engine_of(layout, networks[-1], own, group, second=len(networks) > 1)

    engine = make_engine(MaskedAutoencoder(config), config)
    objective: Any = (TwoHalves if halves else MaskedPatchReconstruction)(config.objective, PATCH)
    last: list[Hook] = []
    if config.objective.uniformity:
        objective = UniformPatchReconstruction(config.objective, PATCH, group)
        last = [Uniformity(objective)]
    downstream = SyntheticDownstream(LabelledImages(config, group, D_TR), LabelledImages(config, group, D_VAL))
    source: Any = PeekedImages(config, group)
    sources = SyntheticSources(source, downstream if config.multilevel.reads_labels else None)
    if config.multilevel.joins_labelled:
        objective = JointObjective(config, objective, classes=CLASSES, device=torch.device("cpu"), dtype=dtype)
        source = JoinedWindows(source, downstream.train)
    run = RunContext(
        config=config,
        objective=objective,
        engine=engine,
        sources=sources,
        make_engine=make_engine,
        make_model=lambda: MaskedAutoencoder(config),
    )
    hook = built(run, "multilevel")
    adversary = built(run, "adversary")
    others = [each for each in (hook, adversary, *last) if each is not None]
    trainer = RecordingTrainer.over(run, source, others)
    trainer.engine.train(True)
    return MasksRun(
        trainer=trainer, hook=hook, adversary=adversary, engine=engine, model=networks[0], networks=networks[1:]
    )


@dataclass(kw_only=True)
class MasksResult(Result):
    """What a run gave. Attributes: network: weights of the masking network; head: of the head; tuned: of a second
    encoder, where there is one; lesson: values of the network's last step; vector: the adversary's, if it has one; all
    at the end."""

    network: dict[str, Tensor]
    network_initial: dict[str, Tensor]
    head: dict[str, Any]
    tuned: dict[str, Tensor]
    lesson: dict[str, Tensor]
    vector: Tensor | None


def run_masks(layout: Layout, changes: dict[str, Any], *, halves: bool = False) -> MasksResult:
    """Train; call on all ranks."""
    run = masks_run(layout, mask_config(layout, **changes), halves=halves)
    network = run.hook.masker.network
    initial, network_initial = run.engine.full_weights(), network.full_weights()
    for _ in range(run.trainer.config.training.steps):
        run.trainer.train_step()
    own = network.full_weights()
    vector = getattr(run.adversary, "vector", None)
    head = run.hook.outer.state_dict().get("head", {})
    engines = run.hook.engines()
    tuned = engines["fine_tuned"].full_weights() if "fine_tuned" in engines else {}
    result = run.trainer.end(initial, by_projection)
    for engine in engines.values():
        engine.close()
    return MasksResult(
        **vars(result),
        network=own,
        network_initial=network_initial,
        head=head,
        tuned=by_projection(tuned),
        lesson=run.hook.masker.lesson,
        vector=None if vector is None else vector.detach().clone(),
    )
