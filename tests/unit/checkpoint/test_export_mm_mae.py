"""The exported encoder of a multi-modal run is timm's vision transformer of images."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch

from tests.synthetic_modalities import CLASSES, PATCH, SIDE
from tests.unit.checkpoint.fake_engine import FakeEngine, save_step
from tests.unit.models.small_modalities import config, small_model
from trp_scale.checkpoint.export import export
from trp_scale.config import Config, RefusedError
from trp_scale.config.loader import to_dict
from trp_scale.errors import CheckpointError
from trp_scale.models.patches import patchify
from trp_scale.models.positions import PositionOrder
from trp_scale.pretraining.mm_mae.model import MultimodalMaskedAutoencoder


def write_run(run_dir: Path, settings: Config, classes: int = CLASSES) -> MultimodalMaskedAutoencoder:
    model = small_model(settings, dtype=torch.float32)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    split = {name: [(0, tensor.numel(), 0)] for name, tensor in weights.items()}
    engine = FakeEngine(0, split, {"weight": weights}, steps=0)
    save_step(run_dir, 4, engine=engine, config=to_dict(settings), extra={"map_classes": {"semseg": classes}})
    return model


@pytest.mark.parametrize(("norm", "order"), [(True, "column_row"), (False, "row_column")])
def test_timm_loads_it_and_computes_the_same(tmp_path: Path, norm: bool, order: PositionOrder) -> None:
    """rgb is not the first of the inputs here, so that its tokens' numbers do not begin at 0. Without a norm of its own
    the encoder gets a fresh one."""
    settings = config(inputs=("semseg", "rgb"), outputs=("depth", "raw_rgb"), encoder_norm=norm, position_order=order)
    model = write_run(tmp_path / "run", settings)
    export(tmp_path / "run", tmp_path / "timm", to="timm", image_size=SIDE)
    peer = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    images = torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    tokens = model.grid**2 + torch.arange(model.grid**2)
    with torch.no_grad():
        found = model.features({"rgb": patchify(images, PATCH)}, tokens.expand(2, -1))
        if not norm:
            found = torch.nn.functional.layer_norm(found, found.shape[-1:], eps=settings.model.layer_norm_eps)
        torch.testing.assert_close(found, peer.forward_features(images), rtol=0, atol=1e-5)
    assert float(found.std()) > 0.1


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "blind", config(inputs=("depth", "semseg")))
    with pytest.raises(RefusedError, match=r"modalities.inputs"):
        export(tmp_path / "blind", tmp_path / "out", to="timm", image_size=SIDE)
    write_run(tmp_path / "run", config())
    with pytest.raises(RefusedError, match=r"--to hf"):
        export(tmp_path / "run", tmp_path / "out", to="hf")
    with pytest.raises(RefusedError, match=r"--image_size is 30"):
        export(tmp_path / "run", tmp_path / "out", to="timm", image_size=30)
    write_run(tmp_path / "other", config(), classes=CLASSES + 1)
    with pytest.raises(CheckpointError, match=r"decoders.semseg.prediction.weight"):
        export(tmp_path / "other", tmp_path / "out", to="timm", image_size=SIDE)
    assert not (tmp_path / "out").exists()
