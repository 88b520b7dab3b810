"""The masked autoencoder's initial weights: He et al.'s, each from the seed and its own name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from tests.unit.models.small_images import config
from trp_scale.config import ModelConfig, PretrainTrainingConfig
from trp_scale.models.initialise import xavier_uniform_tensor
from trp_scale.models.vit import TransformerBlock, feed_forward_ratio
from trp_scale.pretraining.mae.model import MaskedAutoencoder

SIZES = ModelConfig(
    layers=2, hidden_size=96, heads=2, intermediate_size=192, layer_norm_eps=1e-6, initializer_range=0.02
)


def weights(seed: int = 0, layers: int = 2) -> dict[str, Tensor]:
    settings = replace(
        config(positions="relative"), model=replace(SIZES, layers=layers), training=PretrainTrainingConfig(seed=seed)
    )
    return {name: parameter.detach() for name, parameter in MaskedAutoencoder(settings).named_parameters()}


def test_matrices_are_xavier_uniform() -> None:
    """Bounds and spread of torch's own rule; queries, keys and values as one matrix."""
    checked = 0
    for name, tensor in weights().items():
        if tensor.ndim < 2 or name.endswith("table"):
            continue
        reference = nn.init.xavier_uniform_(torch.empty_like(tensor))
        bound = (6 / sum(tensor.shape)) ** 0.5
        assert 0.95 * bound < float(tensor.abs().max()) <= bound, name
        spread = 8 / tensor.numel() ** 0.5
        assert float(tensor.std()) == pytest.approx(float(reference.std()), rel=spread), name
        assert abs(float(tensor.mean())) < spread * bound, name
        checked += 1
    assert checked == 4 * 2 + 4 * 2 + 3


def test_tokens_are_normal_norms_one_biases_and_tables_zero() -> None:
    found = weights()
    for name in ("cls_token", "mask_token"):
        assert found[name].shape == (96,)
        assert float(found[name].std()) == pytest.approx(0.02, rel=0.25)
    assert not torch.equal(found["cls_token"], found["mask_token"])
    tables = [name for name in found if name.endswith("table")]
    norms = [name for name in found if "norm" in name and name.endswith("weight")]
    biases = [name for name in found if name.endswith("bias")]
    assert len(tables) == 4 and not any(found[name].any() for name in tables)
    assert len(norms) == 2 * 4 + 2 and all((found[name] == 1).all() for name in norms)
    assert len(biases) == 6 * 4 + 5 and not any(found[name].any() for name in biases)
    assert set(found) == {*tables, *norms, *biases, "cls_token", "mask_token"} | {n for n in found if found[n].ndim > 1}


def test_initial_weights_depend_on_seed_and_name_only() -> None:
    torch.manual_seed(1)
    first = weights()
    torch.manual_seed(2)
    deeper = weights(layers=3)
    assert set(first) < set(deeper)
    assert all(torch.equal(first[name], deeper[name]) for name in first)
    other = weights(seed=1)
    drawn = [name for name in first if first[name].ndim > 1 and not name.endswith("table")] + ["cls_token"]
    assert not any(torch.allclose(first[name], other[name], atol=1e-4) for name in drawn)


def test_the_values_never_change_between_versions() -> None:
    """A changed draw would make every recipe another run."""
    values = xavier_uniform_tensor(0, "blocks.0.attn.qkv.weight", (4, 8)) / (6 / 12) ** 0.5
    assert values.flatten()[[0, 9, 31]].tolist() == pytest.approx([0.85123, 0.25934, 0.47666], abs=1e-4)


@pytest.mark.parametrize(("width", "intermediate"), [(24, 40), (192, 768), (30, 97), (7, 5), (49, 123)])
def test_the_feed_forward_layer_has_its_width_in_ours_and_in_timm_s(width: int, intermediate: int) -> None:
    block = TransformerBlock(width, 1, intermediate, eps=1e-6)
    assert block.mlp.fc1.out_features == intermediate
    ratio = feed_forward_ratio(width, intermediate)
    peer = VisionTransformer(embed_dim=width, depth=1, num_heads=1, mlp_ratio=ratio, img_size=16)
    assert peer.blocks[0].mlp.fc1.out_features == intermediate
    assert block.norm1.eps == peer.blocks[0].norm1.eps == 1e-6
