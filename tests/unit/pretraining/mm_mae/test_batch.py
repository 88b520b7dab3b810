"""Batches of images with depth and segmentation: fields, alignment of modalities, mixtures, and visible patches."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.settings import of_upstream
from tests.synthetic_modalities import depth_of
from tests.unit.data.images.multimodal import (
    DESCRIBED,
    first_window,
    multimodal_config,
    sample,
    samples,
    write_beside,
    write_multimodal,
)
from tests.unit.data.images.source_images import png
from tests.unit.data.images.stored import config_for, jpeg
from tests.unit.data.loaded import assert_same, steps
from trp_scale.config import Config
from trp_scale.config.images import CropsConfig
from trp_scale.data.hashing import mix
from trp_scale.data.images.crops import Cropper, Crops
from trp_scale.data.images.dataset import open_image_dataset
from trp_scale.data.mixture import parse_paths
from trp_scale.errors import DataError
from trp_scale.pretraining.base import find_upstream, open_sources
from trp_scale.pretraining.mm_mae.batch import ModalityMasks, RunModalities, draw_shares, share_out
from trp_scale.pretraining.modalities.depth import standardise


@pytest.fixture(scope="module")
def shards() -> list[list[dict[str, str | bytes]]]:
    every = samples(21)
    return [every[:9], every[9:]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, shards: list[list[dict[str, str | bytes]]]) -> Path:
    return write_multimodal(tmp_path_factory.mktemp("multimodal") / "data", shards)


@pytest.fixture(scope="module")
def reference(data: Path) -> list[dict[str, torch.Tensor]]:
    """Four steps in micro-batches of 3: two epochs and six rows."""
    return steps(multimodal_config(data), 1, 4)


def test_shapes_types_and_counts(data: Path) -> None:
    sources = open_sources(multimodal_config(data), rank=0, world=1)
    assert sources.limit == 38 and sources.meta.maps["semseg"].classes == ("ground", "box", "sky")
    for batch in sources.train.next_window():
        found = {name: (value.dtype, tuple(value.shape)) for name, value in batch.fields.items()}
        assert found == {
            "images": (torch.uint8, (3, 3, 32, 32)),
            "depth": (torch.uint16, (3, 32, 32)),
            "depth_statistics": (torch.float32, (3, 3)),
            "semseg": (torch.uint8, (3, 8, 8)),
            "visible": (torch.int64, (3, 10)),
            "depth_counts": (torch.int32, (3, 16)),
            "semseg_counts": (torch.int32, (3, 16)),
            "labels": (torch.int64, (3,)),
            "row_weights": (torch.float32, (3,)),
        }
        assert all(value.is_contiguous() for value in batch.fields.values())
        assert batch.corrupt == [] and (batch["row_weights"] == 1).all()
        assert set(batch["semseg"].unique().tolist()) <= {0, 1, 2, 255}
        for row in range(3):
            for patch in range(16):
                top, left = patch // 4 * 8, patch % 4 * 8
                measured = batch["depth"][row, top : top + 8, left : left + 8] != 0
                labelled = batch["semseg"][row, top // 4 : top // 4 + 2, left // 4 : left // 4 + 2] != 255
                assert batch["depth_counts"][row, patch] == measured.sum()
                assert batch["semseg_counts"][row, patch] == labelled.sum()


@pytest.mark.parametrize(
    ("inputs", "outputs", "fields"),
    [
        (["rgb"], ["depth"], {"depth", "depth_statistics", "depth_counts"}),
        (["semseg", "rgb"], ["rgb", "raw_rgb"], {"semseg", "semseg_counts"}),
        (["rgb"], ["raw_rgb"], set()),
    ],
)
def test_only_used_modalities_are_read(data: Path, inputs: list[str], outputs: list[str], fields: set[str]) -> None:
    config = multimodal_config(data, modalities={"inputs": inputs, "outputs": outputs})
    sources = open_sources(config, rank=0, world=1)
    batch = sources.train.next_window()[0]
    assert set(batch.fields) == {"images", "visible", "labels", "row_weights"} | fields
    assert int(batch["visible"].max()) < 16 * len(inputs)
    assert sources.limit == 16 * len(inputs) - 10
    opened = open_image_dataset(data, used=RunModalities(config).stored)
    assert opened.samples.suffixes == ("jpg", *(f"{name}.png" for name in ("depth", "semseg") if name in fields))


@pytest.mark.parametrize(("world", "workers", "micro_size"), [(1, 0, 12), (2, 0, 2), (1, 1, 3)])
def test_ranks_workers_and_batch_sizes_change_nothing(
    data: Path, reference: list[dict[str, torch.Tensor]], world: int, workers: int, micro_size: int
) -> None:
    config = multimodal_config(data, data={"workers": workers}, batch={"micro_size": micro_size})
    assert_same(steps(config, world, 4), reference)


def test_external_maps_give_the_same_batches(
    tmp_path: Path, shards: list[list[dict[str, str | bytes]]], reference: list[dict[str, torch.Tensor]]
) -> None:
    beside = multimodal_config(write_beside(tmp_path / "data", shards), data={"verify": True})
    assert_same(steps(beside, 1, 4), reference)


def test_images_and_labels_are_those_of_plain_masked_autoencoding(data: Path) -> None:
    """Both kinds of batches have the same crops."""
    (plain,) = steps(config_for(data, crops={"count": 1}), 1, 1)
    (ours,) = steps(multimodal_config(data), 1, 1)
    assert torch.equal(ours["images"], plain["images"][:, 0]) and torch.equal(ours["labels"], plain["labels"])


def board(height: int, width: int, cell: int) -> np.ndarray:
    """Return a checkerboard [height, width] with one corner that breaks its symmetry."""
    squares = (np.arange(height)[:, None] // cell + np.arange(width) // cell) % 2 == 0
    squares[: height // 3, : width // 3] = True
    return squares


@pytest.mark.parametrize(("flip", "scaled"), [(0.0, False), (1.0, False), (0.0, True), (1.0, True)])
def test_crops_of_three_modalities_stay_aligned(tmp_path: Path, flip: float, scaled: bool) -> None:
    """Where a resized colour is clearly black or white, depth and class are those of that colour.

    Colours in between occur only within half a pixel of an edge, so this detects maps that are shifted by a pixel,
    mirrored, or from another crop. Scaled: all but the first image are decoded at a half to an eighth of their size,
    and one pixel in a thousand may be on the other side of an edge, as in large images that are decoded whole.
    """
    painted = []
    sizes = [(150, 200), (96, 64), (64, 64), (131, 77), (333, 250), (127, 255)]
    if scaled:
        sizes = [(150, 100), (600, 520), (777, 1023), (1301, 1200), (1234, 999), (1500, 1600)]
    for number, (height, width) in enumerate(sizes):
        squares = board(height, width, cell=13 if not scaled else max(13, height // 9))
        colour = Image.fromarray(np.where(squares, 255, 0).astype(np.uint8)).convert("RGB")
        depth, semseg = np.where(squares, 4000, 1000).astype(np.uint16), squares.astype(np.uint8)
        stored = {"jpg": jpeg(colour), "depth.png": png(depth), "semseg.png": png(semseg)}
        painted.append(sample(number, 1, 1, **stored))
    config = multimodal_config(write_multimodal(tmp_path / "data", [painted]), crops={"flip": flip, "size": 64})
    config.crops.scaled_decoding = scaled  # type: ignore[attr-defined]
    config.batch.global_size = config.batch.micro_size = 6
    clear = 0
    for step in steps(config, 1, 10):
        brightness = step["images"].float().mean(dim=1)  # [6, 64, 64]
        sure = (brightness - 127.5).abs() > 60
        lit = standardise(step["depth"], step["depth_statistics"]) > 0
        wrong = (lit != (brightness > 127.5)) & sure
        assert int(wrong.sum()) <= (0.001 * int(sure.sum()) if scaled else 0)
        clear += int(sure.sum())
        middle = brightness_at_labels(brightness)  # [6, 16, 16]
        sure = (middle - 127.5).abs() > 100
        assert torch.equal((step["semseg"] == 1)[sure], (middle > 127.5)[sure])
        assert float(sure.float().mean()) > 0.3
        assert set(step["semseg"].unique().tolist()) == {0, 1}
    assert clear / (10 * 6 * 64 * 64) > 0.8


def brightness_at_labels(brightness: torch.Tensor) -> torch.Tensor:
    """Mean of the 2 x 2 pixels around the centre of each label, [R, S / 4, S / 4] of [R, S, S]."""
    rows, size, _ = brightness.shape
    return brightness.view(rows, size // 4, 4, size // 4, 4)[:, :, 1:3, :, 1:3].mean(dim=(2, 4))


def whole(height: int, width: int, flip: bool = False) -> Crops:
    return Crops(
        boxes=np.array([[[0, 0, height, width]]]), windows=None, flips=np.array([[flip]]), scales=np.array([1])
    )


def test_nearest_pixel_contains_the_sample_point() -> None:
    """Exact, while floating point (torch's nearest-exact) selects a neighbour at some sizes."""
    cropper = Cropper(CropsConfig())
    differing = 0
    for length in [*range(1, 60), 97, 127, 224, 255, 333, 375, 427, 500, 640, 1023]:
        line = np.arange(length, dtype=np.uint16)
        for size in (7, 14, 56, 112, 224):
            picked = cropper.pick(line[:, None], whole(length, 1), 0, size)[:, 0].astype(np.int64)
            twice = (2 * np.arange(size) + 1) * length  # 2 size times the centre's place
            assert (2 * size * picked <= twice).all() and (twice < 2 * size * (picked + 1)).all()
            theirs = torch.nn.functional.interpolate(
                torch.from_numpy(line.astype(np.float32))[None, None], size, mode="nearest-exact"
            )
            differing += int((theirs.numpy()[0, 0] != picked).sum())
    assert differing < 100  # they agree but for floating point


def test_members_of_a_mixture_have_their_own_scale_and_the_same_segmentation_classes(tmp_path: Path) -> None:
    """A floor that is flat up to 3 mm, in units of 1 and 0.1 mm: the variance floor of 1 mm^2 affects both equally."""
    heights = 1000 + np.random.default_rng(0).integers(0, 4, (40, 40))
    described = {"semseg": {"classes": ["a", "b", "c"]}}
    for number, per_millimetre in enumerate((1, 10)):
        floor = png((heights * per_millimetre).astype(np.uint16))
        stored = [sample(number, 40, 40, **{"depth.png": floor, "cls": str(number).encode()})]
        scale = {"depth": {"scale": 0.001 / per_millimetre}}
        write_multimodal(tmp_path / f"data{number}", [stored], modalities={**described, **scale})
    config = multimodal_config(f"zero:1={tmp_path / 'data0'},one:1={tmp_path / 'data1'}", crops={"min_scale": 1.0})
    deviations: dict[int, list[float]] = {0: [], 1: []}
    for batch in first_window(config):
        for label, depth in zip(batch["labels"].tolist(), depth_of(batch), strict=True):
            deviations[label].append(float(depth.std()))
    # without the floor it would be 1.12 / 0.84, and with the other member's scale for one of them as well
    assert all(abs(value - 0.83) < 0.1 for values in deviations.values() for value in values), deviations
    other = write_multimodal(tmp_path / "other", [samples(2)], modalities={"semseg": {"classes": ["a", "c", "b"]}})
    config.data.path = f"zero:1={tmp_path / 'data0'},other:1={other}"
    with pytest.raises(DataError, match=r"the same classes in segmentation maps: zero has 3 \(a, b, c\), other has 3"):
        open_sources(config, rank=0, world=1)


def test_members_of_a_mixture_have_depth_of_one_direction(tmp_path: Path) -> None:
    """In DPT's inverse depth larger is nearer; without a description larger is farther."""
    for name, said in (("silent", {}), ("metres", {"larger_is": "farther"}), ("labelled", {"larger_is": "nearer"})):
        described = {**DESCRIBED, "depth": {"scale": None, **said}}
        write_multimodal(tmp_path / name, [samples(2)], modalities=described)

    def mixture(*names: str) -> Config:
        config = multimodal_config(",".join(f"{name}:1={tmp_path / name}" for name in names))
        config.batch.global_size = config.batch.micro_size = 2
        return config

    open_sources(mixture("silent", "metres"), rank=0, world=1)
    message = r"larger is farther in silent, nearer in labelled\. Label .* --depth\.larger_is .* one data set at a time"
    with pytest.raises(DataError, match=message):
        open_sources(mixture("silent", "metres", "labelled"), rank=0, world=1)
    with pytest.raises(DataError, match="larger is nearer in labelled, farther in metres"):
        open_sources(mixture("labelled", "metres"), rank=0, world=1)
    without = mixture("labelled", "metres")
    without.modalities.inputs, without.modalities.outputs = ["rgb"], ["semseg"]
    open_sources(without, rank=0, world=1)


@pytest.mark.parametrize("kind", ["mae", "mm_mae"])
def test_workers_import_the_builder_beforehand(data: Path, kind: str) -> None:
    config = of_upstream(multimodal_config(data), kind)
    open_rows = find_upstream(config).open_rows
    assert open_rows.__module__ == type(open_rows(config, parse_paths(config.data.path)).builder).__module__


WORDS = mix(np.arange(10_000, dtype=np.uint64))


def masks(visible: int = 98, concentration: float = 1.0, modalities: int = 3, patches: int = 196) -> ModalityMasks:
    return ModalityMasks(modalities=modalities, patches=patches, visible=visible, concentration=concentration)


def test_ten_thousand_draws_have_98_tokens_with_dirichlet_shares() -> None:
    visible = masks().draw(WORDS)  # [10000, 98]
    assert visible.shape == (10_000, 98) and visible.dtype == np.int64
    assert (np.diff(visible, axis=1) > 0).all() and visible.min() >= 0 and visible.max() < 588
    counts = np.stack([(visible // 196 == modality).sum(axis=1) for modality in range(3)], axis=1)
    assert (counts.sum(axis=1) == 98).all() and counts.min() == 0 and counts.max() == 98
    shares = counts / 98
    deviation = np.sqrt(1 / 18 / 10_000)  # of a mean: Dirichlet(1, 1, 1) has variance 1/18 and covariance -1/36
    assert np.abs(shares.mean(axis=0) - 1 / 3).max() < 5 * deviation
    covariance = np.cov(shares.T)
    expected = np.full((3, 3), -1 / 36) + np.eye(3) / 12
    np.testing.assert_allclose(covariance, expected, rtol=0.07)
    levels = np.array([0.1, 0.25, 0.5, 0.75, 0.9])  # each share is Beta(1, 2): quantile 1 - sqrt(1 - level)
    found = np.quantile(draw_shares(WORDS[:, None] ^ np.arange(3, dtype=np.uint64), 1.0), levels, axis=0)
    np.testing.assert_allclose(found, np.tile(1 - np.sqrt(1 - levels), (3, 1)).T, atol=0.02)


def test_every_patch_of_every_modality_is_visible_equally_often() -> None:
    visible = masks().draw(WORDS)
    shares = np.bincount(visible.ravel(), minlength=588) / 10_000
    assert np.abs(shares - 1 / 6).max() < 5 * np.sqrt(1 / 6 * 5 / 6 / 10_000)


def test_modalities_and_rows_are_independent() -> None:
    """Two modalities with c and d patches share c d / 196 positions on average, and so do two rows."""
    visible = masks().draw(WORDS)
    flags = np.zeros((10_000, 588), dtype=np.int64)
    np.put_along_axis(flags, visible, 1, axis=1)
    first, second, _ = np.moveaxis(flags.reshape(10_000, 3, 196), 1, 0)  # [10000, 196]
    for one, other in ((first, second), (first[:-1], first[1:])):
        expected = (one.sum(axis=1) * other.sum(axis=1)).sum() / 196
        assert abs((one * other).sum() / expected - 1) < 0.03


def exact_quotas(shares: list[Fraction], total: int, most: int) -> list[Fraction]:
    """Return the quotas by definition: the excess of a full modality goes to the others in proportion."""
    full: set[int] = set()
    while True:
        rest = [number for number in range(len(shares)) if number not in full]
        left = total - most * len(full)
        quotas = {n: shares[n] * left / sum(shares[m] for m in rest) for n in rest}
        over = {number for number, quota in quotas.items() if quota > most}
        if not over:
            return [quotas.get(number, Fraction(most)) for number in range(len(shares))]
        full |= over


@pytest.mark.parametrize("total", [1, 98, 300, 587, 588])
def test_counts_are_the_quotas_rounded(total: int) -> None:
    shares = np.random.default_rng(total).dirichlet([0.5, 0.5, 0.5], 300)
    counts = share_out(shares, total, 196)
    assert (counts.sum(axis=1) == total).all()
    for row, found in zip(shares, counts.tolist(), strict=True):
        quotas = exact_quotas([Fraction(share) for share in row.tolist()], total, 196)
        fractions = [quota - quota.__floor__() for quota in quotas]
        assert all(abs(count - quota) < 1 for count, quota in zip(found, quotas, strict=True))
        raised = [f for f, quota, count in zip(fractions, quotas, found, strict=True) if count > quota]
        kept = [f for f, quota, count in zip(fractions, quotas, found, strict=True) if count <= quota]
        assert not raised or not kept or min(raised) >= max(kept) - Fraction(1, 10**9)  # the largest remainders


@pytest.mark.parametrize("concentration", [0.3, 1.0, 2.0, 25.0])
def test_other_concentrations_have_their_variance(concentration: float) -> None:
    if concentration != 1.0:
        pytest.importorskip("scipy", reason="the extra `evaluation` (scipy) is not installed")
    shares = draw_shares(WORDS[:, None] ^ np.arange(3, dtype=np.uint64), concentration)
    np.testing.assert_allclose(shares.sum(axis=1), 1.0, rtol=1e-12)
    variance = (2 / 9) / (3 * concentration + 1)
    assert np.abs(shares.mean(axis=0) - 1 / 3).max() < 5 * np.sqrt(variance / 10_000)
    np.testing.assert_allclose(shares.var(axis=0), variance, rtol=0.06)


def test_a_concentration_near_zero_gives_one_modality_everything() -> None:
    pytest.importorskip("scipy", reason="the extra `evaluation` (scipy) is not installed")
    shares = draw_shares(WORDS[:, None] ^ np.arange(3, dtype=np.uint64), 1e-4)
    assert np.isfinite(shares).all() and (shares > 0).all()
    assert (shares.max(axis=1) > 0.999).mean() > 0.99
    assert (np.abs(np.bincount(shares.argmax(axis=1)) / 10_000 - 1 / 3) < 0.025).all()
