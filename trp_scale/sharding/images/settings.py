"""Settings of `trp-scale shard-images` and `index`, and the part of them that the bytes of a data set depend on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from tyro.conf import Positional, UseAppendAction

from trp_scale.config.flags import TakesModalities, TakesModules
from trp_scale.config.registry import preparation_sections
from trp_scale.config.settings import check_settings, non_default_values, setting
from trp_scale.data.images.maps import map_formats
from trp_scale.errors import DataError, RefusedError
from trp_scale.sharding.job.parts import ShardingSettings, SpreadSettings


@dataclass(kw_only=True)
class ShardImagesConfig(ShardingSettings, TakesModalities):
    """Shard images for pre-training, with their classes and aligned maps where there are any, such as depth and
    segmentation."""

    part: ClassVar[Literal["files", "labels"]] = "files"

    inputs: list[str] = field(default_factory=list)
    """One of: a folder of images (sub-folders are classes, numbered by sorted name; a flat folder has none); tars with
    .jpg, .jpeg or .png and .cls members (files, globs, or a folder of them); a directory written by
    datasets.save_to_disk; torchvision:NAME=ROOT for a torchvision dataset that is there already (nothing is
    downloaded). The files of a folder of images are known by their names and sizes alone: if one was changed in place
    and kept its size, give another --output."""
    embedded: bool = False
    """Render synthetic scenes (solids on a textured ground) with class, exact depth, segmentation and surface normals:
    made for trying things out without downloads, not for figures about real images."""
    count: int = setting(4096, at_least=1, at_most=10**9)
    """Embedded: scenes to render."""
    size: int = setting(128, at_least=16, at_most=4096)
    """Embedded: pixels of each side."""
    seed: int = 0
    """Embedded: another seed gives other scenes."""
    coco: bool = False
    """Embedded: in place of shards, a COCO file with the box and the mask of each object, and a folder of images, for
    fine-tuning on detection."""
    modality: UseAppendAction[list[str]] = field(default_factory=list)
    """depth=FOLDER (16-bit grey PNG, or .npy; 8-bit PNG with --depth.relative), semseg=FOLDER (8-bit PNG of class
    numbers), normals=FOLDER (8- or 16-bit RGB PNG of (n + 1) / 2, x to the right, y up, z towards the camera; black:
    unknown) or one of --module, once for each: maps aligned with the upright images of an image folder, under the same
    relative paths. Tars bring theirs as members .NAME.png, such as .depth.png."""
    class_names: str = ""
    """Tars: text file with the name of each class, one a line, in the order of their numbers."""
    split: str = "train"
    """What the images are for: train, or another name. It chooses the split of a dataset directory or a torchvision
    dataset that has several, and is kept in dataset.json: no masks are learned (--multilevel.kind) from images whose
    split has a word that begins with test, val, dev or eval. Say --split test for every set that is kept for one."""
    image_column: str = "image"
    """Column of a dataset directory that holds the images."""
    label_column: str = "label"
    """Column of a dataset directory that holds the class numbers; empty = none."""
    short_side: int = setting(0, at_least=0, at_most=1 << 16)
    """Shrink images (and their maps) to this short side in pixels; smaller ones stay as they are.
    0 = keep all sizes."""
    quality: int = setting(0, at_least=0, at_most=100)
    """Encode every image anew as JPEG of this quality. 0 = keep the bytes of baseline RGB and grey JPEGs that need no
    change; what has to be encoded is encoded with quality 95 without chroma subsampling. Transparent pixels become
    white."""
    max_pixels: int = setting(100_000_000, at_least=1, at_most=1 << 40)
    """An image with more pixels is skipped before it is decoded."""
    samples_per_shard: int = setting(0, at_least=0, at_most=1 << 20)
    """Images per shard; 0 = a sixteenth of them, at most 2048, in whole blocks."""
    rows_per_block: int = setting(64, at_least=1, at_most=1 << 20)
    """Images that are read together: the unit of the order and of the held-out split."""

    def check(self) -> None:
        """Raise DataError for a setting that cannot work, naming its flag."""
        if bool(self.inputs) == self.embedded:
            raise DataError("give --inputs FILES or --embedded, one of the two")
        for name in () if self.embedded else ("count", "size", "seed"):
            if (value := getattr(self, name)) != getattr(ShardImagesConfig, name):
                advice = "; --short_side shrinks images" if name == "size" else ""
                raise DataError(f"--{name} {value} is for --embedded scenes, and --inputs are given{advice}")
        if self.coco and not self.embedded:
            raise DataError("--coco is for --embedded scenes: other images have no boxes")
        if self.coco and self.num_shards != 1:
            raise DataError(f"--num_shards {self.num_shards}: --coco writes one file and has no parts; 1 is allowed")
        check_settings(self, DataError)
        self.modality_folders()

    def modality_folders(self) -> dict[str, Path]:
        """Folder of each aligned modality, in the order of a sample's members."""
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
        """The settings that change the bytes of the output; where files lie and how the work is shared do not. What a
        file says of maps is in the input's fingerprint (MapFiles.content)."""
        names = ["embedded", "short_side", "quality", "max_pixels", "samples_per_shard", "rows_per_block"]
        names += ["count", "size", "seed"] if self.embedded else ["split", "image_column", "label_column"]
        names += ["split"] if self.embedded and self.split != "train" else []  # scenes made before there was one
        values = {name: getattr(self, name) for name in names} | {"modality": list(self.modality_folders())}
        maps = {name: value for name, value in self.of_maps().items() if not isinstance(value, Path)}
        return values if self.embedded else values | {"maps": maps}

    def of_maps(self) -> dict[str, object]:
        """{"modality.setting": value} of what is said of maps, beside defaults."""
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
    """Write the binary index of a data set from the JSON ones beside its tars: runs map it in place of reading those.
    Or make a data set of WebDataset tars that others made, without sharding them again: their headers and images are
    read once, and the tars stay where they are."""

    choices: ClassVar[tuple[str, ...]] = ("image", "label", "class_names", "split", "rows_per_block", "max_pixels")
    """Settings of external tars; with `tars`, those that the data set depends on."""

    tars: Positional[str]
    """Directory with dataset.json. Or tars of images: a folder of them, a pattern such as
    /data/train-{000000..000146}.tar or s3://bucket/train-{000000..000146}.tar, or a text file with a path or URL a
    line."""
    output: Path | None = None
    """Tars of others: directory of the data set; none = the folder of the tars."""
    label: str = AUTO
    """Tars of others: where an image's class is: cls or another suffix whose file holds the number, json:FIELD, or
    none. auto = cls if the first image has one."""
    image: str = AUTO
    """Tars of others: which member is the image, jpg, jpeg, png or webp; auto = the one that there is."""
    class_names: str = ""
    """Tars of others: text file with the name of each class, one a line, in the order of their numbers."""
    split: str = "train"
    """Tars of others: what the images are for, as --split of shard-images."""
    rows_per_block: int = setting(64, at_least=1, at_most=1 << 20)
    """Tars of others: images that are read together, the unit of the order and of the held-out split."""
    max_pixels: int = setting(100_000_000, at_least=1, at_most=1 << 40)
    """Tars of others: an image with more pixels is left out."""
    max_skipped: float = setting(0.01, at_least=0, at_most=1)
    """Tars of others: largest share of samples that may be left out, say because they have no image."""
    processes: int = setting(0, at_least=0, at_most=4096)
    """Tars of others: how many are read at once; 0 = one for each core, of this machine or of the Ray cluster."""

    @property
    def directory(self) -> Path:
        """Directory of the data set."""
        return Path(self.tars) if self.output is None else self.output

    def identity(self) -> dict[str, Any]:
        """Settings that the data set depends on; all parts share them."""
        return {name: getattr(self, name) for name in ("tars", *self.choices)}

    def check(self) -> None:
        """Raise DataError for a setting that cannot work, naming its flag."""
        suffix, colon, name = self.label.partition(":")
        if not suffix or (colon and (suffix != "json" or not name)):
            raise DataError(f"--label {self.label}: auto, none, a suffix such as cls, or json:FIELD is allowed")
        if suffix == "json" and not colon:
            raise DataError("--label json: of which field? Give --label json:FIELD, such as json:label")
        if self.image not in (AUTO, *IMAGE_MEMBERS):
            raise DataError(f"--image {self.image}: {AUTO}, {', '.join(IMAGE_MEMBERS)} are allowed")
        if self.class_names and self.label == NONE:
            raise DataError(f"--class_names {self.class_names}: goes with classes, not with --label none")
        check_settings(self, DataError)
        self.own_part()

    def refuse_changes(self, reason: str) -> None:
        """Raise RefusedError for a setting of external tars, naming its flag."""
        for name in self.choices:
            if (value := getattr(self, name)) != getattr(IndexConfig, name):
                raise RefusedError(f"--{name} {value}: is for tars that others made; {reason}")
