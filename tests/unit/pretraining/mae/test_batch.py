"""Batches of images: fields, order, resume, masks, and images that cannot be decoded; filtered noise, its spectrum
against that of its filter, and the masks it gives."""

from __future__ import annotations

import io
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.grids import always, grid
from tests.unit.data.images.stored import (
    config_for,
    jpeg,
    photograph,
    sample,
    sample_of_key,
    small_images,
    write_images,
)
from tests.unit.data.loaded import assert_same, joined, steps
from trp_scale.config import Config
from trp_scale.config.images import PatchSplit
from trp_scale.data.hashing import Integers, Words, mix
from trp_scale.data.images.crops import crop_words
from trp_scale.data.index import read_index, read_json, write_json
from trp_scale.data.plan import Addresses, row_states
from trp_scale.errors import DataError
from trp_scale.methods.learned_masks.settings import ColorSettings
from trp_scale.pretraining.base import open_sources
from trp_scale.pretraining.mae.batch import color_noise, draw_masks, gaussian, order_by_noise
from trp_scale.sharding.verify import verify_dataset


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_images(tmp_path_factory.mktemp("images") / "data")


@pytest.fixture(scope="module")
def reference(images: Path) -> list[dict[str, torch.Tensor]]:
    """Six steps on one rank, in this process, in micro-batches of 3: two epochs and four rows."""
    return steps(config_for(images), 1, 6)


def test_shapes_and_types(images: Path) -> None:
    sources = open_sources(config_for(images), rank=0, world=1)
    window = sources.train.next_window()
    assert len(window) == 4 and sources.limit == 12 and sources.meta.rows == 34
    for number, batch in enumerate(window):
        assert batch.start == 3 * number and batch.rows == 3 and batch.corrupt == []
        found = {name: (value.dtype, tuple(value.shape)) for name, value in batch.fields.items()}
        assert found == {
            "images": (torch.uint8, (3, 2, 3, 32, 32)),
            "visible": (torch.int64, (3, 2, 4)),
            "masked": (torch.int64, (3, 2, 12)),
            "labels": (torch.int64, (3,)),
            "row_weights": (torch.float32, (3,)),
        }
        assert all(value.is_contiguous() for value in batch.fields.values())


@pytest.mark.parametrize(
    ("world", "workers"), always(product([1, 2, 3, 4], [0, 1, 2]), (1, 0), (2, 1), (3, 0), (4, 0), (1, 2))
)
def test_ranks_and_workers_change_nothing(
    images: Path, reference: list[dict[str, torch.Tensor]], workers: int, world: int
) -> None:
    config = config_for(images, data={"workers": workers, "prefetch": 2}, batch={"micro_size": 3 if world == 4 else 2})
    assert_same(steps(config, world, 6), reference)


@pytest.mark.parametrize("workers", always([0, 1], 0))
def test_resume_equals_the_uninterrupted_run(
    images: Path, reference: list[dict[str, torch.Tensor]], workers: int
) -> None:
    config = config_for(images, data={"workers": workers})
    assert_same(steps(config, 1, 4, cursor=24), reference[2:])
    assert_same(steps(config, 2, 4, cursor=24), reference[2:])


def test_every_image_once_an_epoch_with_its_label(images: Path, reference: list[dict[str, torch.Tensor]]) -> None:
    keys = torch.cat([step["keys"] for step in reference]).tolist()
    labels = torch.cat([step["labels"] for step in reference]).tolist()
    numbers = sample_of_key(images)
    assert sorted(keys[:34]) == sorted(keys[34:68]) == sorted(numbers)
    assert keys[:34] != keys[34:68]
    assert labels == [numbers[key] % 3 for key in keys]


def by_key(config: Config, epochs: int) -> list[dict[int, list[torch.Tensor]]]:
    """Per epoch: row key -> its images and masks."""
    config.batch.global_size = config.batch.micro_size = 34
    return [
        {
            key: [step[name][row] for name in ("images", "visible", "masked")]
            for row, key in enumerate(step["keys"].tolist())
        }
        for step in steps(config, 1, epochs)
    ]


def count_differences(one: dict[int, list[torch.Tensor]], other: dict[int, list[torch.Tensor]], name: int) -> int:
    assert one.keys() == other.keys()
    return sum(not torch.equal(values[name], other[key][name]) for key, values in one.items())


def test_draws_repeat_after_as_many_epochs_as_there_are_maskings(images: Path) -> None:
    first, second, third = by_key(config_for(images, masking={"maskings": 2}), 3)
    other = by_key(config_for(images, training={"seed": 1}), 1)[0]
    fresh = by_key(config_for(images), 3)
    for name in range(3):
        assert count_differences(first, third, name) == 0
        assert count_differences(first, fresh[0], name) == 0  # epoch 0 is masking 0
        for one, two in ((first, second), (fresh[0], fresh[2]), (first, other)):
            assert count_differences(one, two, name) >= 28  # five images have one pixel: all their crops are alike


def test_the_crops_of_an_image_differ_and_do_not_depend_on_their_number(images: Path) -> None:
    two, three = (by_key(config_for(images, crops={"count": count}), 1)[0] for count in (2, 3))
    for key, values in two.items():
        for name, value in enumerate(values):
            assert torch.equal(value, three[key][name][:2])
    assert sum(not torch.equal(values[0][0], values[0][1]) for values in two.values()) >= 28
    assert sum(not torch.equal(values[1][0], values[1][1]) for values in two.values()) >= 30


@pytest.mark.parametrize(("world", "workers"), grid([1, 2], [0, 1]))
def test_validation_covers_the_held_out_images_once_as_epoch_zero(images: Path, world: int, workers: int) -> None:
    config = config_for(images, data={"validation_fraction": 0.3, "workers": workers})
    config.batch.micro_size, config.batch.global_size = 3, 12
    ranks = [open_sources(config, rank=rank, world=world) for rank in range(world)]
    first, second = (joined([list(sources.validation.windows()) for sources in ranks]) for _ in range(2))
    assert_same([first], [second])
    there = first["row_weights"] == 1
    rows = ranks[0].validation.rows
    for sources in ranks:
        sources.close()
    held_out = first["keys"][there].tolist()
    assert len(held_out) == len(set(held_out)) == rows and 0 < rows < 34
    assert (first["keys"][~there] == -1).all() and (first["images"][~there] == 128).all()
    assert (first["labels"][~there] == -1).all()
    everything = by_key(config_for(images), 1)[0]  # nothing held out: what training draws in epoch 0
    for row in there.nonzero().ravel().tolist():
        drawn = everything[int(first["keys"][row])]
        for place, name in enumerate(("images", "visible", "masked")):
            assert torch.equal(first[name][row], drawn[place]), name


def bad_jpegs() -> dict[str, bytes]:
    """Return contents that cannot be decoded."""
    whole = jpeg(photograph(40, 50))
    picture = io.BytesIO()
    photograph(40, 50).save(picture, "GIF")
    return {"empty": b"", "cut short": whole[: len(whole) // 2], "not a JPEG": picture.getvalue(), "noise": bytes(999)}


@pytest.mark.parametrize("world", [1, 2])
def test_images_that_cannot_be_decoded_are_grey_and_named(tmp_path: Path, world: int) -> None:
    bad = list(bad_jpegs().values())
    whole = [sample(number, 40, 50) for number in range(12)]
    samples = [{**one, "jpg": bad[number // 3]} if number % 3 == 1 else one for number, one in enumerate(whole)]
    expected = steps(config_for(write_images(tmp_path / "whole", [whole])), world, 2)
    data = write_images(tmp_path / "data", [samples])
    found = steps(config_for(data), world, 2)
    numbers = sample_of_key(data)
    for one, other in zip(found, expected, strict=True):
        there = one["row_weights"] == 1
        assert [bool(here) for here in there] == [numbers[key] % 3 != 1 for key in one["keys"].tolist()]
        assert (one["images"][~there] == 128).all() and (one["labels"][~there] == -1).all()
        for name in ("keys", "visible", "masked"):
            assert torch.equal(one[name], other[name])  # masks are those of the row, decoded or not
        for name in ("images", "labels"):
            assert torch.equal(one[name][there], other[name][there])
    window = open_sources(config_for(data), rank=0, world=1).train.next_window()
    names = {name for batch in window for name in batch.corrupt}
    assert names == {f"image-000000/n{number:05d}" for number in (1, 4, 7, 10)}


def test_rows_of_a_missing_tar_are_grey(tmp_path: Path) -> None:
    data = write_images(tmp_path / "data", [[sample(0, 9, 9)], [sample(1, 9, 9)]])
    sources = open_sources(config_for(data), rank=0, world=1)
    (data / "shards" / "image-000001.tar").unlink()
    window = sources.train.next_window()
    assert {name for batch in window for name in batch.corrupt} == {"image-000001/n00001"}
    assert sum(float(batch["row_weights"].sum()) for batch in window) == 6


@pytest.mark.parametrize("label", [None, 3, -1, "cat", 1.0, True])
def test_invalid_classes_are_refused(tmp_path: Path, label: object) -> None:
    """The index stores the classes. A number without a class name would fail in the loss on the GPU."""
    data = write_images(tmp_path / "data", [[sample(0, 9, 9), sample(1, 9, 9)]])
    path = data / "shards" / "image-000000.index.json"
    index = read_json(path)
    index["blocks"][1]["label"] = label
    write_json(path, index)
    with pytest.raises(DataError, match=rf"n00001.*class {label!r}"):
        open_sources(config_for(data), rank=0, world=1)
    with pytest.raises(DataError, match="n00001"):
        verify_dataset(data)


def test_classes_are_those_of_the_index(tmp_path: Path) -> None:
    """.cls members are for other readers of the tars; `verify` compares them with the index."""
    data = write_images(tmp_path / "data", [[sample(0, 9, 9), sample(1, 9, 9)]])
    shard = data / "shards" / "image-000000.tar"
    member = read_index(shard).blocks[1].members["cls"]
    content = bytearray(shard.read_bytes())
    content[member.offset] = ord("2")
    shard.write_bytes(content)
    for verify in (False, True):
        window = open_sources(config_for(data, data={"verify": verify}), rank=0, world=1).train.next_window()
        assert {int(value) for batch in window for value in batch["labels"]} == {0, 1}
        assert not any(batch.corrupt for batch in window)
    with pytest.raises(DataError, match=r"n00001, member cls, .*checksum"):
        verify_dataset(data)


def test_labels_without_class_names(tmp_path: Path) -> None:
    samples = [sample(0, 9, 9, cls=b"12345"), sample(1, 9, 9, cls=b"7")]
    data = write_images(tmp_path / "data", [samples], changes={"classes": None})
    window = open_sources(config_for(data), rank=0, world=1).train.next_window()
    assert {int(value) for batch in window for value in batch["labels"]} == {12345, 7}


def test_checksums_are_checked_when_asked(tmp_path: Path) -> None:
    """An image with a changed byte still decodes; only the checksum detects it."""
    data = write_images(tmp_path / "data", [[sample(0, 90, 90)]])
    shard = data / "shards" / "image-000000.tar"
    content = bytearray(shard.read_bytes())
    middle = content.index(b"\xff\xda") + 200
    content[middle] ^= 0x01
    shard.write_bytes(content)
    for verify, expected in ((False, set()), (True, {"image-000000/n00000"})):
        window = open_sources(config_for(data, data={"verify": verify}), rank=0, world=1).train.next_window()
        assert {name for batch in window for name in batch.corrupt} == expected


STATES = mix(np.arange(12_000, dtype=np.uint64))


def shown(numbers: Integers, patches: int) -> np.ndarray:
    """[R, k, V] patch numbers as [R, k, N] flags."""
    flags = np.zeros((*numbers.shape[:2], patches), dtype=bool)
    np.put_along_axis(flags, numbers, True, axis=2)
    return flags


def test_visible_and_masked_are_ascending_and_complete() -> None:
    visible, masked = draw_masks(crop_words(STATES[:200], 3), PatchSplit(patches=49, visible=12))
    assert visible.shape == (200, 3, 12) and masked.shape == (200, 3, 37)
    assert visible.dtype == masked.dtype == np.int64
    assert (np.diff(visible, axis=2) > 0).all() and (np.diff(masked, axis=2) > 0).all()
    both = np.sort(np.concatenate([visible, masked], axis=2), axis=2)
    assert (both == np.arange(49)).all()


def test_every_set_is_equally_likely() -> None:
    """All 20 sets of 3 among 6: chi-square with 19 degrees of freedom stays below its 99.9 % quantile."""
    visible, _ = draw_masks(crop_words(STATES, 1), PatchSplit(patches=6, visible=3))
    counts = [int((visible[:, 0] == np.array(chosen)).all(axis=1).sum()) for chosen in combinations(range(6), 3)]
    assert sum(counts) == len(STATES)
    expected = len(STATES) / 20
    assert sum((count - expected) ** 2 / expected for count in counts) < 43.8


def states_in_epoch(epoch: int, maskings: int) -> Words:
    """The states of 12,000 rows with neighbouring keys."""
    keys = np.arange(12_000)
    nowhere = np.zeros_like(keys)
    addresses = Addresses(
        member=nowhere, block=nowhere, row=keys, epoch=nowhere + epoch, keys=keys, present=nowhere == 0
    )
    return row_states(addresses, seed=0, maskings=maskings)


def test_crops_rows_and_epochs_are_independent() -> None:
    """Overlap of two independent masks of V among N: hypergeometric, mean V^2 / N."""
    first, second, tenth = (
        shown(draw_masks(crop_words(states_in_epoch(epoch, 10), 2), PatchSplit(patches=49, visible=12))[0], 49)
        for epoch in (0, 1, 10)
    )
    assert (first == tenth).all()
    mean, variance = 144 / 49, 12 * (12 / 49) * (37 / 49) * (37 / 48)
    for one, other in ((first[:, 0], first[:, 1]), (first[:-1, 0], first[1:, 0]), (first[:, 0], second[:, 0])):
        overlaps = (one & other).sum(axis=1)
        assert abs(overlaps.mean() - mean) < 5 * np.sqrt(variance / len(overlaps))
        assert abs(overlaps.var() / variance - 1) < 0.08


NOISES = ("red", "blue", "green", "purple")
WORDS = mix(np.arange(400, dtype=np.uint64))
SIDE = 64


def squared_response(noise: str, sigma: float, fine: float) -> np.ndarray:
    """|H(f)|^2 of the filter on a grid of frequencies [SIDE, SIDE]: the transform of a Gaussian is one."""
    frequencies = np.fft.fftfreq(SIDE)
    squares = frequencies[:, None] ** 2 + frequencies[None] ** 2

    def blur(width: float) -> np.ndarray:
        return np.exp(-2 * (np.pi * width) ** 2 * squares)

    band = blur(fine) - blur(sigma)
    return {"red": blur(sigma), "blue": 1 - blur(sigma), "green": band, "purple": 1 - band}[noise] ** 2


@pytest.mark.parametrize("noise", NOISES)
def test_the_mean_power_in_each_band_is_that_of_the_filter(noise: str) -> None:
    """Gaussians wide enough to be their own discrete transform; a Hann window keeps the bands apart."""
    sigma, fine = 2.0, 1.0
    values = color_noise(ColorSettings(noise=noise, sigma=sigma, fine_sigma=fine), WORDS[:200], SIDE) / 2.0**60
    window = np.hanning(SIDE + 1)[:-1]
    window = np.outer(window, window)
    power = np.abs(np.fft.fft2((values - 0.5 * (noise in ("red", "purple"))) * window)) ** 2
    white = (window**2).sum() / 12  # uniform numbers in [0, 1)
    measured, expected = power.mean(0) / white, squared_response(noise, sigma, fine)
    frequencies = np.hypot(*np.meshgrid(np.fft.fftfreq(SIDE), np.fft.fftfreq(SIDE)))
    for low, high in ((0.03, 0.1), (0.1, 0.2), (0.2, 0.3), (0.3, 0.5)):
        band = (frequencies >= low) & (frequencies < high)
        assert measured[band].mean() == pytest.approx(expected[band].mean(), rel=0.1, abs=0.01), (low, high)


@pytest.mark.parametrize("sigma", [0.3, 1.0, 16.0])
def test_a_blur_keeps_the_mean_exactly_and_fits_64_bits(sigma: float) -> None:
    matrix = gaussian(14, sigma, 48)
    assert (matrix.sum(1) == 1 << 20).all() and (matrix >= 0).all()
    top = np.full((14 + 96, 14 + 96), (1 << 20) - 1)
    assert int((matrix @ top @ matrix.T).max()) == ((1 << 20) - 1) << 40


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("patches", [16, 196])
def test_the_masked_patches_are_those_with_the_largest_noise_and_exactly_as_many(noise: str, patches: int) -> None:
    settings, split = ColorSettings(noise=noise), PatchSplit(patches=patches, visible=patches // 4)
    words = crop_words(WORDS[:50], 2)
    visible, masked = draw_masks(words, split, settings)
    assert visible.shape == (50, 2, patches // 4) and masked.shape == (50, 2, patches - patches // 4)
    assert (np.sort(np.concatenate([visible, masked], axis=2), axis=2) == np.arange(patches)).all()
    order = order_by_noise(settings, words, patches)
    side = round(patches**0.5)
    ranked = np.take_along_axis(color_noise(settings, words, side).reshape(50, 2, patches), order, axis=2)
    assert (np.diff(ranked, axis=2) >= 0).all()
    plain, _ = draw_masks(words, split)
    assert (visible != plain).any() and (draw_masks(words, split, None)[0] == plain).all()


def test_red_masks_are_clustered_and_blue_ones_spread() -> None:
    """Share of neighbouring pairs in which both patches are masked or both visible; 5/8 of independent ones."""

    def alike(noise: str) -> float:
        _, masked = draw_masks(crop_words(WORDS, 1), PatchSplit(patches=196, visible=49), ColorSettings(noise=noise))
        grid = shown(masked, 196).reshape(-1, 14, 14)
        return float((grid[:, 1:] == grid[:, :-1]).mean())

    assert alike("red") > 0.75 > 0.6 > alike("blue")


def test_every_patch_is_masked_equally_often() -> None:
    _, masked = draw_masks(
        crop_words(mix(np.arange(4000, dtype=np.uint64)), 1), PatchSplit(patches=16, visible=4), ColorSettings()
    )
    shares = np.bincount(masked.ravel(), minlength=16) / 4000
    assert shares == pytest.approx(0.75, abs=5 * (0.75 * 0.25 / 4000) ** 0.5)


def test_the_loader_gives_the_same_masks_however_the_batch_is_split(images: Path) -> None:
    color = {"kind": "color", "noise": "green"}
    whole = steps(config_for(images, multilevel=color), 1, 3)
    apart = steps(config_for(images, multilevel=color, batch={"micro_size": 1}), 2, 3)
    assert_same(apart, whole)
    assert not torch.equal(whole[0]["masked"], steps(config_for(images), 1, 1)[0]["masked"])
