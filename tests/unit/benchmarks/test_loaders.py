"""benchmarks/loader.py and image_loader.py: what they make, the package reads, and each stage of it is seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import image_loader, loader
from benchmarks.loader import breakdown


def test_noise_as_images_is_read(tmp_path: Path) -> None:
    options = image_loader.Options(images=4, micro_size=2)
    noise = image_loader.make_dataset(tmp_path / "noise", 4)
    train = image_loader.open_train(options, noise, image_loader.mae(1, 32))
    assert [micro.rows for micro in train.next_window()] == [2, 2]
    shares = breakdown(train, image_loader.STAGES, "the rest")
    assert sum(shares.values()) == pytest.approx(1) and all(share > 0 for share in shares.values())


def test_noise_with_maps_is_read(tmp_path: Path) -> None:
    options = image_loader.Options(images=2, micro_size=2)
    noise = image_loader.make_dataset(tmp_path / "noise", 2, maps=True)
    (batch,) = image_loader.candidates(options, noise, image_loader.WITH_MAPS)["ours"]()  # type: ignore[misc]
    assert (batch["depth_counts"] == 16**2).all() and (batch["semseg"] < image_loader.CLASSES).all()


def test_the_stages_of_text_are_measured(text_dataset: Path) -> None:
    train = loader.open_train(loader.Options(data=text_dataset, rows=32), 16)
    assert [micro.rows for micro in train.next_window()] == [16, 16]
    shares = breakdown(train, loader.STAGES, "the rest")
    assert sum(shares.values()) == pytest.approx(1) and all(share > 0 for share in shares.values())
