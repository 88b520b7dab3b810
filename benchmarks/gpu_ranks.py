"""Section `ranks` of benchmarks/gpu.py: every engine on two ranks over NCCL on one GPU, or over gloo without a GPU,
against plain.

From version 2.30 NCCL runs several ranks on one GPU; --nccl FILE preloads a newer library than torch's, and --ranks 1
needs none. The section shows numerics, order of streams and buffers, and says nothing about speed. Each run is a
process of launch/pretrain.py in fp32 without dropout, on data in --data, which trp-scale makes if they do not exist.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu_setting import ROOT, Figures, Item, Setting
from trp_scale.checkpoint.format import read_full_state
from trp_scale.checkpoint.run_directory import checkpoints
from trp_scale.distributed.environment import SHARED_GPUS

BOUND = 1e-5
"""Distance of the weights from plain's over their norm."""
STEPS, LONG_STEPS, ROWS = 8, 60, 16
TIMEOUT_S = 200
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node")
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

DATA = {
    "text": ("shard-text", "--embedded", "--length", "128", "--vocab_size", "2048", "--rows_per_block", "64"),
    "scenes": ("shard-images", "--embedded", "--count", "256"),
}
"""Commands of trp-scale that make the data."""
COMMON = {
    "training.steps": str(STEPS),
    "training.seed": "3",
    "training.capture": "off",
    "training.precision": "fp32",
    "training.compile": "none",
    "batch.global_size": str(ROWS),
    "optimizer.lr": "1e-3",
    "optimizer.warmup_steps": "0",
    "checkpoint.every": str(STEPS // 2),
    "validation.every": "0",
    "data.workers": "0",
    "logging.progress": "False",
}
MODELS: dict[str, tuple[str, dict[str, str]]] = {
    "pos_bert_tiny": ("text", {"model.dropout": "0", "model.heads": "6"}),  # an even number for megatron
    # Adam divides by a gradient's size, which makes a whole step of rounding near zero. With learned masks such a step
    # can also exchange two patches of almost equal probability.
    "adpe_tiny": ("scenes", {"adversary.ascent": "sgd"}),
    "mlo_mae_tiny": ("scenes", {"optimizer.eps": "1e-4", "multilevel.lr": "1e-6"}),
    "mm_mae_tiny": ("scenes", {"balancer.kind": "gradnorm"}),
}
"""Data and settings of each recipe."""


class Layout(NamedTuple):
    """Flags of an engine, the library that it needs, and the ranks that split the batch."""

    flags: tuple[str, ...]
    library: str = "torch"
    data_ranks: int = 2

    @property
    def lacking(self) -> str:
        return "" if importlib.util.find_spec(self.library) else f"{self.library} is not installed"


LAYOUTS = {
    "ddp": Layout(("--engine", "ddp")),
    "FSDP2": Layout(("--engine", "fsdp")),
    **{f"ZeRO {n}": Layout(("--ds_config", f"ds_configs/zero{n}.json"), "deepspeed") for n in (1, 2, 3)},
    "megatron": Layout(("--engine", "megatron", "--megatron.tensor_parallel", "2"), "megatron", data_ranks=1),
}
"""Engines on two ranks."""
PLAIN = Layout(("--engine", "plain"), data_ranks=0)


@dataclass(frozen=True)
class Runs:
    """Runs of launch/pretrain.py in a directory; a name stands for one run, which is made once."""

    setting: Setting
    folder: Path

    def environ(self, *, preload: bool) -> dict[str, str]:
        variables = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
        path = os.pathsep.join(filter(None, (str(ROOT), variables.get("PYTHONPATH"))))
        variables |= {"PYTHONPATH": path, SHARED_GPUS: "1", "OMP_NUM_THREADS": "4" if self.setting.on_gpu else "1"}
        if not self.setting.on_gpu:
            variables["CUDA_VISIBLE_DEVICES"] = ""
        if preload and self.setting.nccl:
            variables["LD_PRELOAD"] = str(self.setting.nccl.resolve())
        return variables

    def make_data(self, kind: str) -> Path:
        """Return the directory of a data set."""
        path = self.setting.data / kind
        if not (path / "dataset.json").exists():
            command, *flags = DATA[kind]
            self.finish(self.start([sys.executable, "-m", "trp_scale", command, *flags, "--output", str(path)], kind))
        return path

    def start(self, command: list[str], name: str, *, preload: bool = False) -> subprocess.Popen[bytes]:
        """Start a command with its output in a file of this name."""
        with (self.folder / f"{name}.log").open("wb") as log:
            environ = self.environ(preload=preload)
            return subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=log)

    def finish(self, process: subprocess.Popen[bytes], *, status: int | None = 0) -> None:
        """Wait for a command.

        Raises:
            RuntimeError: another exit status, or none in time; the last lines that name an error follow.
        """
        ended: int | None = None
        try:
            ended = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun then kills its ranks after 30 s; they are not of its process group
            process.wait(60)
        if ended is None or (status is not None and ended != status):
            log = max(self.folder.glob("*.log"), key=lambda path: path.stat().st_mtime)
            errors = [line for line in log.read_text(errors="replace").splitlines() if "rror" in line]
            raise RuntimeError(f"{log.stem} ended with {ended}: {' | '.join(errors[:3])}")

    def command(self, model: str, layout: Layout, run_dir: Path, **more: str) -> list[str]:
        """Return the command line of a run: two micro-batches on each rank, one on plain. `more`: settings,
        with "__" for the dot."""
        kind, settings = MODELS[model]
        micro = ROWS // (layout.data_ranks * self.setting.ranks or 1)
        values = {**COMMON, **settings, "data.path": str(self.make_data(kind)), "batch.micro_size": str(micro)}
        values |= {"run_dir": str(run_dir), **{name.replace("__", "."): value for name, value in more.items()}}
        flags = [word for name, value in values.items() for word in (f"--{name}", value)]
        torchrun = (*TORCHRUN, str(self.setting.ranks)) if layout.data_ranks else ()
        return [sys.executable, *torchrun, "launch/pretrain.py", "--recipe", model, *flags, *layout.flags]

    def train(self, model: str, name: str, layout: Layout, **more: str) -> Path:
        """Return the directory of the run `name` of a model, which is made if it does not exist."""
        run_dir = self.folder / f"{model}, {name}"
        steps = int(more.get("training__steps", COMMON["training.steps"]))
        if not checkpoints(run_dir) or checkpoints(run_dir)[-1][0] < steps:
            command = self.command(model, layout, run_dir, **more)
            self.finish(self.start(command, run_dir.name, preload=bool(layout.data_ranks)))
        return run_dir


def without_key_biases(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights that attention sees: the gradient of a key's bias is rounding, which AdamW scales up to the learning
    rate. Of a bias of queries, keys and values it is the middle third."""
    kept = {name: weight for name, weight in weights.items() if not name.endswith("attention.self.key.bias")}
    for name in [name for name in weights if name.endswith("attn.qkv.bias")]:
        queries, _, values = kept.pop(name).chunk(3)
        kept |= {f"{name}.queries": queries, f"{name}.values": values}
    return kept


def distance(run_dir: Path, reference: Path) -> Figures:
    """Distance of the last weights of two runs over the norm of the reference's."""
    (step, ours), (last, theirs) = (checkpoints(path)[-1] for path in (run_dir, reference))
    weights, others = (without_key_biases(read_full_state(path)) for path in (ours, theirs))
    if step != last or weights.keys() != others.keys():
        raise RuntimeError(f"{ours} and {theirs} are of different steps or models")
    gap, norm = (
        torch.stack([tensor.double().norm() for tensor in tensors]).norm()
        for tensors in ([weights[name].double() - others[name].double() for name in others], [*others.values()])
    )
    figure = float(gap / norm)
    return {"steps": step, "distance_over_weights": figure, "as_expected": figure <= BOUND}


def against_plain(runs: Runs, model: str, name: str, layout: Layout, **more: str) -> Figures:
    """A run on two ranks against plain's."""
    reference = runs.train(model, "plain", PLAIN)
    return distance(runs.train(model, name, layout, **more), reference)


def captured_ddp(runs: Runs, model: str) -> Figures:
    """Captured steps of ddp against plain's, with the reduction of buckets in the backward graph."""
    name = "ddp captured"
    figures = against_plain(runs, model, name, LAYOUTS["ddp"], training__capture="on")
    summary = json.loads((runs.train(model, name, LAYOUTS["ddp"]) / "summary.json").read_text())["captured"]
    replayed = summary["replays"] > 0 and summary["uncaptured"] == 0
    return {**figures, **summary, "as_expected": bool(figures["as_expected"]) and replayed}


def resumed(runs: Runs, model: str, first: str, second: str) -> Figures:
    """The second half of a run under another engine, against plain."""
    reference = runs.train(model, "plain", PLAIN)
    source = runs.train(model, first, LAYOUTS[first])
    name = f"{first} then {second}"
    target = runs.folder / f"{model}, {name}"
    shutil.copytree(source, target)
    shutil.rmtree(checkpoints(target)[-1][1])
    return distance(runs.train(model, name, LAYOUTS[second], resume="auto"), reference)


def stopped(runs: Runs, model: str, engine: str) -> Figures:
    """A run that SIGTERM stops and that resumes, against an undisturbed one."""
    more = {"training__deterministic": "True", "checkpoint__every": "0", "training__steps": str(LONG_STEPS)}
    whole = runs.train(model, f"{engine} undisturbed", LAYOUTS[engine], **more)
    name = f"{engine} stopped"
    run_dir = runs.folder / f"{model}, {name}"
    command = runs.command(model, LAYOUTS[engine], run_dir, **more)
    process = runs.start(command, run_dir.name, preload=True)
    metrics = run_dir / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)  # torchrun passes it on, and then ends with an error
    runs.finish(process, status=None)
    at = checkpoints(run_dir)[-1][0]
    figures = distance(runs.train(model, name, LAYOUTS[engine], **more), whole)
    return {**figures, "stopped_at": at, "as_expected": bool(figures["as_expected"]) and 0 < at < LONG_STEPS}


def collectives(runs: Runs) -> Figures:
    """Findings of the doctor on two ranks, as `trp-scale doctor --two_ranks` starts them."""
    command = [sys.executable, *TORCHRUN, str(runs.setting.ranks), "launch/doctor.py", "--json", "--mebibytes", "4"]
    runs.finish(runs.start(command, "doctor", preload=True), status=None)
    text = (runs.folder / "doctor.log").read_text(errors="replace")
    try:
        findings = json.loads(text[text.index("{") : text.rindex("}") + 1])["findings"]
    except ValueError:
        raise RuntimeError(f"the doctor printed no findings: {text[-300:]}") from None
    (sums,) = (finding for finding in findings if finding["check"] == "collectives")
    versions = next(finding["result"] for finding in findings if finding["check"] == "versions")
    return {"collectives": sums["result"], "versions": versions, "as_expected": sums["state"] == "ok"}


def ranks(setting: Setting) -> Iterator[Item]:
    """Collectives, a captured step, resuming and stopping; then every engine with every model."""
    first = next(iter(MODELS))
    with TemporaryDirectory() as folder:
        runs = Runs(setting, Path(folder))
        alone = "" if setting.ranks > 1 else "needs two ranks"
        yield Item(name="collectives", measure=partial(collectives, runs), seconds=30, lacking=alone)
        measure = partial(captured_ddp, runs, first)
        yield Item(name=f"{first}, ddp captured", measure=measure, seconds=40, lacking=setting.cannot_capture)
        for engines in (("FSDP2", "ZeRO 2"), ("ZeRO 2", "FSDP2")):
            yield Item(
                name=f"{first}, {engines[0]} resumed under {engines[1]}",
                measure=partial(resumed, runs, first, *engines),
                seconds=45,
                lacking=LAYOUTS["ZeRO 2"].lacking,
            )
        name = f"{first}, FSDP2 stopped and resumed"
        yield Item(name=name, measure=partial(stopped, runs, first, "FSDP2"), seconds=60)
        for model in MODELS:
            for engine, layout in LAYOUTS.items():
                yield Item(
                    name=f"{model}, {engine}",
                    measure=partial(against_plain, runs, model, engine, layout),
                    seconds=25,
                    lacking=layout.lacking or (alone if engine == "megatron" else ""),
                )
