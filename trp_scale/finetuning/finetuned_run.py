"""Fine-tuned runs read back: which ones a directory holds; and models of any run as engines that only predict."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from trp_scale.checkpoint.document import CheckpointDocument, read_document
from trp_scale.checkpoint.export import find_checkpoint
from trp_scale.checkpoint.format import STATE_OF, read_full_state
from trp_scale.config import Config, RefusedError
from trp_scale.config.finetuning import FinetuneConfig
from trp_scale.config.loader import from_dict
from trp_scale.config.upstream import Weights
from trp_scale.distributed.environment import Environment
from trp_scale.engines.plain import PlainEngine
from trp_scale.reporting.results import RESULTS_FILE, read_results


@dataclass(frozen=True, kw_only=True)
class ReadRun:
    """Files and settings of a run that is read back.

    Attributes:
        directory: of the run.
        checkpoint: its newest.
        document: of the checkpoint.
        config: of the run.
        weights: which of its weights are measured.
    """

    directory: Path
    checkpoint: Path
    document: CheckpointDocument
    config: Config
    weights: Weights = "last"


@dataclass(frozen=True, kw_only=True)
class FinetunedRun(ReadRun):
    """The end of one run of `trp-scale finetune`; `directory` is of its task and seed."""

    config: FinetuneConfig

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes that the model tells apart; None where it has none."""
        names = self.document.extra.get("classes")
        return None if names is None else tuple(names)


def read_run(directory: Path, weights: Weights = "last") -> FinetunedRun:
    """One task and seed, with its last weights or their average.

    Raises:
        RefusedError: there is no checkpoint, it is of no fine-tuning, or of one that has not ended.
    """
    checkpoint = find_checkpoint(directory)
    document = read_document(checkpoint)
    config = from_dict(document.config, source=str(checkpoint))
    if not isinstance(config, FinetuneConfig):
        raise RefusedError(
            f"--run {directory}: a run of pre-training, which has no downstream task; allowed: a directory of "
            "trp-scale finetune"
        )
    if document.step < config.training.steps:
        raise RefusedError(
            f"--run {directory}: stopped after {document.step} of {config.training.steps} steps; repeat the command "
            "that began it, and it goes on to its end"
        )
    return FinetunedRun(directory=directory, checkpoint=checkpoint, document=document, config=config, weights=weights)


def find_runs(run: Path, weights: Weights = "last") -> dict[str, list[FinetunedRun]]:
    """The runs of a directory, by task: one alone, or all tasks and seeds of a `trp-scale finetune`.

    Raises:
        RefusedError: there is none, or one of them as `read_run` refuses.
    """
    if (run / "checkpoints").is_dir():
        directories = [run]
    else:
        begun = (path for path in run.glob("*/seed_*") if any(path.iterdir()))  # one that was refused left it empty
        directories = sorted(begun, key=lambda path: (path.parent.name, _seed(path)))
    if not directories:
        raise RefusedError(
            f"--run {run}: no trained run is there; allowed: a run directory of trp-scale pretrain, or a directory of "
            "trp-scale finetune, with TASK/seed_N/checkpoints, or one of those seeds"
        )
    by_task: dict[str, list[FinetunedRun]] = {}
    for directory in directories:
        finetuned = read_run(directory, weights)
        by_task.setdefault(finetuned.config.downstream.task or finetuned.config.downstream.kind, []).append(finetuned)
    return by_task


def _seed(path: Path) -> int:
    number = path.name.removeprefix("seed_")
    return int(number) if number.isdigit() else 0


def read_origin(run: Path, runs: dict[str, list[FinetunedRun]]) -> tuple[str, str]:
    """Recipe and pre-trained encoder, for the results."""
    if (run / RESULTS_FILE).is_file():
        results = read_results(run)
        return results.recipe, results.encoder
    first = next(iter(runs.values()))[0]
    return str(run), first.config.model.weights or "scratch"


class PredictingEngine(PlainEngine):
    """Whole weights on each of any number of ranks: nothing is learned, so nothing need be sharded or reduced."""

    def place(self, module: nn.Module) -> nn.Module:
        return module.requires_grad_(False).to(self.device)


def predicting_engine(module: nn.Module, run: ReadRun, environment: Environment) -> PredictingEngine:
    """The model with the weights of the run's checkpoint.

    Args:
        module: of the run, with any weights.

    Raises:
        RefusedError: the checkpoint has other tensors, or no average where run.weights asks for it.
    """
    weights = read_full_state(run.checkpoint, STATE_OF[run.weights])
    parameters = dict(module.named_parameters())
    other = [name for name in parameters.keys() & weights.keys() if parameters[name].shape != weights[name].shape]
    if parameters.keys() != weights.keys() or other:
        named = sorted([*(parameters.keys() ^ weights.keys()), *other])
        raise RefusedError(
            f"{run.checkpoint}: not the weights of this model ({', '.join(named[:5])}); measured on data of other "
            "classes"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    config = run.config
    config.training.compile = "none"
    if config.training.precision == "fp16":
        config.training.precision = "fp32"  # needs a loss scaler, which is DeepSpeed's
    return PredictingEngine(module, config, device=environment.device, data_group=environment.data)
