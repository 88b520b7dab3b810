"""Images decoded and transformed per CPU-second of one core, against webdataset + PIL + torchvision's v1 transforms.

    python benchmarks/image_loader.py [--data DATASET] [--rounds 9]

Both sides read the same tars from the page cache, in one process with one thread, in alternating rounds; the rate is
images over CPU time (so other work on the machine counts less), median over the rounds. Crops are random resized ones
(20 % to 100 % of the area, bicubic) with flips: one of 224 pixels (MAE), or four of 112 from one decoding (MAE+). Ours
makes whole batches (order, crops, masks, labels) of uint8, which the device normalises; the table has the bytes that a
row takes on its way there. The other side is measured as is usual, ending in ToTensor and Normalize, and also ending in
uint8 as ours.

Without --data it makes 512 JPEGs of about 33 kB and a short side of 256 pixels, as ImageNet's are after the usual
resize: noise whose spectrum falls as a photograph's does, with 1 / f. MM-MAE, of which there is no other side, reads
such noise with depth and segmentation made of its colours.
"""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import tyro
import webdataset
from PIL import Image
from rich.console import Console
from rich.table import Table
from torchvision import transforms

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.loader import breakdown
from benchmarks.rounds import alternate
from trp_scale.config.images import ImagePretrainConfig
from trp_scale.data import plan, tar_reader
from trp_scale.data.images import crops
from trp_scale.data.images import dataset as image_rows
from trp_scale.data.images.formats import write_png
from trp_scale.data.index import read_json, write_json
from trp_scale.data.train_source import TrainSource
from trp_scale.pretraining.base import open_sources
from trp_scale.pretraining.mae import batch as mae_masks
from trp_scale.pretraining.mae.settings import MaeConfig
from trp_scale.pretraining.mm_mae.settings import MmMaeConfig
from trp_scale.sharding.parts import new_tar, report_path

STAGES = {
    "address (order, shuffles)": (plan.__file__, "locate"),
    "read the files": (tar_reader.__file__, "members"),
    "decode": (image_rows.__file__, "decode_image"),
    "draw crops": (crops.__file__, "draw"),
    "cut, resize and flip": (crops.__file__, "cut"),
    "draw masks": (mae_masks.__file__, "draw_masks"),
}
"""File and function of each stage; none calls another."""

METHODS = {"MAE, 1 crop of 224": (1, 224), "MAE+, 4 crops of 112": (4, 112)}
SCALED = "ours, scaled decoding"
WITH_MAPS = "MM-MAE, 1 crop of 224 with depth and segmentation"
CLASSES = 16
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(kw_only=True)
class Options:
    """What is measured."""

    data: Path | None = None
    """A data set made by trp-scale shard-images; none = noise."""
    images: int = 512
    """Images per round."""
    micro_size: int = 64
    """Images per micro-batch."""
    rounds: int = 9
    """Rounds of each."""
    short_side: int = 256
    """Of the noise, in pixels."""


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


def open_train(options: Options, directory: Path, config: ImagePretrainConfig) -> TrainSource:
    """The training rows in this process; one window is one round."""
    config.data.path, config.data.workers, config.data.validation_fraction = str(directory), 0, 0.0
    config.batch.micro_size, config.batch.global_size = options.micro_size, options.images
    return open_sources(config, rank=0, world=1).train


def mae(count: int, size: int, *, scaled: bool = False) -> MaeConfig:
    """Crops without maps."""
    config = MaeConfig()
    config.crops.scaled_decoding = scaled
    config.masking.ratio = 0.75
    config.crops.count, config.crops.size = count, size
    return config


def other_batches(options: Options, directory: Path, count: int, size: int, *, floats: bool) -> Iterator[object]:
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
    return iter(dataset.map_tuple(cut, int).batched(options.micro_size))


def take(batches: Iterator[object], count: int) -> list[object]:
    return list(islice(batches, count))


def candidates(options: Options, directory: Path, method: str) -> dict[str, Callable[[], object]]:
    """One round of each side."""
    if method == WITH_MAPS:
        return {"ours": open_train(options, directory, MmMaeConfig()).next_window}
    count, size = METHODS[method]
    rounds: dict[str, Callable[[], object]] = {"ours": open_train(options, directory, mae(count, size)).next_window}
    rounds[SCALED] = open_train(options, directory, mae(count, size, scaled=True)).next_window
    for name, floats in (("webdataset + PIL + v1", True), ("the same, uint8", False)):
        batches = other_batches(options, directory, count, size, floats=floats)
        rounds[name] = partial(take, batches, options.images // options.micro_size)
    return rounds


def measure(options: Options, directory: Path, method: str) -> None:
    """Measure one method and print."""
    train = open_train(options, directory, MmMaeConfig() if method == WITH_MAPS else mae(*METHODS[method]))
    measured = alternate(candidates(options, directory, method), rounds=options.rounds, warmup=1)
    table = Table("", "per CPU-second", "microseconds", "ours is faster", title=f"{method}: images, one core")
    for name, one in measured.items():
        ratio = one.cpu / measured["ours"].cpu
        each = one.cpu / options.images
        table.add_row(name, f"{1 / each:,.0f}", f"{1e6 * each:,.0f}", f"{ratio:.2f} x" if name != "ours" else "")
    batch = train.next_window()[0]
    size = sum(field.nbytes for field in batch.fields.values()) / batch.rows
    table.add_row(f"bytes of a row: {size:,.0f}", "", "", "", end_section=True)
    for stage, share in breakdown(train, STAGES, "the rest").items():
        table.add_row(f"  {stage}", "", f"{share:.0%}", "")
    Console().print(table)


def main(options: Options) -> None:
    """Measure and print."""
    if options.images % options.micro_size:
        sys.exit(f"--images {options.images} is not a multiple of --micro_size {options.micro_size}")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        data = options.data or make_dataset(Path(directory) / "noise", 512, short_side=options.short_side)
        tars = list((data / "shards").glob("*.tar"))
        rows = read_json(data / "dataset.json")["rows"]
        print(f"{rows:,} images, {sum(tar.stat().st_size for tar in tars) / rows / 1e3:.1f} kB each in their tars")
        for method in METHODS:
            measure(options, data, method)
        if options.data is None and options.short_side == Options.short_side:
            measure(options, make_dataset(Path(directory) / "maps", 512, maps=True), WITH_MAPS)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
