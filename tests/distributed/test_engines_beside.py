"""A masking network's engine beside the run's own, of every kind, and both in one checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import save_checkpoint
from tests.distributed.shard_probe import LR, Named, ShardProbe
from tests.distributed.test_checkpoint_engines import distance
from tests.ranks import Ranks
from tests.synthetic import Layout
from trp_scale.checkpoint.format import read_full_state
from trp_scale.checkpoint.manager import EngineGroup, load
from trp_scale.checkpoint.run_directory import checkpoint_path
from trp_scale.config import OptimizerConfig
from trp_scale.config.registry import make_settings
from trp_scale.core.pieces import STATE_NAMES
from trp_scale.engines.build import build_second_engine
from trp_scale.methods.learned_masks.masks import FlattenedMasking

NAME = "masking_network"
OF_THE_FIRST: dict[str, Any] = {
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-3}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 0}},
}
"""What a DeepSpeed file may say of the run's own optimizer; the second one's is another."""
PATH = [
    Layout(engine="plain"),
    Layout(engine="deepspeed", stage=3, document=OF_THE_FIRST),
    Layout(engine="fsdp"),
    Layout(engine="ddp"),
    Layout(engine="deepspeed", stage=2, document=OF_THE_FIRST),
    Layout(engine="deepspeed", stage=0),
    Layout(engine="deepspeed", stage=3),
    Layout(engine="plain"),
]
STEPS = 2
"""Of the run's own engine on each layout; the second one makes half as many, and none on the first layout."""


class Pair:
    """A masked autoencoder and a masking network that scores its patch embeddings, each in its engine."""

    def __init__(self, layout: Layout) -> None:
        self.probe = ShardProbe(layout)
        config = replace(self.probe.config, optimizer=OptimizerConfig(lr=3e-3, eps=1e-4, clipping=0.0))
        config.multilevel = make_settings("multilevel", "head")
        document = {**layout.document, "zero_optimization": {"stage": layout.stage}}
        self.second = build_second_engine(
            layout.engine,
            FlattenedMasking(config),
            config,
            device=torch.device("cpu"),
            data_group=self.probe.group,
            ds_document=document if layout.engine == "deepspeed" else None,
        )
        self.second.train(True)
        self.both = EngineGroup(self.probe.engine, {NAME: self.second})

    def step_second(self, number: int) -> None:
        """The network learns to choose patches of small index."""
        window, objective = self.probe.window(number), self.probe.losses.objective
        for place, micro in enumerate(window):
            with torch.no_grad():
                patches = objective.patches(micro)
                embeddings = objective.run(self.probe.engine, micro, patches, output="patch_embedding")
            probabilities = self.second(embeddings)  # [B, N]
            loss = (probabilities * torch.arange(probabilities.shape[1])).sum() / self.probe.losses.rows
            self.second.backward(loss, last=place == len(window) - 1)
        self.second.check_gradients()
        self.second.step(LR)

    def steps(self, first: int, *, with_second: bool) -> None:
        for number in range(first, first + STEPS):
            self.probe.step(number)
        if with_second:
            self.step_second(first)

    def write(self, run_dir: Path, step: int) -> None:
        self.both.prepare()
        save_checkpoint(run_dir, step=step, engine=self.both, hooks_state={}, cursors={}, group=self.probe.group)

    def close(self) -> None:
        self.second.close()
        self.probe.engine.close()


def go_on(layout: Layout, number: int, run_dir: Path) -> list[int]:
    """Load what the layout before wrote, save it again, train, save; returns both engines' step counts at the start."""
    pair = Pair(layout)
    if number > 0:
        load(checkpoint_path(run_dir, STEPS * number), engine=pair.both, group=pair.probe.group)
        pair.write(run_dir.with_name(f"echo{number}"), STEPS * number)
    counts = [pair.probe.engine.optimizer_steps(), pair.second.optimizer_steps()]
    pair.steps(STEPS * number, with_second=number > 0)
    pair.write(run_dir, STEPS * (number + 1))
    pair.close()
    return counts


def uninterrupted(run_dir: Path) -> None:
    """One plain process, with a checkpoint where the layouts change."""
    pair = Pair(PATH[0])
    for number in range(len(PATH)):
        pair.steps(STEPS * number, with_second=number > 0)
        pair.write(run_dir, STEPS * (number + 1))
    pair.close()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("reference") / "run"
    uninterrupted(run_dir)
    return run_dir


def states(checkpoint: Path) -> dict[tuple[str, str], Named]:
    """Weights and moments of each engine."""
    kinds = [(engine, state) for engine in ("", NAME) for state in ("weight", *STATE_NAMES)]
    return {(engine, state): read_full_state(checkpoint, state, engine) for engine, state in kinds}


@pytest.mark.exhaustive
def test_two_engines_that_change_at_every_checkpoint(tmp_path: Path, two_ranks: Ranks, reference: Path) -> None:
    for number, layout in enumerate(PATH):
        arguments = (layout, number, tmp_path / "run")
        counts = [go_on(*arguments)] if layout.engine == "plain" else two_ranks(go_on, *arguments)
        where = f"{layout.engine} stage {layout.stage}, after {number} others"
        assert all(found == [STEPS * number, max(number - 1, 0)] for found in counts), where
        if number > 0:
            stored = states(checkpoint_path(tmp_path / "run", STEPS * number))
            again = states(checkpoint_path(tmp_path / f"echo{number}", STEPS * number))
            for kind, tensors in stored.items():
                assert tensors.keys() == again[kind].keys() != set(), where
                assert all(torch.equal(again[kind][name], value) for name, value in tensors.items()), where
        present, wanted = (states(checkpoint_path(run, STEPS * (number + 1))) for run in (tmp_path / "run", reference))
        for kind, tensors in wanted.items():
            if number == 0 and kind in ((NAME, state) for state in STATE_NAMES):
                assert not any(value.any() for value in (*tensors.values(), *present[kind].values())), kind
            else:
                assert distance(present[kind], tensors) < 1e-5, f"{where}: {kind}"
