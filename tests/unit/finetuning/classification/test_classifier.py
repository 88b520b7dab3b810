"""The classifier against timm's vision transformer with the same weights, and how its head begins."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.unit.models.encoder_peers import CLASSES, drawn_anew, finetune_config, take_timm, timm_vit
from tests.unit.models.test_image_encoder import images
from trp_scale.finetuning.classification.task import HEAD_DEVIATION, ImageClassifier

POOL = {"mean": "avg", "class": "token"}


@pytest.mark.parametrize("pooling", POOL)
def test_timm_gives_the_same_logits(pooling: str) -> None:
    peer = timm_vit(global_pool=POOL[pooling]).double()
    model = ImageClassifier(finetune_config(pooling=pooling, learned_positions=True)).double().eval()
    take_timm(model.encoder, peer)
    model.head.load_state_dict(peer.head.state_dict())
    if model.fc_norm is not None:
        model.fc_norm.load_state_dict(peer.fc_norm.state_dict())
    assert isinstance(model.fc_norm, nn.LayerNorm) is (pooling == "mean")
    with torch.no_grad():
        torch.testing.assert_close(model(images()), peer(images()), rtol=0, atol=1e-10)


@pytest.mark.parametrize("pooling", POOL)
def test_every_parameter_takes_part(pooling: str) -> None:
    model = ImageClassifier(finetune_config(pooling=pooling)).double()
    drawn_anew(model)
    model(images()).square().sum().backward()  # type: ignore[no-untyped-call]
    without = [name for name, parameter in model.named_parameters() if not parameter.grad.abs().sum()]  # type: ignore[union-attr]
    assert without == []


def test_all_classes_start_almost_equally_likely_and_the_norm_of_the_mean_at_one() -> None:
    model = ImageClassifier(finetune_config(classes=500))
    assert float(model.head.weight.detach().std()) == pytest.approx(HEAD_DEVIATION, rel=0.05)
    assert not model.head.bias.any()
    assert model.fc_norm is not None
    assert model.fc_norm.weight.eq(1).all() and model.fc_norm.bias.eq(0).all()
    with torch.no_grad():
        chances = model(images().float()).softmax(1)
    torch.testing.assert_close(chances, torch.full_like(chances, 1 / 500), rtol=2e-3, atol=0)


def test_the_seed_makes_the_head() -> None:
    first, second = ImageClassifier(finetune_config()), ImageClassifier(finetune_config())
    assert first.head.weight.equal(second.head.weight)
    other = finetune_config()
    other.training.seed = 1
    assert not first.head.weight.equal(ImageClassifier(other).head.weight)
    assert first.head.weight.shape == (CLASSES, 24)
