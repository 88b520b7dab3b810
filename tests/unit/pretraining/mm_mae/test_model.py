"""The multi-modal masked autoencoder equals the plain reference, values and gradients; low precision, one static graph,
initial weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.synthetic_modalities import CLASSES
from tests.unit.models.plain_modalities import plain_forward
from tests.unit.models.small_modalities import ALL, EVERY_TASK, config, model_inputs, small_model
from trp_scale.pretraining.mm_mae.model import MultimodalMaskedAutoencoder, MultimodalOutput


@pytest.mark.parametrize("way", ["bf16 autocast", "bf16 weights", "fp16 weights"])
def test_low_precision_is_near_single_precision(way: str) -> None:
    settings = config(outputs=EVERY_TASK)
    reference = small_model(settings, dtype=torch.float32)
    dtype = {"bf16 autocast": torch.float32, "bf16 weights": torch.bfloat16, "fp16 weights": torch.float16}[way]
    model = copy.deepcopy(reference)
    for parameter in model.parameters():  # DeepSpeed leaves buffers as they are
        parameter.data = parameter.data.to(dtype)
    taps = torch.zeros(4, 2, 10, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "bf16 autocast"):
        found = model(*model_inputs(settings), task_taps=taps)
    for one, other in zip(found.predictions, reference(*model_inputs(settings)).predictions, strict=True):
        assert one.dtype == (torch.float16 if way == "fp16 weights" else torch.bfloat16)
        assert (one.float() - other).norm() < (0.02 if way == "fp16 weights" else 0.1) * other.norm()
    sum(one.float().square().mean() for one in found.predictions).backward()
    assert taps.grad is not None and taps.grad.dtype == torch.float32 and taps.grad.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_it_is_one_graph_of_static_shapes_with_and_without_taps() -> None:
    """fullgraph refuses reads of values on the host and branches on values; other shares of modalities do not
    recompile."""
    settings = config(outputs=("depth", "raw_rgb"))
    settings.model.layers = 1
    model = small_model(settings, dtype=torch.float32)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="eager")
    for taps in (None, torch.zeros(2, 2, 10, 32)):
        found: MultimodalOutput = compiled(*model_inputs(settings), task_taps=taps)
        expected = model(*model_inputs(settings), task_taps=taps)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        with torch._dynamo.config.patch(error_on_recompile=True):
            compiled(*model_inputs(settings, first=6), task_taps=taps)


def test_initial_weights_follow_from_seed_and_name_alone() -> None:
    torch.manual_seed(1)
    first = dict(MultimodalMaskedAutoencoder(config(), {"semseg": CLASSES}).named_parameters())
    torch.manual_seed(2)
    reordered = config(inputs=ALL[::-1], outputs=EVERY_TASK[::-1])
    second = dict(MultimodalMaskedAutoencoder(reordered, {"semseg": CLASSES}).named_parameters())
    assert set(first) < set(second) and all(torch.equal(first[name], second[name]) for name in first)
    other_seed = config()
    other_seed.training.seed += 1
    third = dict(MultimodalMaskedAutoencoder(other_seed, {"semseg": CLASSES}).named_parameters())
    drawn = [name for name in first if not name.endswith(("bias", "mask_token")) and "norm" not in name]
    assert not any(torch.allclose(first[name], third[name], atol=1e-4) for name in drawn)


def test_tokens_and_embeddings_are_normal_mask_tokens_zero_and_none_is_decayed() -> None:
    """Weight decay is for matrices, so class embeddings are one vector. Queries, keys and values are drawn as separate
    matrices (MultiMAE's code)."""
    settings = config(outputs=EVERY_TASK)
    settings.model.initializer_range, settings.semseg.class_embedding = 0.03, 64
    found = dict(MultimodalMaskedAutoencoder(settings, {"semseg": CLASSES}).named_parameters())
    normal = {name: each for name, each in found.items() if name.endswith(("_token", "_embedding"))}
    masked = {f"decoders.{task}.mask_token" for task in EVERY_TASK}
    embeddings = {f"decoders.{task}.{name}_embedding" for task in EVERY_TASK for name in ALL}
    assert set(normal) == {"cls_token"} | masked | embeddings | {"tokenisers.semseg.class_embedding"}
    assert all(each.ndim == 1 for each in normal.values())
    assert not any(normal.pop(name).any() for name in masked)
    assert float(torch.cat(list(normal.values())).detach().std()) == pytest.approx(0.03, rel=0.1)
    classes = normal["tokenisers.semseg.class_embedding"]
    assert len(classes) == (CLASSES + 1) * 64 and float(classes.detach().std()) == pytest.approx(0.03, rel=0.15)
    for name in set(found) - set(normal) - masked:
        if found[name].ndim > 1:
            parts = 3 if "qkv" in name else 2 if "key_value" in name else 1
            for part in found[name].detach().chunk(parts):
                expected = torch.nn.init.xavier_uniform_(torch.empty_like(part))
                bound = (6 / sum(part.shape)) ** 0.5
                assert 0.9 * bound < float(part.abs().max()) <= bound, name
                assert float(part.std()) == pytest.approx(float(expected.std()), rel=8 / part.numel() ** 0.5), name
        else:
            assert (found[name] == (1.0 if name.endswith("weight") else 0.0)).all(), name


MODELS: dict[str, dict[str, Any]] = {
    "all": {},
    "in another order, with raw rgb": {"inputs": ("semseg", "rgb", "depth"), "outputs": ("depth", *EVERY_TASK[2:])},
    "rgb alone, everything predicted": {"inputs": ("rgb",), "outputs": EVERY_TASK, "visible_tokens": 5},
    "no rgb, only rgb predicted": {"inputs": ("semseg", "depth"), "outputs": ("rgb",)},
    "nearly everything visible": {"visible_tokens": 47},
    "one token": {"visible_tokens": 1},
    "a norm after the encoder": {"encoder_norm": True},
    "rows before columns": {"position_order": "row_column"},
}


@pytest.mark.parametrize("case", MODELS.values(), ids=MODELS)
def test_predictions_and_gradients(case: dict[str, Any]) -> None:
    settings = config(**case)
    model = small_model(settings)
    patches, visible = model_inputs(settings)
    found, expected = model(patches, visible).predictions, plain_forward(model, patches, visible)
    assert [each.shape for each in found] == [each.shape for each in expected] and len(found) == len(model.outputs)
    generator = torch.Generator().manual_seed(1)
    along = [torch.randn(each.shape, generator=generator, dtype=torch.float64) for each in found]
    parameters = dict(model.named_parameters())
    losses = [sum((a * b).mean() for a, b in zip(some, along, strict=True)) for some in (found, expected)]
    ours = torch.autograd.grad(losses[0], list(parameters.values()))  # all of them take part
    theirs = torch.autograd.grad(losses[1], list(parameters.values()), materialize_grads=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
        assert other.std() > 0.1
    for name, one, other in zip(parameters, ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10, msg=name)
        assert case or one.any(), name


def test_masked_patches_are_not_read() -> None:
    """Other values in masked patches change no prediction, and in a visible patch change all of them."""
    settings = config()
    model = small_model(settings)
    patches, visible = model_inputs(settings)
    before = model(patches, visible).predictions
    count = model.grid**2
    masked = torch.ones(len(visible), 3 * count, dtype=torch.bool).scatter(1, visible, False)
    hidden = {
        name: torch.where(masked[:, i * count : (i + 1) * count, None], 3 - values.clamp(0, 1), values)
        for i, (name, values) in enumerate(patches.items())
    }
    assert all(not torch.equal(hidden[name], patches[name]) for name in ALL)
    for one, other in zip(model(hidden, visible).predictions, before, strict=True):
        assert torch.equal(one, other)
    modality, place = ALL[int(visible[0, 0]) // count], int(visible[0, 0]) % count
    shown = {name: values.clone() for name, values in patches.items()}
    shown[modality][0, place] = 3 - shown[modality][0, place].clamp(0, 1)
    for one, other in zip(model(shown, visible).predictions, before, strict=True):
        assert (one[0] != other[0]).any(-1).all() and torch.equal(one[1], other[1])
