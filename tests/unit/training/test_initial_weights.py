"""Continued pre-training: a run that starts from the weights of another run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.runs import image_flags, pretrain_here
from trp_scale.checkpoint.export import find_checkpoint
from trp_scale.checkpoint.format import read_full_state
from trp_scale.config import RefusedError
from trp_scale.config.run_flags import parse
from trp_scale.distributed.environment import Environment
from trp_scale.models.initialise import filled, without_content
from trp_scale.pretraining.base import build_upstream


def test_a_run_with_learned_masks_goes_on_from_a_plain_one_and_back(image_dataset: Path, tmp_path: Path) -> None:
    runs = {name: tmp_path / name for name in ("plain", "masks", "again")}
    still = {"optimizer__lr": 1e-12, "training__steps": 2}
    pretrain_here(image_flags("mae_vit_b", image_dataset, runs["plain"], training__steps=3))
    learned = {"multilevel__kind": "head", "multilevel__network": "patchwise", "multilevel__unroll": 1}
    pretrain_here(
        image_flags("mae_vit_b", image_dataset, runs["masks"], model__weights=runs["plain"], **still, **learned)
    )
    pretrain_here(image_flags("mae_vit_b", image_dataset, runs["again"], model__weights=runs["masks"], **still))
    plain, masks, again = (read_full_state(find_checkpoint(run)) for run in runs.values())
    assert set(plain) == set(masks) == set(again)
    for name, value in plain.items():
        assert torch.allclose(masks[name], value, atol=1e-9) and torch.allclose(again[name], value, atol=1e-9), name
    assert "score.weight" in read_full_state(find_checkpoint(runs["masks"]), engine="masking_network")


def test_a_checkpoint_s_weights_are_read_one_by_one_when_a_rank_fills_its_pieces(
    image_dataset: Path, tmp_path: Path
) -> None:
    pretrain_here(image_flags("mae_vit_b", image_dataset, tmp_path / "one", training__steps=1))
    words = image_flags(
        "mae_vit_b", image_dataset, tmp_path / "two", model__weights=tmp_path / "one", batch__micro_size=1
    )
    config = parse(words).config
    with Environment() as environment:
        upstream = build_upstream(config, environment)
        module, whole = without_content(upstream.model), upstream.model()
        upstream.sources.close()
    stored = read_full_state(find_checkpoint(tmp_path / "one"))
    assert all(parameter.is_meta for parameter in module.parameters())
    for name, parameter in filled(module, torch.device("cpu")).named_parameters():
        assert torch.equal(parameter, stored[name]) and torch.equal(parameter, whole.get_parameter(name)), name


def test_another_model_s_weights_are_refused_by_name(image_dataset: Path, tmp_path: Path) -> None:
    pretrain_here(image_flags("mae_vit_b", image_dataset, tmp_path / "one", training__steps=1))
    other = image_flags(
        "mae_vit_b", image_dataset, tmp_path / "two", model__weights=tmp_path / "one", vision__decoder_layers=2
    )
    with pytest.raises(RefusedError, match=r"missing: decoder_blocks\.1\.attn\.proj\.bias.*same --model"):
        pretrain_here(other)
