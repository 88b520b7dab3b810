"""GLUE tasks made of real English with made-up labels, and the command lines of small runs on them."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

from trp_scale.sharding.text.corpus import embedded_documents

SMALL = {
    "model.layers": 2,
    "model.hidden_size": 32,
    "model.heads": 2,
    "model.intermediate_size": 64,
    "model.max_positions": 64,
    "batch.global_size": 8,
    "batch.micro_size": 4,
    "downstream.max_length": 64,
    "logging.every": 1,
}


def sentences(count: int) -> list[str]:
    """Different sentences of four to thirty words."""
    found: dict[str, None] = {}
    for _, text in embedded_documents():
        for sentence in re.split(r"(?<=[.!?])\s+", " ".join(text.split())):
            if 4 <= len(sentence.split()) <= 30:
                found.setdefault(sentence)
        if len(found) >= count:
            return list(found)[:count]
    raise LookupError(f"{len(found)} sentences found, {count} wanted")


def write_cola(root: Path, train: int, dev: int) -> Path:
    """CoLA's format; label 1 on two of three sentences, whatever they say. With `dev` = 0
    the training sentences are measured."""
    texts = sentences(train + dev)
    lines = [f"x\t{int(number % 3 > 0)}\t\t{text}\n" for number, text in enumerate(texts)]
    (root / "CoLA").mkdir(parents=True)
    (root / "CoLA" / "train.tsv").write_text("".join(lines[:train]), encoding="utf-8")
    (root / "CoLA" / "dev.tsv").write_text("".join(lines[train:] if dev else lines), encoding="utf-8")
    return root


def write_stsb(root: Path, train: int, dev: int) -> Path:
    """STS-B's columns that are read; a sentence beside the next one, scores from 0 to 5."""
    texts = sentences(train + dev + 1)
    lines = [f"{a}\t{b}\t{number % 11 / 2}\n" for number, (a, b) in enumerate(pairwise(texts))]
    (root / "STS-B").mkdir(parents=True)
    for name, part in (("train", lines[:train]), ("dev", lines[train : train + dev])):
        (root / "STS-B" / f"{name}.tsv").write_text("sentence1\tsentence2\tscore\n" + "".join(part), encoding="utf-8")
    return root


def glue_flags(root: Path, run_dir: Path, tasks: str, source: str, **changes: Any) -> list[str]:
    """Command line of a small run; `changes` are flags with "__" for the dot."""
    values: dict[str, Any] = {**SMALL, "data.path": root, "run_dir": run_dir, "task": tasks, "from": source}
    values |= {name.replace("__", "."): value for name, value in changes.items()}
    return ["--recipe", "glue_tiny", *(part for name, value in values.items() for part in (f"--{name}", str(value)))]


def finetune_here(arguments: list[str]) -> int:
    """Run in this process; on shared ranks the process group is already there."""
    from trp_scale.finetuning.arguments import parse_finetune
    from trp_scale.finetuning.finetune import finetune

    return finetune(parse_finetune(arguments))
