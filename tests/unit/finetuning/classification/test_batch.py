"""Batches of classification: the same however they are split, and measured images as MAE cuts them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision import transforms

from tests.unit.data.images.stored import CLASSES, joined, jpeg, photograph, sample, sample_of_key, write_images
from tests.unit.models.encoder_peers import finetune_config
from trp_scale.data.images.crops import GREY
from trp_scale.data.images.rows import decode_image
from trp_scale.data.plan import Addresses
from trp_scale.data.sources import Sources
from trp_scale.distributed.groups import Group
from trp_scale.finetuning.classification.batch import MeasuredImages
from trp_scale.finetuning.classification.settings import AugmentationConfig, ClassificationTaskConfig
from trp_scale.finetuning.classification.task import ClassificationTask, open_labelled

ALL = {"magnitude": 9, "colour_jitter": 0.3, "erasing": 0.25, "mixup": 0.8, "cutmix": 1.0, "smoothing": 0.1}

BICUBIC = transforms.InterpolationMode.BICUBIC
SIZES = [(40, 60), (64, 48), (33, 33), (20, 90), (90, 20), (50, 51)]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """34 images of different sizes in 3 shards; number 5 cannot be decoded."""
    samples = [sample(number, *SIZES[number % len(SIZES)]) for number in range(34)]
    samples[5]["jpg"] = b"no image"
    return write_images(tmp_path_factory.mktemp("classes") / "images", [samples[:14], samples[14:21], samples[21:]])


def config_for(path: Path, *, seed: int = 0, micro_size: int = 4, **augmentation: Any) -> ClassificationTaskConfig:
    config = finetune_config(8, test_path=str(path))
    config.augmentation = AugmentationConfig(**augmentation)
    config.data.path, config.data.workers, config.data.blocks_per_group = str(path), 0, 3
    config.batch.micro_size, config.training.seed = micro_size, seed
    return config


def opened(config: ClassificationTaskConfig, world: int = 1) -> list[Sources]:
    """The sources of all ranks."""
    environments = [
        SimpleNamespace(data=Group("data", rank, world), device=torch.device("cpu"), cpus=2) for rank in range(world)
    ]
    return [ClassificationTask(config, environment).sources for environment in environments]  # type: ignore[arg-type]


def steps(config: ClassificationTaskConfig, count: int, world: int = 1) -> list[dict[str, Tensor]]:
    """The first global batches, put together from all ranks."""
    ranks = opened(config, world)
    found = [joined([sources.train.next_window() for sources in ranks]) for _ in range(count)]
    for sources in ranks:
        sources.close()
    return found


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(first[name].equal(second[name]) for name in first)


def test_a_global_batch_is_the_same_however_it_is_split(dataset: Path) -> None:
    """Ten steps of 8: more than two epochs, so that pairs of two epochs and the broken image occur."""
    whole = steps(config_for(dataset, micro_size=8, **ALL), 10)
    assert any((one["row_weights"] == 0).any() for one in whole)
    for micro_size, world in ((2, 1), (4, 2), (2, 4)):
        split = steps(config_for(dataset, micro_size=micro_size, **ALL), 10, world)
        assert all(equal(one, other) for one, other in zip(split, whole, strict=True)), (micro_size, world)


def test_a_stream_can_begin_anywhere(dataset: Path) -> None:
    config = config_for(dataset, **ALL)
    expected = steps(config, 4)[3]
    (sources,) = opened(config)
    sources.train.seek(3 * 8)
    assert equal(joined([sources.train.next_window()]), expected)


def test_every_epoch_and_every_seed_changes_an_image_anew(dataset: Path) -> None:
    def views(seed: int) -> dict[int, list[bytes]]:
        found: dict[int, list[bytes]] = {}
        for step in steps(config_for(dataset, seed=seed, magnitude=9), 13):  # 3 epochs of 34
            for key, image in zip(step["keys"].tolist(), step["images"], strict=True):
                found.setdefault(key, []).append(image.numpy().tobytes())
        return found

    first, other = views(0), views(1)
    whole = [seen[:3] for seen in first.values() if len(seen) >= 3]
    assert sum(len(set(seen)) == 3 for seen in whole) > 0.9 * len(whole)
    assert sum(first[key][0] != other[key][0] for key in first) > 0.9 * len(first)


def test_targets_are_the_classes_of_the_images_that_were_mixed(dataset: Path) -> None:
    numbers = sample_of_key(dataset)
    for step in steps(config_for(dataset, mixup=0.8, smoothing=0.3), 5):
        there = step["row_weights"] > 0
        own = torch.tensor([numbers[key] % 3 for key in step["keys"].tolist()])
        assert step["labels"][there].equal(own[there])
        torch.testing.assert_close(step["targets"][there].sum(1), torch.ones(int(there.sum())))
        for first in range(0, 8, 2):
            pair = slice(first, first + 2)
            plain = torch.full((2, 3), 0.1)
            plain[[0, 1], own[pair]] = 0.8
            if there[pair].all():
                gap = plain[0] - plain[1]
                share = (
                    float(((step["targets"][first] - plain[1]) * gap).sum() / gap.square().sum()) if gap.any() else 1
                )
                torch.testing.assert_close(step["targets"][first], share * plain[0] + (1 - share) * plain[1])
                torch.testing.assert_close(step["targets"][pair].sum(0), plain.sum(0))
            else:  # the neighbour of an image that cannot be read stays what it is
                torch.testing.assert_close(step["targets"][pair][there[pair]], plain[there[pair]])
                assert (step["images"][pair][~there[pair]] == GREY).all()


def test_pairs_across_micro_batches_are_not_made(dataset: Path) -> None:
    (sources,) = opened(config_for(dataset, micro_size=1, mixup=0.8))
    with pytest.raises(ValueError, match=r"rows 0 to 1: pairs to mix begin and end at even positions"):
        sources.train.next_window()


def measured(dataset: Path, numbers: list[int], size: int, **augmentation: Any) -> Any:
    config = config_for(dataset, **augmentation)
    config.crops.size, config.downstream.classes = size, len(CLASSES)
    labelled = open_labelled(str(dataset))
    count = len(numbers)
    rows = np.array(numbers)
    addresses = Addresses(
        member=np.zeros(count, dtype=np.int64),
        block=rows // 4,
        row=rows % 4,
        epoch=np.zeros(count, dtype=np.int64),
        keys=rows,
        present=np.array([number < 12 for number in numbers]),
    )
    return MeasuredImages(config, labelled.datasets, labelled.meta).build(addresses, 0)


def by_pillow(number: int, *changes: Any) -> Tensor:
    """What torchvision makes of PIL's image."""
    height, width = SIZES[number % len(SIZES)]
    image = decode_image(bytearray(jpeg(photograph(height, width, number))))
    changed = transforms.Compose(changes)(Image.fromarray(image.permute(1, 2, 0).numpy()))
    return torch.from_numpy(np.array(changed)).permute(2, 0, 1)


def test_the_centre_of_a_measured_image_is_what_mae_sees(dataset: Path) -> None:
    numbers = [0, 1, 3, 4]
    batch = measured(dataset, numbers, 28)
    for image, number in zip(batch["images"], numbers, strict=True):
        expected = by_pillow(number, transforms.Resize(32, BICUBIC), transforms.CenterCrop(28))
        assert (image.int() - expected.int()).abs().max() <= 1
    wider = measured(dataset, [0], 28, centre_share=1.0)["images"][0]
    expected = by_pillow(0, transforms.Resize(28, BICUBIC), transforms.CenterCrop(28))
    assert (wider.int() - expected.int()).abs().max() <= 1


def test_a_whole_image_is_squashed_and_absent_ones_are_grey(dataset: Path) -> None:
    batch = measured(dataset, [0, 5, 12], 16, measured="whole", mixup=0.8, magnitude=9, smoothing=0.1)
    expected = by_pillow(0, transforms.Resize([16, 16], BICUBIC))
    assert (batch["images"][0].int() - expected.int()).abs().max() <= 1
    assert (batch["images"][1:] == GREY).all()
    assert batch["row_weights"].tolist() == [1.0, 0.0, 0.0]
    assert batch.corrupt == ["image-000000/n00005"]
    assert batch["targets"].tolist() == [[1.0, 0.0, 0.0], [0.0] * 3, [0.0] * 3], "targets of measured images are plain"
