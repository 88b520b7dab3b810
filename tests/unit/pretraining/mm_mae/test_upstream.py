"""Stored images with depth and segmentation, model and objective of MM-MAE fit each other."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from tests.unit.data.images.multimodal import SEMSEG_CLASSES, multimodal_config, samples, write_multimodal
from trp_scale.config import Config, ModelConfig, RefusedError
from trp_scale.config.loader import load_recipe
from trp_scale.core.batch import Batch
from trp_scale.core.run import RunContext
from trp_scale.distributed.environment import Environment
from trp_scale.pretraining.base import DataFacts, build_upstream
from trp_scale.pretraining.mm_mae.model import MultimodalMaskedAutoencoder
from trp_scale.pretraining.mm_mae.upstream import MultimodalUpstream


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    path = write_multimodal(tmp_path_factory.mktemp("data") / "images", [samples(7), samples(6)])
    settings = multimodal_config(path, modalities={"outputs": ["rgb", "depth", "semseg", "raw_rgb"]})
    settings.model = ModelConfig(layers=1, hidden_size=16, heads=2, intermediate_size=32)
    settings.vision.decoder_layers, settings.vision.decoder_hidden_size, settings.vision.decoder_heads = 1, 16, 2
    settings.data.workers = 0
    return settings


def upstream(config: Config) -> MultimodalUpstream:
    found = build_upstream(config, Environment(use_gpu=False))
    assert isinstance(found, MultimodalUpstream)
    return found


@pytest.mark.parametrize("reduction", ["sample", "element"])
def test_counts_are_of_what_the_loss_is_taken_over(config: Config, reduction: str) -> None:
    """The loader counts valid pixels on its way; here they are counted again in the very maps that are predicted."""
    config.objective.reduction = reduction  # type: ignore[assignment]
    found = upstream(config)
    for batch in found.sources.train.next_window():
        losses = found.objective(found.model(), batch)
        assert losses.counts.tolist() == found.objective.count(batch).tolist() == recount(config, batch)
        losses.sums.sum().backward()  # type: ignore[no-untyped-call]
        assert losses.sums.isfinite().all() and (losses.sums > 0).all()
    found.sources.close()


def recount(config: Config, batch: Batch) -> list[float]:
    """Masked elements, pixel by pixel of the whole maps."""
    size, patch = config.crops.size, config.vision.patch_size
    grid = size // patch
    valid = {
        "rgb": torch.ones(batch.rows, grid, grid),
        "depth": batch["depth"] != 0,
        "semseg": batch["semseg"] != 255,
    }
    found = []
    for task in config.modalities.outputs:
        modality = task.removeprefix("raw_")
        number = config.modalities.inputs.index(modality)  # type: ignore[arg-type]
        masked = torch.ones(batch.rows, 3 * grid**2)
        for row, tokens in enumerate(batch["visible"].tolist()):
            masked[row, tokens] = 0
        own = masked.view(batch.rows, 3, grid, grid)[:, number]
        fine = torch.nn.functional.interpolate(own[:, None], valid[modality].shape[-1])[:, 0]  # nearest
        elements = (fine * valid[modality]).sum((1, 2))
        found.append(float((elements > 0).sum() if config.objective.reduction == "sample" else elements.sum()))
    return found


def test_given_weights_are_read(config: Config, tmp_path: Path) -> None:
    settings = copy.deepcopy(config)
    settings.model.weights = str(tmp_path)
    found = upstream(settings)
    with pytest.raises(RefusedError, match=r"--model\.weights.*model.safetensors"):
        found.model()
    found.sources.close()


def test_what_the_run_is_told(config: Config) -> None:
    found = upstream(config)
    model = found.model()
    assert isinstance(model, MultimodalMaskedAutoencoder)
    assert model.tokenisers["semseg"].classes == len(SEMSEG_CLASSES) == 3
    rows = config.batch.global_size
    assert found.positions_per_step == rows * 3 * (config.crops.size // config.vision.patch_size) ** 2
    assert found.step_flops == found.outline(config, DataFacts(classes={"semseg": 3})).step_flops(1) > 0
    names = {"semseg": list(SEMSEG_CLASSES)}
    assert found.checkpoint_extra() == {"map_classes": {"semseg": 3}, "class_names": names}
    assert found.hooks(RunContext(config=config, objective=found.objective, engine=None)) == []  # type: ignore[arg-type]


def test_vit_base_by_hand() -> None:
    """12 blocks of 768 on 99 tokens; three decoders of 256 on 196 places: a cross-attention, an MLP, two blocks."""
    encoder = 12 * (24 * 99 * 768**2 + 4 * 99**2 * 768)
    tokenisers = 2 * 98 * 768 * (768 + 256 + 16 * 64)  # each token through all three
    cross = 2 * 99 * 768 * 256 + 4 * 196 * 256**2 + 4 * 99 * 256**2 + 4 * 196 * 99 * 256 + 16 * 196 * 256**2
    decoders = 3 * (cross + 2 * (24 * 196 * 256**2 + 4 * 196**2 * 256))
    predictions = 2 * 196 * 256 * (768 + 256 + 16 * 133)
    config = load_recipe("mm_mae_vit_b_in1k_400")
    rest = encoder + decoders + predictions
    outline = MultimodalUpstream.outline(config, DataFacts(classes={"semseg": 133}))
    assert outline.step_flops(1) == pytest.approx(3 * config.batch.global_size * (rest + tokenisers), rel=2e-3)
