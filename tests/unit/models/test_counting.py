"""FLOPs of the recipes' steps and of single passes, against closed forms and torch's own counter."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.grids import always
from tests.runs import flags
from tests.settings import changed
from tests.unit.finetuning.dense.test_model import CASES, build_model, images
from trp_scale.config import TextModelConfig
from trp_scale.config.finetuning import ImageTaskConfig
from trp_scale.config.loader import load_recipe
from trp_scale.config.recipes import RECIPES
from trp_scale.config.run_flags import parse
from trp_scale.distributed.environment import Environment
from trp_scale.finetuning.classification.settings import ClassificationTaskConfig
from trp_scale.finetuning.classification.task import ImageClassifier
from trp_scale.finetuning.dense.model import PixelModel
from trp_scale.finetuning.glue.settings import GlueTaskConfig
from trp_scale.finetuning.glue.task import glue_step_flops
from trp_scale.finetuning.task import image_step_flops
from trp_scale.models.counting import count_flops
from trp_scale.pretraining.base import DataFacts, find_upstream
from trp_scale.pretraining.mae.model import MaskedAutoencoder
from trp_scale.pretraining.pos_bert.upstream import TextUpstream

TERAFLOPS = {
    "adpe_tiny": 0.023142,
    "adpe_vit_b": 560.09,
    "adpe_vit_l": 1648.7,
    "bert_base": 72.604,
    "blo_mae_cifar": 39.393,
    "classification_adpe_vit_b": 107.91,
    "classification_cifar": 8.8504,
    "classification_fine_grained": 107.91,
    "classification_mae_vit_b": 107.91,
    "classification_mae_vit_l": 378.19,
    "classification_mm_mae_in1k": 107.91,
    "classification_mm_mae_in_s50": 107.91,
    "classification_tiny": 0.016545,
    "depth_nyuv2_vit_b": 577.89,
    "depth_tiny": 0.043285,
    "glue": 1.9968,
    "glue_tiny": 0.038138,
    "mae_plus_rpe_vit_b": 552.31,
    "mae_plus_vit_b": 548.69,
    "mae_plus_vit_l": 1624,
    "mae_tiny": 0.0085822,
    "mae_vit_b": 234.62,
    "mae_vit_g": 3128.7,
    "mae_vit_h": 1185.2,
    "mae_vit_l": 503.62,
    "mlo_mae_cifar": 30.542,
    "mlo_mae_imagenet": 78.65,
    "mlo_mae_tiny": 0.028453,
    "mlo_mae_vit_l": 241.9,
    "mm_mae_tiny": 0.020621,
    "mm_mae_vit_b_in1k_1600": 128.49,
    "mm_mae_vit_b_in1k_400": 128.49,
    "mm_mae_vit_b_s50_800": 128.49,
    "mm_mae_vit_l": 397.11,
    "pos_bert_1b": 3872.4,
    "pos_bert_3b": 9572.5,
    "pos_bert_base": 72.604,
    "pos_bert_base_4k": 1161.7,
    "pos_bert_large": 253.42,
    "pos_bert_large_32k": 32438,
    "pos_bert_large_32k_512": 32438,
    "pos_bert_tiny": 0.061175,
    "pos_modern_base": 47531.7,
    "pos_modern_base_decay": 47531.7,
    "pos_modern_large": 122862,
    "pos_modern_tiny": 0.0737694,
    "segmentation_ade20k_adpe_vit_b": 58.118,
    "segmentation_ade20k_mlo_mae_vit_b": 29.059,
    "segmentation_imagenet_s50_vit_b": 206.25,
    "segmentation_nyuv2_vit_b": 206.25,
    "segmentation_tiny": 0.01968,
    "u_mae_cifar": 9.5725,
}
"""Model FLOPs of a step by closed forms: for a layer on N positions of width d and feed-forward width i, forward,
8 N d^2 (query, key, value, output) + 4 N d i (6 N d i if gated) + 4 N^2 d (all scores, and their sum over values; in a
window of w on each side 4 ((w + 1)^2 + (N - w - 1) (2 w + 1)) d), the last layer at the positions that are read; times
3. Pre-training on 8 ranks; GLUE at its longest rows; 40 classes of pixels."""
NOT_COUNTED = {"detection_coco_mae_vit_b", "detection_coco_vit_b", "detection_tiny", "detection_voc2007_vit_b"}


def recipe_flops(name: str) -> float:
    config: Any = load_recipe(name)
    if name in {"glue", "glue_tiny"}:
        return glue_step_flops(config, config.downstream.max_length)
    if isinstance(config, ClassificationTaskConfig):
        return image_step_flops(config, partial(ImageClassifier, config))
    if isinstance(config, ImageTaskConfig):
        return image_step_flops(config, partial(PixelModel, config, 1 if name.startswith("depth") else 40))
    return find_upstream(config).outline(config, DataFacts()).step_flops(8)


def test_every_recipe_is_in_the_table() -> None:
    assert set(TERAFLOPS) | NOT_COUNTED == {path.stem for path in RECIPES.glob("*.yaml")}


KINDS = (
    *("adpe_tiny", "bert_base", "blo_mae_cifar", "classification_tiny", "depth_tiny", "glue_tiny", "mae_plus_vit_b"),
    *("mae_vit_b", "mlo_mae_tiny", "mm_mae_tiny", "pos_bert_base_4k", "pos_modern_tiny", "segmentation_tiny"),
    *("mae_plus_rpe_vit_b", "u_mae_cifar"),
)
"""Recipes that others are like."""


@pytest.mark.parametrize("name", always(TERAFLOPS, *KINDS))
def test_step_flops_of_recipes_equal_closed_forms(name: str) -> None:
    assert recipe_flops(name) == pytest.approx(TERAFLOPS[name] * 1e12, rel=1e-3)


@pytest.mark.parametrize(("pooling", "queries"), [("class", 1), ("mean", 40)])
def test_step_flops_of_glue_with_modernbert_equal_closed_forms(pooling: Any, queries: int) -> None:
    """Rows of 40 tokens; a window of 8 on each side; layers 0 and 3 are global, the last one is."""
    config = GlueTaskConfig()
    config.model = TextModelConfig(
        kind="modern", layers=4, hidden_size=16, heads=2, intermediate_size=20, local_attention=16, dropout=0.0
    )
    config.downstream.pooling, config.downstream.classes, config.batch.global_size = pooling, 3, 5
    length, width, inner = 40, 16, 20
    pairs = 9**2 + (length - 9) * 17
    near = {"whole": length**2, "local": pairs}
    layer = {kind: length * (8 * width**2 + 6 * width * inner) + 4 * width * seen for kind, seen in near.items()}
    last = length * 6 * width**2 + queries * (2 * width**2 + 6 * width * inner) + 4 * width * queries * length
    mean = 2 * length * width if pooling == "mean" else 0
    row = layer["whole"] + 2 * layer["local"] + last + mean + 2 * width**2 + 2 * width * 3
    assert glue_step_flops(config, length) == 3 * 5 * row


@pytest.mark.parametrize("head", CASES)
def test_counts_on_meta_equal_torch_s_counter(head: str) -> None:
    model = build_model(head)
    with torch.no_grad(), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(images())
    counted = count_flops(partial(build_model, head), lambda meta_model: meta_model(images().to("meta")))
    assert counted == counter.get_total_flops() > 0


def test_equal_blocks_are_counted_each() -> None:
    def make() -> nn.Module:
        return nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)])

    def run(blocks: Any) -> None:
        tokens = torch.empty(3, 4, device="meta")
        for block in blocks:
            tokens = block(tokens)
        assert tokens.shape == (3, 2)

    assert count_flops(make, run) == 2 * 3 * (16 + 16 + 8)


def test_text_step_leaves_out_the_padding_of_the_first_rows(text_dataset: Path, tmp_path: Path) -> None:
    config = parse(flags(text_dataset, tmp_path)).config
    task = TextUpstream(config, Environment())
    batch = task.source.first_rows(min(2048, task.source.rows))
    share = float(batch["attention_mask"].float().mean())
    facts = DataFacts(length=task.meta.length, vocabulary=task.meta.vocab_size)
    whole = task.outline(config, facts).step_flops(1)
    assert share * whole < task.step_flops < whole


def test_an_adversary_adds_less_than_one_percent() -> None:
    """0.27 % of one crop's step of adpe_vit_b, once for a micro-batch of any number of crops."""
    config = load_recipe("adpe_vit_b")
    patches = (config.crops.size // config.vision.patch_size) ** 2
    visible = int(patches * (1 - config.masking.ratio))

    def learn(model: Any, perturbation: bool) -> None:
        order = torch.zeros(1, patches, dtype=torch.int64, device="meta")
        pixels = torch.zeros(1, patches, 3 * config.vision.patch_size**2, device="meta")
        vector = torch.zeros(model.shape.numel, requires_grad=True, device="meta") if perturbation else None
        with torch.enable_grad():
            model(pixels, order[:, :visible], order[:, visible:], vector).prediction.sum().backward()

    make = partial(MaskedAutoencoder, config)
    without, perturbed = (count_flops(make, partial(learn, perturbation=on)) for on in (False, True))
    assert without < perturbed < 1.003 * without


def test_relative_positions_count_the_products_of_their_mode() -> None:
    """One crop of 49 patches and a class token: a block has 56 vectors, made from 50 entries."""

    def forward(**vision: Any) -> float:
        config = changed(load_recipe("mae_plus_vit_b"), vision=vision)
        order = torch.zeros(1, 49, dtype=torch.int64, device="meta")
        pixels = torch.zeros(1, 49, 768, device="meta")
        return count_flops(partial(MaskedAutoencoder, config), lambda m: m(pixels, order[:, :12], order[:, 12:]))

    absolute, relative = forward(), {"positions": "relative"}
    blocks = [(768, 64, 50)] * 12 + [(512, 32, 50)] * 7 + [(512, 32, 37)]  # width, head size, queries
    products = sum(2 * queries * 56 * width + 2 * 56 * 50 * size for width, size, queries in blocks)
    numbers = len(blocks) * 2 * 56 * 50
    assert forward(**relative) - absolute == products
    assert forward(**relative, relative_mode="bias") - absolute == numbers
    assert forward(**relative, relative_values=True) - absolute == 2 * products
    assert forward(**relative, relative_mode="bias", relative_values=True) - absolute == numbers + products
