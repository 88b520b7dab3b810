"""Section `curves` of benchmarks/gpu.py: loss curves of runs of `trp-scale pretrain`, captured and compiled, and plain.

All runs of an item begin with the weights of one model of transformers, and have no dropout and deterministic kernels.
"plain" has neither graphs nor compilation. "captured" and, for BERT, transformers' own model get the same batches with
the same masks. "other_order" is "plain" with another seed, so with another order and other masks: its distance from
"plain" is the noise. Losses are the sum that transformers' models return: the recipe `bert_base` has the model and data
of `pos_bert_base`, and weighs all predicted pieces equally.

Without a GPU, "captured" is neither captured nor compiled; tests record operations instead (tests/recorded.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import BertForPreTraining, PreTrainedModel, ViTMAEForPreTraining

from benchmarks.gpu_captured import deterministic
from benchmarks.gpu_setting import Figures, Item, Setting, release_memory
from benchmarks.step_time import bert_inputs, peer_training
from trp_scale.config.run_flags import Arguments, parse
from trp_scale.pretraining.base import build_upstream
from trp_scale.pretraining.mae.settings import MaeConfig
from trp_scale.pretraining.mae.weights import stored_positions, vitmae_config
from trp_scale.pretraining.pos_bert.model import bert_config
from trp_scale.pretraining.pos_bert.settings import PosBertConfig
from trp_scale.pretraining.pos_bert.upstream import TextUpstream
from trp_scale.reporting.record import Curve, read_run
from trp_scale.training.loop import learning_rate
from trp_scale.training.pretrain import pretrain

POINTS, SMALL_STEPS = 100, 20
"""Points of a curve, each a mean of equally many steps; steps of a run with --small."""
START_S, STEP_S = 90, 0.13
"""Expected seconds on an H200: all starts, compilation and checkpoints of an item; a step of all its runs."""
COMMON = """--engine plain --training.precision bf16 --training.compile none --training.capture off
--training.deterministic True --data.validation_fraction 0 --validation.every 0 --checkpoint.every 0 --logging.every 1
--logging.progress False"""
SMALL = """--model.layers 2 --model.hidden_size 32 --model.heads 2 --model.intermediate_size 64 --batch.global_size 8
--batch.micro_size 8 --training.precision fp32 --optimizer.lr 1e-3 --data.workers 0"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Model and data of an item.

    Attributes:
        data: directory within --data.
        command: makes the data.
        flags: differences from the recipe.
        small: further flags with --small.
        build: builds transformers' model with random weights.
        peer: transformers' model is trained too.
    """

    recipe: str
    data: str
    command: str
    flags: str
    small: str
    build: Callable[[Any], PreTrainedModel]
    peer: bool = False


def build_bert(config: PosBertConfig) -> PreTrainedModel:
    return BertForPreTraining(bert_config(config.model, TextUpstream.facts(config).vocabulary))


def build_mae(config: MaeConfig) -> PreTrainedModel:
    """Build ViTMAE with its fixed positions, which transformers 5.23 leaves at zero."""
    model, grid = ViTMAEForPreTraining(vitmae_config(config)), config.crops.size // config.vision.patch_size
    for positions in (model.vit.embeddings.position_embeddings, model.decoder.decoder_pos_embed):
        positions.data.copy_(stored_positions(grid, positions.shape[-1], config.vision.position_order))
    return model


CASES = {
    "BERT-base on books": Case(
        recipe="bert_base",
        data="books",
        command="trp-scale shard-text --inputs books/train.jsonl --length 128",
        flags="--model.dropout 0 --batch.global_size 64 --batch.micro_size 64 --optimizer.lr 1e-4",
        small="--model.max_positions 128",
        build=build_bert,
        peer=True,
    ),
    "MAE ViT-S on CIFAR-10": Case(
        recipe="u_mae_cifar",
        data="cifar10",
        command="trp-scale shard-images --inputs cifar10/train-*.tar",
        flags="--objective.uniformity 0 --model.hidden_size 384 --model.heads 6 --model.intermediate_size 1536 "
        "--batch.micro_size 128",
        small="--vision.patch_size 8 --vision.decoder_layers 1 --vision.decoder_hidden_size 64",
        build=build_mae,
    ),
}


@dataclass(frozen=True)
class Runs:
    """Runs of a case in a directory."""

    setting: Setting
    case: Case
    folder: Path

    def arguments(self, name: str, more: str = "") -> Arguments:
        """Return the arguments of the run `name`. `more`: flags."""
        steps = SMALL_STEPS if self.setting.small else self.setting.steps
        small = f"{SMALL} {self.case.small}" if self.setting.small else ""
        length = f"--training.steps {steps} --optimizer.warmup_steps {steps // 10}"
        words = f"--recipe {self.case.recipe} {COMMON} {self.case.flags} {small} {length} {more}".split()
        words += ["--run_dir", str(self.folder / name), "--data.path", str(self.setting.data / self.case.data)]
        return parse([*words, *(["--model.weights", str(self.initial)] if self.initial.exists() else [])])

    @property
    def initial(self) -> Path:
        """Directory of the initial weights."""
        return self.folder / "initial"

    def write_initial_weights(self) -> None:
        """Write transformers' model with random weights, from which all runs start."""
        torch.manual_seed(0)
        self.case.build(self.arguments("none").config).save_pretrained(self.initial)

    def train(self, arguments: Arguments) -> tuple[Curve, Mapping[str, Any]]:
        """Train; return the losses and summary.json. Raises RuntimeError if a step is missing."""
        torch._dynamo.reset()
        release_memory()
        ended = pretrain(arguments)
        run = read_run(ended.run_dir)
        losses: Curve = run.curves.fields["loss"]
        if len(losses) < arguments.config.training.steps:
            raise RuntimeError(f"{ended.run_dir.name} has {len(losses)} finite losses and ended: {ended.reason}")
        return losses, run.summary

    def train_transformers(self, arguments: Arguments) -> Curve:
        """Train transformers' BERT on the batches of a run of ours, with its optimizer and learning rates."""
        release_memory()
        config, device = arguments.config, self.setting.device
        peer = BertForPreTraining.from_pretrained(self.initial, attn_implementation="sdpa")
        step = peer_training(peer.train(), config, device)
        losses = Curve()
        upstream = build_upstream(config, self.setting.environment)
        try:
            for number in range(config.training.steps):
                (batch,) = upstream.source.next_window()
                rate = learning_rate(number, config.training.steps, config.optimizer)
                inputs = {name: value.to(device) for name, value in bert_inputs(batch).items()}
                losses.add(number + 1, float(step(inputs, rate)))
        finally:
            upstream.sources.close()
        return losses


def compare_curves(curves: Mapping[str, Curve]) -> Figures:
    """Return the points of all curves, and the distances of the others from "plain"; those of "other_order" are the
    noise."""
    points = {name: curve.points(POINTS) for name, curve in curves.items()}
    figures: Figures = {"step": points["plain"].steps, **{f"{name}_loss": line.values for name, line in points.items()}}
    distances: dict[str, list[float]] = {}
    for name in [name for name in curves if name != "plain"]:
        gaps = np.abs(np.subtract(points[name].values, points["plain"].values))  # [P]
        distances[name] = [float(value) for value in (gaps.max(), gaps.mean(), gaps[-max(1, len(gaps) // 10) :].mean())]
        for kind, value in zip(("largest", "mean", "mean_of_last_tenth"), distances[name], strict=True):
            figures[f"{name}_{kind}"] = value
    noise = distances.pop("other_order")
    within = all(gap <= limit for gaps in distances.values() for gap, limit in zip(gaps, noise, strict=True))
    return {**figures, "as_expected": within}


def measure_curves(setting: Setting, case: Case) -> Figures:
    """Train all runs of a case and compare their curves."""
    with TemporaryDirectory() as folder, deterministic():
        runs = Runs(setting, case, Path(folder))
        runs.write_initial_weights()
        plain = runs.arguments("plain")
        losses = {"plain": runs.train(plain)[0]}
        if case.peer:
            losses["transformers"] = runs.train_transformers(plain)
        losses["other_order"], _ = runs.train(runs.arguments("other_order", "--training.seed 1"))
        capture = "" if setting.cannot_capture else "--training.capture on"
        whole = "--training.compile whole" if setting.on_gpu else ""
        losses["captured"], summary = runs.train(runs.arguments("captured", f"{capture} {whole}"))
    figures, counts = compare_curves(losses), summary["captured"] or {"replays": 0, "uncaptured": 0}
    replayed = bool(setting.cannot_capture) or (counts["uncaptured"] == 0 and counts["replays"] > 0)
    return {**figures, **counts, "as_expected": bool(figures["as_expected"]) and replayed}


def curves(setting: Setting) -> Iterator[Item]:
    """Loss curves of BERT and MAE."""
    for name, case in CASES.items():
        path = setting.data / case.data
        missing = f"{path} is not a data set; run: {case.command} --output {path}"
        yield Item(
            name=name,
            measure=partial(measure_curves, setting, case),
            seconds=START_S + STEP_S * setting.steps if setting.on_gpu else 10,
            lacking="" if (path / "dataset.json").is_file() else missing,
        )
