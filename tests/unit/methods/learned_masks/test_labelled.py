"""D_tr and D_val: which images are in them, their order, cursors, and what is refused."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch

from tests.grids import always
from tests.unit.data.images.stored import CLASSES, config_for, sample, sample_of_key, write_images
from tests.unit.data.loaded import joined
from trp_scale.config import Config, RefusedError
from trp_scale.core.batch import Batch
from trp_scale.data.images.dataset import open_image_dataset
from trp_scale.data.index import read_json, write_json
from trp_scale.data.sources import Sources, TrainSource
from trp_scale.methods.learned_masks.labelled import shared_workers
from trp_scale.pretraining.base import open_sources


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 images in 2 shards, blocks of 2, 3 classes."""
    samples = [sample(number, 16, 16) for number in range(60)]
    return write_images(tmp_path_factory.mktemp("images") / "data", [samples[:31], samples[31:]], rows_per_block=2)


def learned(path: Path, **sections: dict[str, object]) -> Config:
    multilevel = {"kind": "head", **sections.pop("multilevel", {})}
    return config_for(path, multilevel=multilevel, **sections)


def opened(config: Config, rank: int = 0, world: int = 1) -> Sources:
    return open_sources(config, rank=rank, world=world)


def keys_of_an_epoch(source: TrainSource) -> set[int]:
    windows = -(-source.rows // 12) + 1
    keys = torch.cat([batch.keys for _ in range(windows) for batch in source.next_window()])[: source.rows]
    assert len(set(keys.tolist())) == source.rows  # each once
    return set(keys.tolist())


@pytest.mark.parametrize("fraction", [0.0, 0.2])
@pytest.mark.parametrize("unlabelled", ["train", "all"])
def test_the_sources_part_the_images(images: Path, fraction: float, unlabelled: str) -> None:
    config = learned(images, data={"validation_fraction": fraction}, multilevel={"unlabelled": unlabelled})
    sources = opened(config)
    assert sources.downstream.classes == 3
    train, d_train, d_val = map(
        keys_of_an_epoch, (sources.train, sources.downstream.train, sources.downstream.validation)
    )
    held = {key for batch in sources.validation.windows() for key in batch.keys.tolist() if key >= 0}
    assert bool(held) == (fraction > 0)
    parts = (d_train, d_val, held)
    assert sum(map(len, parts)) == 60 and set().union(*parts) == sample_of_key(images).keys()  # disjoint, complete
    assert train == (d_train | d_val if unlabelled == "all" else d_train)
    expected = {"train": train, "downstream_train": d_train, "downstream_validation": d_val, "validation": held}
    assert sources.rows() == {name: len(keys) for name, keys in expected.items() if keys}
    other = opened(learned(images, data={"validation_fraction": fraction}, training={"seed": 5})).downstream
    assert keys_of_an_epoch(other.validation) == d_val  # the seed moves no image across


def test_without_learned_masks_nothing_changes(images: Path) -> None:
    """The training order is that of all blocks that are not held out, feedback without labels or D_u = all included."""
    found = []
    for config in (
        config_for(images),
        learned(images, multilevel={"kind": "reconstruction"}),
        learned(images, multilevel={"unlabelled": "all"}),
    ):
        sources = opened(config)
        assert (sources.downstream is None) == (not config.multilevel.reads_labels)
        found.append(joined([sources.train.next_window() for _ in range(7)]))
    for fields in found[1:]:
        assert all(torch.equal(value, fields[name]) for name, value in found[0].items())


def test_labels_and_images_are_those_of_the_keys(images: Path) -> None:
    sources, numbers = opened(learned(images)).downstream, sample_of_key(images)
    for source in (sources.train, sources.validation):
        for batch in source.next_window():
            assert batch["labels"].tolist() == [numbers[key] % 3 for key in batch.keys.tolist()]
            assert (batch["row_weights"] == 1).all() and batch["images"].shape[1:] == (2, 3, 32, 32)


@pytest.mark.parametrize("workers", always([0, 1], 0))
def test_every_world_sees_the_same_batches(images: Path, workers: int) -> None:
    sizes = {"batch_size": 8, "micro_size": 2}

    def windows(world: int) -> list[dict[str, torch.Tensor]]:
        found = []
        ranks = [opened(learned(images, multilevel=sizes, data={"workers": workers}), r, world) for r in range(world)]
        for name in ("train", "validation"):
            sources = [getattr(each.downstream, name) for each in ranks]
            found += [joined([source.next_window() for source in sources]) for _ in range(5)]
        for each in ranks:
            each.close()
        return found

    for one, two in zip(windows(1), windows(2), strict=True):
        assert len(one["keys"]) == 8 and all(torch.equal(value, two[name]) for name, value in one.items())


def test_resume_continues_every_source(images: Path) -> None:
    config = learned(images, multilevel={"batch_size": 6})

    def next_of_all(sources: Sources) -> dict[str, torch.Tensor]:
        each = (sources.train, sources.downstream.train, sources.downstream.validation)
        return joined([source.next_window() for source in each])

    before = opened(config)
    for _ in range(3):
        before.train.next_window()
    before.downstream.train.next_window()
    before.downstream.validation.peek(2)  # is not consumed
    cursors = before.cursors()
    assert cursors == {"train": 36, "downstream_train": 6, "downstream_validation": 0}
    after = opened(config)
    after.seek(cursors)
    expected, found = next_of_all(before), next_of_all(after)
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    with pytest.raises(RefusedError, match=r"downstream_train.*downstream_validation"):
        after.seek({"train": 36})
    with pytest.raises(RefusedError, match="this run's sources are train;"):
        opened(config_for(images)).seek(cursors)


def test_peeked_windows_are_the_next_ones(images: Path) -> None:
    source, plain = opened(config_for(images)).train, opened(config_for(images)).train
    seen = source.peek(3)
    assert source.cursor == 0 and [id(window) for window in source.peek(2)] == [id(window) for window in seen[:2]]
    for expected in seen:
        assert source.next_window() is expected
    assert source.cursor == 36 and source.peek(0) == []

    def same(ours: list[Batch], theirs: list[Batch]) -> None:
        assert [batch.keys.tolist() for batch in ours] == [batch.keys.tolist() for batch in theirs]

    for window in seen:
        same(window, plain.next_window())
    same(source.next_window(), plain.next_window())
    source.peek(2)
    source.seek(12)  # drops them
    same(source.next_window(), seen[1])
    source.peek(1)
    source.close()
    same(source.next_window(), seen[2])


def test_workers_of_all_sources_end(images: Path) -> None:
    before = set(multiprocessing.active_children())
    sources = opened(learned(images, data={"workers": 3}, multilevel={"unroll": 1, "every": 5}))
    assert "workers of a rank: 1 for D_u, 1 for D_tr, 1 for D_val" in " ".join(sources.notices)
    started = []
    try:
        for source in (sources.train, sources.downstream.train, sources.downstream.validation):
            present = set(multiprocessing.active_children())
            source.next_window()
            started.append(len(set(multiprocessing.active_children()) - present))
    finally:
        sources.close()
    assert started == [1, 1, 1]  # as many as their share of the steps needs
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.parametrize(
    ("workers", "settings", "expected"),
    [
        (0, {}, (0, 0, 0)),
        (1, {"unroll": 1, "every": 1}, (1, 1, 1)),
        (12, {"unroll": 1, "every": 1}, (4, 4, 4)),
        (12, {"unroll": 2, "every": 5}, (8, 3, 1)),
        (12, {"unroll": 1, "every": 1, "batch_size": 36}, (2, 5, 5)),
    ],
)
def test_sources_share_the_loader_s_workers(
    images: Path, workers: int, settings: dict[str, int], expected: tuple[int, int, int]
) -> None:
    assert shared_workers(learned(images, data={"workers": workers}, multilevel=settings)) == expected


def test_an_unreadable_image_counts_nothing(images: Path, tmp_path: Path) -> None:
    samples = [sample(number, 16, 16) for number in range(8)]
    samples[3]["jpg"] = b"no image"
    sources = opened(learned(write_images(tmp_path / "data", [samples], rows_per_block=1))).downstream
    batches = [
        batch for source in (sources.train, sources.validation) for _ in range(2) for batch in source.next_window()
    ]
    unreadable = [key for batch in batches for key in batch.keys[batch["row_weights"] == 0].tolist()]
    assert {sample_of_key(tmp_path / "data")[key] for key in unreadable} == {3}
    assert {name for batch in batches for name in batch.corrupt} == {"image-000000/n00003"}


def test_classes_come_from_the_labels_where_they_have_no_names(tmp_path: Path) -> None:
    plain = [sample(number, 8, 8, cls=str(number % 7).encode()) for number in range(30)]
    path = write_images(tmp_path / "plain", [plain], rows_per_block=1, changes={"classes": None})
    assert opened(learned(path)).downstream.classes == 7
    assert open_image_dataset(path).samples.labels.tolist() == [number % 7 for number in range(30)]


def changed(path: Path, **changes: object) -> Path:
    write_json(path / "dataset.json", {**read_json(path / "dataset.json"), **changes})
    return path


def test_what_cannot_be_learned_from_is_refused(images: Path, tmp_path: Path) -> None:
    bare = [{name: value for name, value in sample(number, 8, 8).items() if name != "cls"} for number in range(20)]
    unlabelled = write_images(tmp_path / "bare", [bare], changes={"suffixes": ["jpg"], "classes": None})
    with pytest.raises(RefusedError, match=r".*--multilevel\.kind"):
        opened(learned(unlabelled))
    assert opened(learned(unlabelled, multilevel={"kind": "reconstruction"})).downstream is None
    with pytest.raises(RefusedError, match="have none"):
        opened(learned(Path(f"a:0.5={images},b:0.5={unlabelled}")))
    alike = [sample(number, 8, 8, cls=b"0") for number in range(20)]
    path = write_images(tmp_path / "alike", [alike], rows_per_block=1, changes={"classes": ["ant"]})
    with pytest.raises(RefusedError, match=r"has 1 class, .* at least 2"):
        opened(learned(path))
    with pytest.raises(RefusedError, match="has 1 class"):
        opened(learned(changed(path, classes=None)))
    few = write_images(tmp_path / "few", [[sample(number, 8, 8) for number in range(9)]], rows_per_block=9)
    with pytest.raises(RefusedError, match=r"validation_share 0\.2 .* --rows_per_block"):
        opened(learned(few))
    with pytest.raises(RefusedError, match=r"6.*divide.*--multilevel\.batch_size.*--multilevel\.micro_size"):
        opened(learned(images, multilevel={"batch_size": 6, "micro_size": 4}))
    with pytest.raises(RefusedError, match="over 4 ranks x micro-batch 3"):
        opened(learned(images, multilevel={"batch_size": 6}), world=4)


def test_cautions(tmp_path: Path) -> None:
    samples = [sample(number, 8, 8, cls=str(number // 8).encode()) for number in range(32)]  # sorted by class
    names = [*CLASSES, "dog", "eel"]
    path = write_images(tmp_path / "sorted", [samples], rows_per_block=8, changes={"classes": names})
    config = learned(path, multilevel={"batch_size": 48})
    sources = opened(config)
    validation = sources.downstream.validation
    window = joined([validation.next_window()])  # goes round
    assert len(window["keys"]) == 48 and len(set(window["keys"].tolist())) == validation.rows < 48
    present = set(window["labels"].tolist())
    lacking = [name for number, name in enumerate(names) if number not in present]
    text = "\n".join(sources.notices)
    assert f"D_val (--multilevel.validation_share 0.2) has {validation.rows} images, fewer than the 48" in text
    assert (
        f"D_val (--multilevel.validation_share 0.2) has no image of {len(lacking)} of 5 classes ({lacking[0]}" in text
    )
    assert "eel" in text.split("D_tr (--multilevel.validation_share 0.2) has no image")[1]
    many = write_images(tmp_path / "many", [[sample(n, 8, 8) for n in range(200)]], rows_per_block=2)
    assert opened(learned(many)).notices == []


def test_members_of_a_mixture_are_split_each(images: Path, tmp_path: Path) -> None:
    other = write_images(tmp_path / "other", [[sample(n, 8, 8) for n in range(40)]], rows_per_block=2)
    sources, alone = (
        opened(learned(Path(f"a:0.5={images},b:0.5={other}"))).downstream,
        opened(learned(images)).downstream,
    )
    assert sources.train.rows + sources.validation.rows == 100
    assert sources.train.rows > alone.train.rows and sources.validation.rows > alone.validation.rows
