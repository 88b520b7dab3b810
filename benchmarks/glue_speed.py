"""Sentences a second in GLUE fine-tuning: ours against transformers' Trainer (`pip install -e '.[peers]'`).

    python benchmarks/glue_speed.py --data GLUE --tokenizer DIR [--task sst2] [--precision bf16]

The same weights, rows in the same order, batch, precision, dropout, schedule and fused AdamW without clipping, SDPA on
both sides. Each round takes every candidate for some steps of its own training loop, data, logging and all; what it
does before the first steps and after the last is left out. "static" pads every row to --length on both sides, "dynamic"
to the longest row of the batch (the Trainer), or lets rows share sequences (ours).
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import tyro
from torch.utils.data import SequentialSampler
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, BertModel, DataCollatorWithPadding

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.rounds import alternate, print_ratios, time_call
from benchmarks.steps import Precision, StepOptions
from trp_scale.config import Config
from trp_scale.core.batch import Batch
from trp_scale.distributed.environment import Environment
from trp_scale.distributed.liveness import HANGS, Watchdog
from trp_scale.finetuning.arguments import parse_finetune
from trp_scale.finetuning.glue.folders import read_glue
from trp_scale.finetuning.glue.task import GlueTask
from trp_scale.finetuning.task import build_task
from trp_scale.training.pretrain import Run
from trp_scale.training.rundir import Ending, Guard

WARM_UP = 5
"""Steps at the beginning of each round that are not measured."""


@dataclass(kw_only=True)
class Options(StepOptions):
    """What to measure."""

    data: Path
    """The GLUE directory."""
    tokenizer: Path
    """Tokenizer directory."""
    task: str = "sst2"
    """Any of GLUE's."""
    layers: int = 4
    """Of the encoder, whose weights are random."""
    hidden_size: int = 256
    """Its width; heads of 64, feed-forward of four times the width."""
    length: int = 128
    """Longest row."""
    steps: int = 25
    """Steps of each candidate in a round."""
    precision: Precision = "bf16"
    """Of forward and backward, on both sides."""


def write_encoder(options: Options, directory: Path) -> None:
    """A BERT with random weights as transformers writes it, with the tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(str(options.tokenizer), local_files_only=True, trust_remote_code=False)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=options.hidden_size,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden_size // 64,
        intermediate_size=4 * options.hidden_size,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    BertModel(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def our_run(options: Options, encoder: Path, run_dir: Path, environment: Environment, padding: str) -> Run:
    """A fine-tuning run that has not begun."""
    settings = {
        "recipe": "glue",
        "from": encoder,
        "run_dir": run_dir,
        "data.path": options.data,
        "downstream.task": options.task,
        "downstream.max_length": options.length,
        "downstream.padding": padding,
        "batch.global_size": options.rows,
        "batch.micro_size": options.rows,
        "training.precision": options.precision,
        "training.compile": "none",
        "logging.progress": "false",
    }
    arguments = parse_finetune([part for name, value in settings.items() for part in (f"--{name}", str(value))])
    run_dir.mkdir(parents=True)
    guard = Guard(lambda: None, Watchdog(run_dir / HANGS, limit=0.0), Ending(run_dir=run_dir, rank=0))
    return Run(arguments, environment, run_dir, "plain", guard, build_task)  # type: ignore[arg-type]


def task_of(run: Run) -> GlueTask:
    """Return the task of a run."""
    assert isinstance(run.upstream, GlueTask)
    return run.upstream


def our_round(run: Run, options: Options) -> Callable[[], tuple[float, float]]:
    """Return a call that trains for a round and returns the seconds of its steps."""

    def train(steps: int) -> None:
        for _ in range(steps):
            run.trainer.train_step()

    def call() -> tuple[float, float]:
        run.sources.seek({"train": 0})
        train(WARM_UP)
        return time_call(lambda: train(options.steps - WARM_UP))

    return call


class Sequential(transformers.Trainer):  # type: ignore[misc]
    """The Trainer, with rows in the order in which they are given: ours."""

    def _get_train_sampler(self, *_: Any, **__: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


class Clock(transformers.TrainerCallback):  # type: ignore[misc]
    """Measures the steps of a `train`: seconds on the clock and of processor time."""

    def __init__(self) -> None:
        self.began = self.seconds = (0.0, 0.0)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step in (WARM_UP, state.max_steps):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            now = time.perf_counter(), time.process_time()
            self.seconds = now[0] - self.began[0], now[1] - self.began[1]
            self.began = now


def peer_rows(options: Options, encoder: Path, order: np.ndarray, *, static: bool) -> tuple[list[dict[str, Any]], Any]:
    """Tokenised rows in our order and what makes batches of them, as transformers' own examples do."""
    tokenizer = AutoTokenizer.from_pretrained(str(encoder), local_files_only=True, trust_remote_code=False)
    data = read_glue(options.data, options.task, split="dev", max_bad_lines=10)
    sentences = [[texts[row] for row in order] for texts in data.train.sentences]
    padding: dict[str, Any] = {"padding": "max_length"} if static else {}
    encoded = tokenizer(*sentences, truncation=True, max_length=options.length, **padding)
    assert data.train.labels is not None
    kind = float if options.task == "stsb" else int
    labels = [kind(label) for label in data.train.labels[order]]
    rows = [{**{name: encoded[name][row] for name in encoded}, "label": label} for row, label in enumerate(labels)]
    return rows, transformers.default_data_collator if static else DataCollatorWithPadding(tokenizer)


def peer_round(
    options: Options,
    model: BertForSequenceClassification,
    config: Config,
    rows: list[dict[str, Any]],
    collate: Any,
    directory: Path,
) -> Callable[[], tuple[float, float]]:
    """transformers' Trainer with our weights and settings."""
    settings = transformers.TrainingArguments(
        output_dir=str(directory),
        per_device_train_batch_size=options.rows,
        max_steps=options.steps,
        learning_rate=config.optimizer.lr,
        weight_decay=config.optimizer.weight_decay,
        adam_epsilon=config.optimizer.eps,
        max_grad_norm=0.0,
        optim="adamw_torch_fused",
        lr_scheduler_type="linear",
        bf16=options.precision == "bf16",
        use_cpu=not torch.cuda.is_available(),
        logging_steps=config.logging.every,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    clock = Clock()
    trainer = Sequential(model=model, args=settings, train_dataset=rows, data_collator=collate, callbacks=[clock])
    trainer.remove_callback(transformers.PrinterCallback)

    def call() -> tuple[float, float]:
        trainer.train()
        return clock.seconds

    return call


def peer_model(encoder: Path, run: Run) -> BertForSequenceClassification:
    """transformers' model with the weights that ours begins with."""
    classes = task_of(run).config.downstream.classes
    model = BertForSequenceClassification.from_pretrained(
        str(encoder), num_labels=classes, classifier_dropout=0.1, attn_implementation="sdpa"
    )
    model.load_state_dict(run.engine.full_weights(), strict=False)
    return model


def check_equal(run: Run, peer: BertForSequenceClassification, batch: Batch, inputs: dict[str, torch.Tensor]) -> None:
    """The same batch gives the same logits, without dropout."""
    run.engine.train(False)
    peer.to(run.engine.device).eval()
    with torch.no_grad():
        ours = task_of(run).predict(run.engine.module, batch.to(run.engine.device))
        theirs = peer(**{name: tensor.to(run.engine.device) for name, tensor in inputs.items()}).logits
    run.engine.train(True)
    assert torch.allclose(ours, theirs, atol=1e-4), f"logits differ by {(ours - theirs).abs().max():.2e}"


def main(options: Options) -> None:
    device = options.device()
    transformers.utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as scratch, Environment() as environment:
        scratch_dir = Path(scratch)
        encoder = scratch_dir / "encoder"
        write_encoder(options, encoder)
        kinds = {"static": "length", "dynamic": "none"}
        calls = {}
        for kind, padding in kinds.items():
            run = our_run(options, encoder, scratch_dir / kind, environment, padding)
            run.engine.train(True)
            needed = np.arange(options.rows * options.steps, dtype=np.int64)
            order = run.sources.train._fetcher._plan.locate(needed).block  # a row is a block of its own
            rows, collate = peer_rows(options, encoder, order, static=kind == "static")
            check_equal(run, peer_model(encoder, run), run.sources.train.peek(1)[0][0], collate(rows[: options.rows]))
            calls[f"trp_scale, {kind}"] = our_round(run, options)
            calls[f"Trainer, {kind}"] = peer_round(
                options, peer_model(encoder, run), run.config, rows, collate, scratch_dir / f"peer_{kind}"
            )
        rounds = alternate(calls, rounds=options.rounds, warmup=1, timer=lambda call: call())
        measured_rows = options.rows * (options.steps - WARM_UP)
        size = f"{options.rows} rows of at most {options.length} pieces, {options.precision}, {device.type}"
        title = f"{options.task}, {options.layers} layers x {options.hidden_size}, {size}; {measured_rows} rows a call"
        rates = {"rows/s": {name: f"{measured_rows / times.wall:.1f}" for name, times in rounds.items()}}
        for kind in kinds:
            pair = {name: times for name, times in rounds.items() if name.endswith(kind)}
            print_ratios(title, pair, f"trp_scale, {kind}", rates)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__, use_underscores=True))
