"""Initial weights depend only on the seed and each tensor's name; the masked autoencoder's are He et al.'s."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from tests.unit.models.masked_rows import VOCABULARY
from tests.unit.models.small_images import config
from trp_scale.config import ModelConfig, PretrainTrainingConfig, TextModelConfig
from trp_scale.core.run import tensor_seed
from trp_scale.models.initialise import initial_tensor, initialise, xavier_uniform_tensor
from trp_scale.models.vit import TransformerBlock, feed_forward_ratio
from trp_scale.pretraining.mae.model import MaskedAutoencoder
from trp_scale.pretraining.pos_bert.model import BertForMaskedPositions

SIZES = TextModelConfig(
    layers=2, hidden_size=64, heads=2, intermediate_size=128, max_positions=64, initializer_range=0.05
)


def model(seed: int = 0, sizes: TextModelConfig = SIZES) -> dict[str, Tensor]:
    built = BertForMaskedPositions(sizes, vocab_size=VOCABULARY, seed=seed)
    return {name: parameter.detach() for name, parameter in built.named_parameters()}


def test_the_state_of_the_global_generator_does_not_matter_and_is_not_moved() -> None:
    torch.manual_seed(1)
    first = model()
    torch.manual_seed(2)
    torch.randn(17)
    second = model()
    assert all(torch.equal(first[name], second[name]) for name in first)
    torch.manual_seed(3)
    expected = torch.randn(3)
    torch.manual_seed(3)
    initial_tensor(0, "any", (5, 5), 1.0)
    assert torch.equal(torch.randn(3), expected)


def test_other_seeds_and_other_names_draw_other_values() -> None:
    first, second = model(seed=0), model(seed=1)
    matrices = [name for name, tensor in first.items() if tensor.ndim == 2]
    assert not any(torch.allclose(first[name], second[name], atol=1e-3) for name in matrices)
    same_shape = [name for name in matrices if first[name].shape == (64, 64)]
    assert len(same_shape) >= 8
    drawn = torch.stack([first[name].flatten() for name in same_shape])
    correlation = torch.corrcoef(drawn) - torch.eye(len(same_shape))
    assert float(correlation.abs().max()) < 0.08  # of independent draws: 1/64, five standard deviations


def test_seed_and_name_are_separated_in_the_hash() -> None:
    seeds = {tensor_seed(seed, name) for seed, name in [(1, "a"), (2, "a"), (1, "b"), (11, "a"), (1, "1a"), (1, "1/a")]}
    assert len(seeds) == 6
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_values_never_change_between_versions() -> None:
    """A changed draw would make every recipe another run."""
    name = "bert.pooler.dense.weight"
    assert tensor_seed(0, name) == 3_997_946_074_605_603_437
    values = initial_tensor(0, name, (4, 8), 2.0).flatten()[[0, 9, 31]] / 2.0
    assert values.tolist() == pytest.approx([-0.84532, 0.61585, 0.72138], abs=1e-4)


def test_matrices_are_normal_with_the_given_deviation() -> None:
    found = model()
    checked = 0
    for name, tensor in found.items():
        if tensor.ndim != 2 or tensor.numel() < 4000:
            continue
        values = tensor[1:] if "word_embeddings" in name else tensor
        assert float(values.std()) == pytest.approx(0.05, rel=0.05), name
        assert abs(float(values.mean())) < 0.05 * 5 / values.numel() ** 0.5, name
        within = float((values.abs() < 0.05).float().mean())  # not cut off and not uniform: 68.3 % within one deviation
        assert within == pytest.approx(0.683, abs=0.03), name
        checked += 1
    assert checked >= 12


def test_norms_are_one_biases_zero_and_the_padding_token_is_a_zero_row() -> None:
    found = model()
    norms = [name for name in found if name.endswith("LayerNorm.weight")]
    biases = [name for name in found if name.endswith("bias")]
    assert len(norms) == 1 + 2 * SIZES.layers + 1 and all((found[name] == 1).all() for name in norms)
    assert len(biases) > len(norms) and not any(found[name].any() for name in biases)
    embeddings = found["bert.embeddings.word_embeddings.weight"]
    assert not embeddings[0].any() and all(row.any() for row in embeddings[1:VOCABULARY])


def test_every_parameter_is_written() -> None:
    built = BertForMaskedPositions(SIZES, vocab_size=VOCABULARY, seed=0)
    expected = {name: parameter.detach().clone() for name, parameter in built.named_parameters()}
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.fill_(torch.nan)
    initialise(built, seed=0, std=SIZES.initializer_range)
    assert all(torch.equal(parameter, expected[name]) for name, parameter in built.named_parameters())


MAE_SIZES = ModelConfig(
    layers=2, hidden_size=96, heads=2, intermediate_size=192, layer_norm_eps=1e-6, initializer_range=0.02
)


def mae_weights(seed: int = 0, layers: int = 2) -> dict[str, Tensor]:
    settings = replace(
        config(positions="relative"),
        model=replace(MAE_SIZES, layers=layers),
        training=PretrainTrainingConfig(seed=seed),
    )
    return {name: parameter.detach() for name, parameter in MaskedAutoencoder(settings).named_parameters()}


def test_matrices_are_xavier_uniform() -> None:
    """Bounds and spread of torch's own rule; queries, keys and values as one matrix."""
    checked = 0
    for name, tensor in mae_weights().items():
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
    found = mae_weights()
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
    first = mae_weights()
    torch.manual_seed(2)
    deeper = mae_weights(layers=3)
    assert set(first) < set(deeper)
    assert all(torch.equal(first[name], deeper[name]) for name in first)
    other = mae_weights(seed=1)
    drawn = [name for name in first if first[name].ndim > 1 and not name.endswith("table")] + ["cls_token"]
    assert not any(torch.allclose(first[name], other[name], atol=1e-4) for name in drawn)


def test_the_values_of_images_never_change() -> None:
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
