"""Commands of documents made small, and run in this process: less text, smaller models, fewer steps; and their inputs.

A command keeps its words; what makes it small is appended, and of two equal flags the last one counts.
"""

from __future__ import annotations

import contextlib
import io
import traceback
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from tests.commands import PRETRAIN, ROOT
from tests.runs import SMALL, to_flags
from tests.unit.finetuning.glue.small_data import write_glue
from tests.unit.sharding.pseudo_labels.tiny_models import dpt_depth, mask2former
from trp_scale.cli import main as cli
from trp_scale.config.loader import flat, load_recipe, to_dict
from trp_scale.sharding.text.corpus import embedded_documents

SMALL_IMAGES = {"samples_per_shard": 16, "rows_per_block": 8, "processes": 1}
SMALL_SCENES = {**SMALL_IMAGES, "count": 32, "size": 48}
SMALL_DECODER = {"vision.decoder_layers": 2, "vision.decoder_hidden_size": 32, "vision.decoder_heads": 2}
SMALL_TEXT = {"length": 64, "vocab_size": 1000, "rows_per_block": 8, "processes": 1, "tagger": "textblob"}
STEPS = 3
LONGER = 2
"""Steps that a command with --resume adds."""


def small_training(words: list[str], steps: int) -> list[str]:
    """Flags that shrink a recipe, those of its own settings. What a resume may not change is the same in all
    commands. Weights of another library bring their own sizes."""
    own = {
        "training.steps": steps,
        "training.epochs": 0,
        "training.precision": "fp32",
        "optimizer.schedule": "constant",
    }
    known = flat(to_dict(load_recipe(words[words.index("--recipe") + 1])))
    small = {name: value for name, value in {**SMALL, **SMALL_DECODER, **own}.items() if name in known}
    if "--model.weights" in words:
        small = {name: value for name, value in small.items() if not name.startswith("model.")}
    return to_flags(small)


def small_tuning(words: list[str]) -> list[str]:
    """Flags that shrink fine-tuning; the encoder has its own sizes."""
    small: dict[str, object] = {"downstream.epochs": 0, "training.steps": STEPS, "optimizer.schedule": "constant"}
    small |= {"batch.global_size": 8, "batch.micro_size": 4, "data.workers": 0}
    small |= {"training.precision": "fp32", "logging.every": 1}
    if "--seeds" in words:
        small["seeds"] = 2
    if "--task" in words:
        small |= {"task": "cola", "downstream.max_length": 32}
    return to_flags(small)


def made_small(words: list[str]) -> list[str]:
    """A command of trp-scale, or of a launcher, that makes less and takes less time."""
    if "shard-text" in words:
        return [*words, *to_flags(SMALL_TEXT)]
    if "shard-images" in words:
        return [*words, *to_flags(SMALL_SCENES if "--embedded" in words else SMALL_IMAGES)]
    if "probe" in words:
        return [*words, *to_flags({"workers": 0})]
    if "pseudo-label" in words:
        return [*words, *to_flags({"processes": 1, "batch": 4})]
    if "pretrain" in words or PRETRAIN in words:
        return [*words, *small_training(words, STEPS + LONGER if "--resume" in words else STEPS)]
    if "finetune" in words or "launch/finetune.py" in words:
        return [*words, *small_tuning(words)]
    if "plan" in words:
        return [*words, *to_flags({"model.layers": 2})]
    return words


def write_texts(directory: Path, first: int) -> None:
    """Twenty short English texts."""
    directory.mkdir(parents=True)
    for number, (_, text) in enumerate(islice(embedded_documents(), first, first + 20)):
        (directory / f"{first + number}.txt").write_text(text[:2000], encoding="utf-8")


def write_image(path: Path, seed: int) -> None:
    """A picture of coloured patches, as PNG or JPEG by its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    patches = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    Image.fromarray(patches).resize((96, 80), Image.Resampling.BICUBIC).save(path)


def write_images(directory: Path) -> None:
    """Two classes, 32 images to learn from and 16 to test on."""
    for number in range(48):
        split = "train" if number < 32 else "test"
        write_image(directory / split / f"class{number % 2}" / f"{number}.jpg", number)


def write_rooms(directory: Path) -> None:
    """Images with depth in millimetres and three classes of pixels, and the names of these beside them."""
    for number in range(48):
        name, random = f"{number:04d}", np.random.default_rng(number)
        write_image(directory / "rgb" / f"{name}.jpg", number)
        coarse = random.integers(1, 4, (8, 12), dtype=np.uint8)
        for folder, values in (("depth", coarse.astype(np.uint16) * 900), ("semseg", coarse - 1)):
            path = directory / folder / f"{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(values.repeat(10, 0)[:80].repeat(8, 1)).save(path)
    (directory.parent / "classes.txt").write_text("floor\nwall\nchair\n", encoding="utf-8")


def write_inputs(directory: Path) -> Path:
    """Put what the pages say that a reader has into an empty directory: text, images, maps, GLUE, models in directories
    named as on the hub, and the scripts of a checkout."""
    write_texts(directory / "my_texts", 0)
    write_texts(directory / "other_texts", 20)
    for number, source in enumerate(("books", "news", "notes")):
        write_texts(directory / "my_sources" / source, 20 * number)
    write_images(directory / "my_images")
    write_rooms(directory / "rooms")
    write_glue(directory / "glue")
    dpt_depth(directory / "Intel" / "dpt-large")
    mask2former(directory / "facebook" / "mask2former-swin-small-coco-panoptic")
    torch.save({"model": {"global_tokens": torch.zeros(1, 1, 8)}}, directory / "multimae.pth")
    for name in ("launch", "ds_configs"):
        (directory / name).symlink_to(ROOT / name)
    return directory


def run_here(words: list[str]) -> tuple[int, str]:
    """A command in this process; returns its exit status and what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            own = words[1:] if words[0] == "trp-scale" else [Path(words[1]).stem, *words[2:]]
            status = cli.main(own)
        except Exception:  # as a process would end; the test that asks for this command shows it
            status = 1
            traceback.print_exc()
    return status, printed.getvalue()
