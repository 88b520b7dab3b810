"""Settings of `trp-scale shard-images` and `index`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from tyro.conf import Positional, UseAppendAction

from trp_scale.config.flags import TakesModalities, TakesModules
from trp_scale.config.registry import check_settings, non_default_values, preparation_sections, setting
from trp_scale.data.images.maps import map_formats
from trp_scale.errors import DataError, RefusedError
from trp_scale.sharding.parts import SpreadSettings


@dataclass(kw_only=True)
class ShardImagesConfig(SpreadSettings, TakesModalities):
    """Shard images for pre-training, with optional classes and aligned maps such as depth and segmentation."""

    part: ClassVar[Literal["files", "labels"]] = "files"

    output: Path
    """Directory of the data set. A stopped run resumes there; other settings or inputs are refused."""
    inputs: list[str] = field(default_factory=list)
    """One of: a folder of images (sub-folders are classes, numbered by sorted name; a flat folder has none); tars with
    .jpg, .jpeg or .png and .cls members (files, globs, or a folder of them); a directory written by
    datasets.save_to_disk; torchvision:NAME=ROOT for a torchvision dataset on disk (nothing is downloaded). Changes of
    an image folder are detected by names and sizes only: if you edit a file and it keeps its size, give another
    --output."""
    embedded: bool = False
    """Render synthetic scenes (solids on a textured ground) with class, exact depth, segmentation and surface normals,
    for trial runs without downloads; not for results about real images."""
    count: int = setting(4096, at_least=1, at_most=10**9)
    """Embedded: number of scenes."""
    size: int = setting(128, at_least=16, at_most=4096)
    """Embedded: side length in pixels."""
    seed: int = 0
    """Embedded: seed of the scenes."""
    coco: bool = False
    """Embedded: write a COCO file (boxes and masks) and a folder of images instead of shards, for fine-tuning on
    detection."""
    modality: UseAppendAction[list[str]] = field(default_factory=list)
    """depth=FOLDER (16-bit grey PNG, or .npy; 8-bit PNG with --depth.relative), semseg=FOLDER (8-bit PNG of class
    numbers), normals=FOLDER (8- or 16-bit RGB PNG of (n + 1) / 2, x right, y up, z towards the camera; black: unknown)
    or a modality of --module; repeatable. Maps have the relative paths of their images and are aligned with the upright
    images. In tars, maps are members .NAME.png, such as .depth.png."""
    source_field: Literal["", "folder"] = ""
    """folder: make a data set for each folder directly in the input, and a mixture of them; the folders of --modality
    have the same sub-folders."""
    class_names: str = ""
    """Tars: text file with one class name per line, in the order of the class numbers."""
    split: str = "train"
    """Purpose of the images: train or another name, stored in dataset.json. It also selects the split of a dataset
    directory or torchvision dataset. Masks are never learned (--multilevel.kind) from a split with a word that begins
    with test, val, dev or eval: give --split test for every test set."""
    image_column: str = "image"
    """Image column of a dataset directory."""
    label_column: str = "label"
    """Column of class numbers of a dataset directory; empty = none."""
    short_side: int = setting(0, at_least=0, at_most=1 << 16)
    """Shrink larger images (and their maps) to this short side in pixels. 0 = keep all sizes."""
    quality: int = setting(0, at_least=0, at_most=100)
    """Re-encode every image as JPEG of this quality. 0 = keep baseline RGB and grey JPEGs unchanged where possible, and
    encode others with quality 95 without chroma subsampling. Transparent pixels become white."""
    max_pixels: int = setting(100_000_000, at_least=1, at_most=1 << 40)
    """Skip larger images before decoding."""
    samples_per_shard: int = setting(0, at_least=0, at_most=1 << 20)
    """Images per shard; 0 = 1/16 of the images, at most 2048, in whole blocks."""
    rows_per_block: int = setting(64, at_least=1, at_most=1 << 20)
    """Images read together; unit of the data order and of the held-out split."""

    def check(self) -> None:
        """Raise DataError with the flag of an invalid setting."""
        if bool(self.inputs) == self.embedded:
            raise DataError("give --inputs FILES or --embedded, one of the two")
        for name in () if self.embedded else ("count", "size", "seed"):
            if (value := getattr(self, name)) != getattr(ShardImagesConfig, name):
                advice = "; --short_side shrinks images" if name == "size" else ""
                raise DataError(f"--{name} {value} applies to --embedded scenes, not to --inputs{advice}")
        if self.coco and not self.embedded:
            raise DataError("--coco applies to --embedded scenes: other images have no boxes")
        if self.coco and self.num_shards != 1:
            raise DataError(f"--num_shards {self.num_shards}: --coco writes one file without parts; 1 is allowed")
        check_settings(self, DataError)
        if self.source_field and self.embedded:
            raise DataError(f"--source_field {self.source_field} needs --inputs; --embedded scenes have one source")
        self.modality_folders()

    def modality_folders(self) -> dict[str, Path]:
        """Return the folder of each aligned modality, in the order of sample members."""
        known = map_formats()
        folders: dict[str, Path] = {}
        for item in self.modality:
            name, paths, folder = item.partition("=")
            if name not in known or not paths or name in folders:
                raise DataError(f"--modality {item}: once each, {' or '.join(f'{m}=FOLDER' for m in known)}")
            if not Path(folder).is_dir():
                raise DataError(f"--modality {item}: {folder} is not a folder")
            folders[name] = Path(folder)
        return {name: folders[name] for name in known if name in folders}

    def identity(self) -> dict[str, object]:
        """Return the settings that determine the output bytes. Contents of files that describe maps are part of the
        input fingerprint (MapFiles.content)."""
        names = ["embedded", "short_side", "quality", "max_pixels", "samples_per_shard", "rows_per_block"]
        names += ["count", "size", "seed"] if self.embedded else ["split", "image_column", "label_column"]
        names += ["split"] if self.embedded and self.split != "train" else []  # older scenes have no split
        values = {name: getattr(self, name) for name in names} | {"modality": list(self.modality_folders())}
        maps = {name: value for name, value in self.map_settings().items() if not isinstance(value, Path)}
        return values if self.embedded else values | {"maps": maps}

    def map_settings(self) -> dict[str, object]:
        """Return {"modality.setting": value} of the map settings that differ from their defaults."""
        sections = {name: self.section(name) for name in preparation_sections(self.part)}
        return {
            f"{name}.{setting}": value
            for name, section in sections.items()
            if section is not None
            for setting, value in non_default_values(section).items()
        }


IMAGE_MEMBERS = ("jpg", "jpeg", "png", "webp")
"""Suffixes of images in external tars."""

AUTO, NONE = "auto", "none"


@dataclass(kw_only=True)
class IndexConfig(SpreadSettings, TakesModules):
    """Write the binary index of a data set from its JSON indexes; runs memory-map it. Or make a data set of external
    WebDataset tars in place: their headers and images are read once."""

    choices: ClassVar[tuple[str, ...]] = ("image", "label", "class_names", "split", "rows_per_block", "max_pixels")
    """Settings of external tars; the data set depends on these and on `tars`."""

    tars: Positional[str]
    """Directory with dataset.json. Or external tars of images: a folder of tars, a pattern such as
    /data/train-{000000..000146}.tar or s3://bucket/train-{000000..000146}.tar, or a text file with one path or URL per
    line."""
    output: Path | None = None
    """External tars: directory of the data set; none = the folder of the tars."""
    label: str = AUTO
    """External tars: source of the class: cls or another suffix of a member with the number, json:FIELD, or none.
    auto = cls if the first image has one."""
    image: str = AUTO
    """External tars: image member: jpg, jpeg, png or webp; auto = any of them."""
    class_names: str = ""
    """External tars: text file with one class name per line, in the order of the class numbers."""
    split: str = "train"
    """External tars: purpose of the images, as --split of shard-images."""
    rows_per_block: int = setting(64, at_least=1, at_most=1 << 20)
    """External tars: images read together; unit of the data order and of the held-out split."""
    max_pixels: int = setting(100_000_000, at_least=1, at_most=1 << 40)
    """External tars: skip larger images."""

    @property
    def directory(self) -> Path:
        """Directory of the data set."""
        return Path(self.tars) if self.output is None else self.output

    def identity(self) -> dict[str, Any]:
        """Return the settings that the data set depends on. All parts share them."""
        return {name: getattr(self, name) for name in ("tars", *self.choices)}

    def check(self) -> None:
        """Raise DataError with the flag of an invalid setting."""
        suffix, colon, name = self.label.partition(":")
        if not suffix or (colon and (suffix != "json" or not name)):
            raise DataError(f"--label {self.label}: auto, none, a suffix such as cls, or json:FIELD is allowed")
        if suffix == "json" and not colon:
            raise DataError("--label json: the field is missing; give --label json:FIELD, such as json:label")
        if self.image not in (AUTO, *IMAGE_MEMBERS):
            raise DataError(f"--image {self.image}: {AUTO}, {', '.join(IMAGE_MEMBERS)} are allowed")
        if self.class_names and self.label == NONE:
            raise DataError(f"--class_names {self.class_names}: --label none reads no classes; remove one of the flags")
        check_settings(self, DataError)
        self.own_part()

    def refuse_changes(self, reason: str) -> None:
        """Raise RefusedError with the flag of a changed setting of external tars."""
        for name in self.choices:
            if (value := getattr(self, name)) != getattr(IndexConfig, name):
                raise RefusedError(f"--{name} {value}: applies to external tars; {reason}")
