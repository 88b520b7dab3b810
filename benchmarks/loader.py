"""Rows that the loader finishes per CPU-second of one core, and the share of each stage.

    python benchmarks/loader.py --of text --data DATASET [--micro_sizes 32 256]
    python benchmarks/loader.py --of images [--data DATASET]

Both run in one process with one thread and read from the page cache. Sides take turns in each round; the rate is rows
over CPU time (so other work on the machine counts less), median over the rounds. The breakdown comes from a profiled
round in addition to the measured ones.

text: finished means addressed, read, paired, masked, tagged, and a Batch of torch tensors.

images: against webdataset + PIL + torchvision's v1 transforms on the same tars. Crops are random resized ones (20 % to
100 % of the area, bicubic) with flips: one of 224 pixels (MAE), or four of 112 from one decoding (MAE+). Ours makes
whole batches (order, crops, masks, labels) of uint8, which the device normalises; the table has the bytes that a row
takes on its way there. The other side is measured as is usual, ending in ToTensor and Normalize, and also ending in
uint8 as ours. Without --data it makes 512 JPEGs of about 33 kB and a short side of 256 pixels, as ImageNet's are after
the usual resize: noise whose spectrum falls as a photograph's does, with 1 / f. MM-MAE, of which there is no other
side, reads such noise with depth and segmentation made of its colours.
"""

from __future__ import annotations

import cProfile
import io
import pstats
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
import webdataset
from PIL import Image
from rich.console import Console
from rich.table import Table
from torchvision import transforms

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.rounds import alternate
from trp_scale.config import PretrainConfig
from trp_scale.data import plan, tar_reader
from trp_scale.data.images import crops
from trp_scale.data.images import dataset as image_rows
from trp_scale.data.images.formats import write_png
from trp_scale.data.index import read_json, write_json
from trp_scale.data.sources import TrainSource
from trp_scale.data.text import dataset as text_rows
from trp_scale.pretraining.base import open_sources
from trp_scale.pretraining.mae import batch as mae_batch
from trp_scale.pretraining.mae.settings import MaeConfig
from trp_scale.pretraining.mm_mae.settings import MmMaeConfig
from trp_scale.pretraining.pos_bert import batch as text_batch
from trp_scale.pretraining.pos_bert import masking
from trp_scale.pretraining.pos_bert.settings import PosBertConfig
from trp_scale.sharding.parts import new_tar, report_path

TEXT_STAGES = {
    "address (order, shuffles)": (plan.__file__, "locate"),
    "read rows from the maps": (text_rows.__file__, "read"),
    "draw pairs": (text_batch.__file__, "draw_pairs"),
    "lay out the sequences": (text_batch.__file__, "_lay_out"),
    "mask": (masking.__file__, "mask"),
    "tensors": (text_batch.__file__, "_fields"),
}
IMAGE_STAGES = {
    "address (order, shuffles)": (plan.__file__, "locate"),
    "read the files": (tar_reader.__file__, "members"),
    "decode": (image_rows.__file__, "decode_image"),
    "draw crops": (crops.__file__, "draw"),
    "cut, resize and flip": (crops.__file__, "cut"),
    "draw masks": (mae_batch.__file__, "draw_masks"),
}
"""File and function of each stage; none calls another. What is left is Python between them and torch's DataLoader."""

METHODS = {"MAE, 1 crop of 224": (1, 224), "MAE+, 4 crops of 112": (4, 112)}
SCALED = "ours, scaled decoding"
WITH_MAPS = "MM-MAE, 1 crop of 224 with depth and segmentation"
CLASSES = 16
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(kw_only=True)
class Options:
    """What is measured."""

    of: Literal["text", "images"]
    """Kind of rows."""
    data: Path | None = None
    """A data set made by trp-scale shard-text or shard-images; images: none = noise."""
    rows: int = 0
    """Rows per round; 0: 8,192 of text, 512 images."""
    micro_sizes: tuple[int, ...] = ()
    """Rows per micro-batch; none: 32 and 256 of text, 64 images."""
    rounds: int = 9
    """Rounds of each side."""
    short_side: int = 256
    """Short side of the noise images, in pixels."""


def noise(generator: np.random.Generator, height: int, width: int) -> Image.Image:
    """Three channels of 1 / f noise, brighter and darker together as in photographs."""
    rows, columns = np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width)[None, :]
    frequency = np.maximum(np.hypot(rows, columns), 1.0 / max(height, width))
    white = generator.standard_normal((3, height, width)) * 0.35 + generator.standard_normal((1, height, width))
    pink = np.fft.ifft2(np.fft.fft2(white) / frequency).real  # [3, H, W]
    scaled = 128 + 50 * (pink - pink.mean()) / pink.std()
    return Image.fromarray(scaled.clip(0, 255).astype(np.uint8).transpose(1, 2, 0))


def make_dataset(directory: Path, images: int, *, maps: bool = False, short_side: int = 256) -> Path:
    """Write the noise as a stored data set of one shard, with depth and segmentation or without."""
    long_side = round(short_side * 4 / 3)
    (directory / "shards").mkdir(parents=True)
    (directory / "progress").mkdir()
    generator = np.random.default_rng(0)
    tar = directory / "shards" / "image-000000.tar"
    with new_tar(tar, report_path(directory, tar.stem)) as shard:
        for number in range(images):
            height, width = (short_side, long_side) if number % 2 else (long_side, short_side)
            stream = io.BytesIO()
            image = noise(generator, height, width)
            image.save(stream, "JPEG", quality=72)
            members = {"jpg": stream.getvalue(), "cls": b"0"}
            if maps:
                red, green, _ = np.moveaxis(np.asarray(image), 2, 0)
                members["depth.png"] = write_png(red.astype(np.uint16) * 40 + 500)
                members["semseg.png"] = write_png(green // (256 // CLASSES))
            shard.add(f"noise-{number:06d}", 1, members, label=0)
    document = {"shards": ["image-000000.tar"], "suffixes": list(members), "rows": images, "rows_per_block": 64}
    if maps:
        document["modalities"] = {"depth": {"scale": 0.001}, "semseg": {"classes": [str(n) for n in range(CLASSES)]}}
    write_json(directory / "dataset.json", {"format": 1, "kind": "image", "classes": None, **document})
    return directory


def breakdown(train: TrainSource, stages: Mapping[str, tuple[str, str]], rest: str) -> dict[str, float]:
    """Return the share of a profiled window's time by stage.

    Args:
        stages: file and function of each; none may call another.
        rest: name of the remaining time.
    """
    profile = cProfile.Profile()
    profile.runcall(train.next_window)
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    total = sum(own for _, _, own, _, _ in stats.values())
    seconds: dict[tuple[str, str], float] = {}
    for (file, _, name), (_, _, _, cumulated, _) in stats.items():
        # A plan's `locate` calls that of its orders, in the same file: the outer call counts for both.
        seconds[file, name] = max(cumulated, seconds.get((file, name), 0.0))
    shares = {stage: seconds.get(function, 0.0) / total for stage, function in stages.items()}
    return {**shares, rest: 1.0 - sum(shares.values())}


def mae(count: int, size: int, *, scaled: bool = False) -> MaeConfig:
    """Crops without maps."""
    config = MaeConfig()
    config.crops.scaled_decoding = scaled
    config.masking.ratio = 0.75
    config.crops.count, config.crops.size = count, size
    return config


def other_batches(directory: Path, count: int, size: int, micro_size: int, *, floats: bool) -> Iterator[object]:
    """The same crops by webdataset, PIL and v1 transforms: batches without end."""
    ending = [transforms.ToTensor(), transforms.Normalize(MEAN, DEVIATION)] if floats else [transforms.PILToTensor()]
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(size, (0.2, 1.0), interpolation=transforms.InterpolationMode.BICUBIC),
            transforms.RandomHorizontalFlip(),
            *ending,
        ]
    )

    def cut(content: bytes) -> torch.Tensor:
        image = Image.open(io.BytesIO(content)).convert("RGB")
        return torch.stack([transform(image) for _ in range(count)])

    tars = [str(directory / "shards" / name) for name in read_json(directory / "dataset.json")["shards"]]
    dataset = webdataset.WebDataset(tars, shardshuffle=False).repeat().to_tuple("jpg", "cls")
    return iter(dataset.map_tuple(cut, int).batched(micro_size))


def take(batches: Iterator[object], count: int) -> list[object]:
    return list(islice(batches, count))


def open_train(config: PretrainConfig, data: Path, rows: int, micro_size: int) -> TrainSource:
    """The training rows in this process; one window is one round."""
    config.data.path, config.data.workers, config.data.validation_fraction = str(data), 0, 0.0
    config.batch.micro_size, config.batch.global_size = micro_size, -(-rows // micro_size) * micro_size
    return open_sources(config, rank=0, world=1).train


def measure(
    title: str, sides: Mapping[str, Callable[[], object]], rounds: int, trains: Mapping[str, TrainSource]
) -> None:
    """Measure the sides, of equally many rows, and print; `trains`: our sides."""
    windows = {name: train.next_window() for name, train in trains.items()}
    rows = sum(batch.rows for batch in next(iter(windows.values())))
    measured = alternate(sides, rounds=rounds, warmup=1)  # the first round maps the files
    first = next(iter(measured))
    table = Table("", "per CPU-second", "microseconds", f"over {first}", title=title)
    for name, one in measured.items():
        ratio = f"{one.cpu / measured[first].cpu:.2f}"
        table.add_row(name, f"{rows / one.cpu:,.0f}", f"{1e6 * one.cpu / rows:,.0f}", ratio)
    for name, train in trains.items():
        size = sum(field.nbytes for field in windows[name][0].fields.values()) / windows[name][0].rows
        table.add_section()
        table.add_row(f"{name}, bytes of a row: {size:,.0f}", "", "", "")
        stages = TEXT_STAGES if "masked_positions" in windows[name][0].fields else IMAGE_STAGES
        for stage, share in breakdown(train, stages, "the rest").items():
            table.add_row(f"  {stage}", "", f"{share:.0%}", "")
    Console().print(table)


def measure_text(options: Options) -> None:
    """Measure each size of a micro-batch; its rows are the same for all."""
    trains = {}
    for size in options.micro_sizes or (32, 256):
        config = PosBertConfig()
        config.model.max_positions = 1 << 16
        trains[f"micro-batch {size}"] = open_train(config, options.data or Path(), options.rows or 8192, size)
    sides = {name: train.next_window for name, train in trains.items()}
    measure("sequences, one core", sides, options.rounds, trains)


def measure_images(options: Options, directory: Path, method: str) -> None:
    """Measure one method beside the other library."""
    rows, size = options.rows or 512, next(iter(options.micro_sizes), 64)
    config = MmMaeConfig() if method == WITH_MAPS else mae(*METHODS[method])
    train = open_train(config, directory, rows, size)
    sides: dict[str, Callable[[], object]] = {"ours": train.next_window}
    if method != WITH_MAPS:
        sides[SCALED] = open_train(mae(*METHODS[method], scaled=True), directory, rows, size).next_window
        for name, floats in (("webdataset + PIL + v1", True), ("the same, uint8", False)):
            batches = other_batches(directory, *METHODS[method], size, floats=floats)
            sides[name] = partial(take, batches, -(-rows // size))
    measure(f"{method}: images, one core", sides, options.rounds, {"ours": train})


def main(options: Options) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    if options.of == "text":
        measure_text(options)
        return
    with tempfile.TemporaryDirectory() as directory:
        data = options.data or make_dataset(Path(directory) / "noise", 512, short_side=options.short_side)
        tars = list((data / "shards").glob("*.tar"))
        rows = read_json(data / "dataset.json")["rows"]
        print(f"{rows:,} images, {sum(tar.stat().st_size for tar in tars) / rows / 1e3:.1f} kB each in their tars")
        for method in METHODS:
            measure_images(options, data, method)
        if options.data is None and options.short_side == Options.short_side:
            measure_images(options, make_dataset(Path(directory) / "maps", 512, maps=True), WITH_MAPS)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__, use_underscores=True))
