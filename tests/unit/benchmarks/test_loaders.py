"""benchmarks/loader.py and image_loader.py: what they make, the package reads, and each stage of it is seen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import image_loader, loader
from benchmarks.stages import breakdown


def test_noise_as_images_is_read(tmp_path: Path) -> None:
    options = image_loader.Options(images=4, micro_size=2)
    noise = image_loader.make_dataset(tmp_path / "noise", 4)
    train = image_loader.open_train(options, noise, image_loader.mae(1, 32))
    assert [micro.rows for micro in train.next_window()] == [2, 2]
    shares = breakdown(train, image_loader.STAGES, "the rest")
    assert sum(shares.values()) == pytest.approx(1) and all(share > 0 for share in shares.values())


def test_crops_of_scaled_images_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_loader, "METHODS", {"half": (1, 32), "whole": (1, 64)})
    noise = image_loader.make_dataset(tmp_path / "noise", 4, short_side=100)
    options = image_loader.Options(images=4, micro_size=2)
    said = image_loader.scaled_pixels(options, noise, "half")
    share, decibels = re.fullmatch(r"decoded at a part of its size: (\d+)% of the images, ([\d.]+) dB", said).groups()  # type: ignore[union-attr]
    assert int(share) > 0 and 20 < float(decibels) < 60
    assert image_loader.scaled_pixels(options, noise, "whole") == "decoded at a part of its size: 0% of the images"


def test_noise_with_maps_is_read(tmp_path: Path) -> None:
    options = image_loader.Options(images=2, micro_size=2)
    noise = image_loader.make_dataset(tmp_path / "noise", 2, maps=True)
    (batch,) = image_loader.candidates(options, noise, image_loader.WITH_MAPS)["ours"]()  # type: ignore[misc]
    assert (batch["depth_counts"] == 16**2).all() and (batch["semseg"] < image_loader.CLASSES).all()


def test_noise_as_text_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "BLOCKS", 2)
    monkeypatch.setattr(loader, "BLOCK_ROWS", 64)
    train = loader.open_train(loader.Options(rows=32), loader.make_dataset(tmp_path / "random", 32), 16)
    assert [micro.rows for micro in train.next_window()] == [16, 16]
    shares = breakdown(train, loader.STAGES, "the rest")
    assert sum(shares.values()) == pytest.approx(1) and all(share > 0 for share in shares.values())
