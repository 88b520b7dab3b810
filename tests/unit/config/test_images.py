"""Image settings that no run can have are refused with the flag to change."""

from __future__ import annotations

from typing import Any

import pytest

from tests.settings import changed
from trp_scale.config import Config, RefusedError
from trp_scale.config.images import PatchSplit, split_patches
from trp_scale.config.loader import cautions, check, load_recipe
from trp_scale.config.run_flags import parse


def settings(**changes: dict[str, Any]) -> Config:
    """The MAE recipe with changed sections."""
    return changed(load_recipe("mae_vit_b"), **({"data": {"path": "data"}} | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"hidden_size": 770, "heads": 11}}, "--model.hidden_size is 770"),
        ({"vision": {"decoder_hidden_size": 510, "decoder_heads": 2}}, "--vision.decoder_hidden_size is 510"),
        ({"vision": {"decoder_heads": 7}}, "--vision.decoder_heads"),
        ({"vision": {"patch_size": 0}}, "--vision.patch_size"),
        ({"vision": {"decoder": "linear"}}, "--vision.tokens all"),
        ({"crops": {"size": 100}}, "for example 96"),
        ({"crops": {"size": 0}}, "--crops.size is 0"),
        ({"crops": {"size": 16}}, "leaves 0 of 1"),
        ({"crops": {"size": 514}, "vision": {"patch_size": 2}}, "has 66049 patches"),
        ({"masking": {"ratio": 0.0}}, "leaves 196 of 196"),
        ({"masking": {"ratio": 0.999}}, "leaves 0 of 196"),
        ({"crops": {"min_scale": 0.0}}, "--crops.min_scale is 0"),
        ({"crops": {"min_scale": 0.9, "max_scale": 0.5}}, "--crops.min_scale"),
        ({"crops": {"max_scale": 1.5}}, "--crops.max_scale 1.5"),
        ({"crops": {"from": "view", "view_size": 112}}, "--crops.view_size is 112"),
    ],
)
def test_refused_with_the_flag(changes: dict[str, Any], words: str) -> None:
    check(settings())
    with pytest.raises(RefusedError) as caught:
        check(settings(**changes))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"vision": {"decoder": "linear", "tokens": "all"}},
        {"crops": {"from": "view", "size": 112}},
        {"crops": {"from": "image", "view_size": 1}},
        {"masking": {"ratio": 0.994}},
        {"crops": {"size": 512}, "vision": {"patch_size": 2}},
    ],
)
def test_what_is_near_the_limits_is_allowed(changes: dict[str, Any]) -> None:
    check(settings(**changes))


def test_the_papers_recipes_follow_appendix_a() -> None:
    plain, plus = load_recipe("mae_vit_b"), load_recipe("mae_plus_vit_b")
    relative, adversarial = load_recipe("mae_plus_rpe_vit_b"), load_recipe("adpe_vit_b")
    optimizer = plus.optimizer
    assert optimizer.lr == pytest.approx(1.5e-4 * plus.batch.global_size / 256)
    assert (plus.batch.global_size, optimizer.beta1, optimizer.beta2, optimizer.weight_decay) == (4096, 0.9, 0.95, 0.05)
    assert plus.training.steps == pytest.approx(1600 * 1_281_167 / 4096, abs=1)
    assert optimizer.warmup_steps == pytest.approx(40 * 1_281_167 / 4096, abs=1)
    assert (plus.crops.count, plus.crops.size, plus.vision.tokens, plus.masking.ratio) == (4, 112, "all", 0.75)
    assert (plain.crops.count, plain.crops.size, plain.vision.tokens) == (1, 224, "visible")
    # Each baseline differs from the method in what the tables name, and in nothing else.
    relative.vision.positions = "absolute"
    assert relative == plus
    assert (adversarial.adversary.kind, adversarial.adversary.norm) == ("relative_coordinate", "linf")
    adversarial.adversary = plus.adversary
    adversarial.vision.positions = "absolute"
    assert adversarial == plus
    for base, large in (("mae_vit_b", "mae_vit_l"), ("mae_plus_vit_b", "mae_plus_vit_l"), ("adpe_vit_b", "adpe_vit_l")):
        ours = load_recipe(large)
        assert (ours.model.layers, ours.model.hidden_size, ours.model.heads) == (24, 1024, 16)
        ours.model, ours.batch.micro_size = load_recipe(base).model, load_recipe(base).batch.micro_size
        assert ours == load_recipe(base)


@pytest.mark.parametrize(
    ("recipe", "changes", "flag"),
    [
        ("mae_vit_b", {"crops": {"view_size": 300}}, "--crops.view_size"),
        ("mae_vit_b", {"vision": {"index": "relaxed"}}, "--vision.index"),
        ("adpe_vit_b", {"vision": {"index": "relaxed"}}, "--vision.index"),
        ("mae_plus_vit_b", {"vision": {"decoder": "linear", "decoder_layers": 3}}, "--vision.decoder_layers"),
    ],
)
def test_a_setting_that_nobody_reads_is_cautioned_of(recipe: str, changes: dict[str, Any], flag: str) -> None:
    assert cautions(load_recipe(recipe)) == []
    (caution,) = cautions(changed(load_recipe(recipe), **changes))
    assert flag in caution and "has no effect" in caution


ABSOLUTE = ["--vision.positions", "absolute", "--adversary.where", "encoder"]
TABLE_A2 = [
    (positions, f"{family}_{mode}", norm, eps)
    for family, positions, balls in (
        ("absolute", ABSOLUTE, {"l2": (1, 3, 5), "linf": (1, 3, 5)}),
        ("relative", [], {"l2": (3, 5, 7), "linf": (10, 15, 20)}),
    )
    for mode in ("embedding", "coordinate")
    for norm, radii in balls.items()
    for eps in radii
]


@pytest.mark.parametrize(("positions", "kind", "norm", "eps"), TABLE_A2)
def test_every_row_of_table_a2_is_adpe_vit_b_with_other_flags(
    positions: list[str], kind: str, norm: str, eps: int
) -> None:
    flags = ["--adversary.kind", kind, "--adversary.norm", norm, "--adversary.eps", str(eps)]
    config = parse(["--recipe", "adpe_vit_b", "--data.path", "x", *positions, *flags]).config
    assert (config.adversary.kind, config.adversary.norm, config.adversary.eps) == (kind, norm, eps)
    # The authors' code builds relative positions, and their adversary, into the decoder's blocks too.
    assert config.adversary.where == ("both" if kind.startswith("relative") else "encoder")
    assert cautions(config) == []
    assert len(TABLE_A2) == 24


def test_the_rows_of_table_a1_are_adpe_vit_b_with_other_flags() -> None:
    for eps in ("0.001", "0.01", "0.1"):
        pixels = ["--adversary.kind", "pixels", "--adversary.eps", eps]
        assert cautions(parse(["--recipe", "adpe_vit_b", "--data.path", "x", *ABSOLUTE[:2], *pixels]).config) == []


@pytest.mark.parametrize(
    ("size", "patch_size", "ratio", "patches", "visible"),
    [(224, 16, 0.75, 196, 49), (112, 16, 0.75, 49, 12), (32, 8, 0.5, 16, 8), (224, 16, 0.9, 196, 19)],
)
def test_how_many_are_visible(size: int, patch_size: int, ratio: float, patches: int, visible: int) -> None:
    assert split_patches(size, patch_size, ratio) == PatchSplit(patches=patches, visible=visible)
    assert split_patches(size, patch_size, ratio).masked == patches - visible
