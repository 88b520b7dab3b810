"""With MultiMAE's weights, our model predicts the same as MultiMAE for the same images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.grids import always
from tests.synthetic_modalities import CLASSES, PATCH, SIDE, STRIDE, batch, depth_of
from tests.unit.checkpoint.test_initial_weights import equal, made_as_shapes
from tests.unit.models.multimae_peer import predict, random_weights
from tests.unit.models.small_modalities import ALL, EVERY_TASK, config, small_model
from trp_scale.checkpoint.initial_weights import load_given_weights
from trp_scale.config import Config, RefusedError
from trp_scale.config.loader import load_recipe
from trp_scale.models.patches import patchify
from trp_scale.pretraining.mm_mae.model import MultimodalMaskedAutoencoder
from trp_scale.pretraining.mm_mae.settings import predicted_modality
from trp_scale.pretraining.mm_mae.upstream import MultimodalReconstruction
from trp_scale.pretraining.mm_mae.weights import ADAPTERS, load_multimae

CHANNELS = {"rgb": 3, "raw_rgb": 3, "depth": 1, "semseg": CLASSES}
GRID = SIDE // PATCH


def settings_like_theirs(**changes: Any) -> Config:
    return config(**{"outputs": EVERY_TASK, "position_order": "row_column", **changes})


def published(settings: Config, *, inputs: tuple[str, ...] = ALL, void: int = 0) -> dict[str, Tensor]:
    """A MultiMAE of the sizes of the settings, with decoders for all tasks."""
    model, vision = settings.model, settings.vision
    return random_weights(
        {name: CLASSES + void if name == "semseg" else CHANNELS[name] for name in inputs},
        their_outputs(EVERY_TASK),
        patch=PATCH,
        stride=STRIDE,
        width=model.hidden_size,
        feed_forward=model.intermediate_size,
        layers=model.layers,
        decoder=vision.decoder_hidden_size,
        decoder_layers=vision.decoder_layers,
        grid=GRID,
        embedding=settings.semseg.class_embedding,
    )


def their_outputs(tasks: tuple[str, ...]) -> dict[str, tuple[str, int]]:
    return {ADAPTERS[task]: (predicted_modality(task).name, CHANNELS[task]) for task in tasks}


def loaded(settings: Config, state: dict[str, Tensor]) -> MultimodalMaskedAutoencoder:
    model = small_model(settings)
    load_multimae(model, state)
    return model


@pytest.mark.parametrize("inputs", [ALL, ("semseg", "rgb"), ("depth",)], ids=" ".join)
def test_predictions_equal_multimae(inputs: tuple[str, ...]) -> None:
    """MultiMAE reads whole images by convolutions and assembles predictions, so this checks the order of pixels, rows,
    columns and classes too. It has no embedding of a modality that is not an input."""
    settings = settings_like_theirs(inputs=inputs)
    state = published(settings, inputs=inputs)
    model = loaded(settings, state)
    rows = batch(range(2), 9, len(inputs))
    rows.fields["semseg"].clamp_(max=CLASSES - 1)  # theirs knows no void label
    objective = MultimodalReconstruction(settings)
    patches = objective.patches(rows)
    found = model(objective.seen(patches, rows), rows["visible"]).predictions
    # Patches are made of these by ours; theirs reads them as they are.
    pixels = {"rgb": normalised_pixels(patches["rgb"]), "depth": depth_of(rows).nan_to_num(0.0).unsqueeze(1).double()}
    whole: dict[str, Tensor] = {**pixels, "semseg": rows["semseg"].long()}
    for row in range(2):
        visible = [(inputs[number // GRID**2], number % GRID**2) for number in rows["visible"][row].tolist()]
        theirs = predict(
            state,
            {name: whole[name][row] for name in inputs},
            visible,
            outputs=their_outputs(EVERY_TASK),
            heads=settings.model.heads,
            decoder_heads=settings.vision.decoder_heads,
        )
        for task, prediction in zip(EVERY_TASK, found, strict=True):
            side = PATCH // STRIDE if task == "semseg" else PATCH
            expected = patchify(theirs[ADAPTERS[task]][None], side)[0]
            torch.testing.assert_close(prediction[row], expected, rtol=0, atol=1e-9, msg=task)
            assert expected.std() > 0.1


def normalised_pixels(patches: Tensor) -> Tensor:
    """[R, N, P] -> [R, 3, S, S], put together here so that patchify is tried too."""
    grid = patches.double().view(-1, GRID, GRID, PATCH, PATCH, 3)
    return torch.einsum("rabhwc->rcahbw", grid).reshape(-1, 3, SIDE, SIDE)


def test_all_parameters_are_imported_and_void_keeps_its_vector() -> None:
    settings = settings_like_theirs(outputs=ALL)
    before = {name: parameter.detach().clone() for name, parameter in small_model(settings).named_parameters()}
    state = published(settings)
    after = dict(loaded(settings, state).named_parameters())
    width = settings.semseg.class_embedding
    classes = "tokenisers.semseg.class_embedding"
    assert after[classes][:-width].equal(state["input_adapters.semseg.class_emb.weight"].flatten())
    assert after[classes][-width:].equal(before[classes][-width:])
    assert not any(torch.isclose(after[name], before[name]).any() for name in after if name != classes)
    with_void = published(settings, void=1)["input_adapters.semseg.class_emb.weight"]
    state = published(settings) | {"input_adapters.semseg.class_emb.weight": with_void}
    assert dict(loaded(settings, state).named_parameters())[classes].equal(with_void.flatten())


def test_a_run_starts_from_multimae_weights(tmp_path: Path) -> None:
    """Of MultiMAE's decoders rgb and norm_rgb, our three tasks use norm_rgb."""
    settings = settings_like_theirs(outputs=ALL)
    state = published(settings)
    save_file({name: tensor.float().contiguous() for name, tensor in state.items()}, tmp_path / "multimae.safetensors")
    given = MultimodalMaskedAutoencoder(settings, {"semseg": CLASSES})
    load_given_weights(given, str(tmp_path / "multimae.safetensors"), load_multimae)
    shapes = made_as_shapes(
        lambda: MultimodalMaskedAutoencoder(settings, {"semseg": CLASSES}),
        tmp_path / "multimae.safetensors",
        load_multimae,
    )
    assert all(equal(shapes, given).values())
    expected = dict(loaded(settings, state).named_parameters())
    for name, parameter in given.named_parameters():
        if name != "tokenisers.semseg.class_embedding":
            assert torch.equal(parameter, expected[name].float()), name


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    settings = settings_like_theirs()
    state = published(settings)

    def refusal(state: dict[str, Tensor], **changes: Any) -> str:
        file = tmp_path / "given.safetensors"
        save_file({name: tensor.float().contiguous() for name, tensor in state.items()}, file)
        model = MultimodalMaskedAutoencoder(settings_like_theirs(**changes), {"semseg": CLASSES})
        with pytest.raises(RefusedError) as refused:
            load_given_weights(model, str(file), load_multimae)
        return str(refused.value)

    assert "--modalities.encoder_norm" in refusal(state, encoder_norm=True)
    columns_first = state | {"input_adapters.depth.pos_emb": state["input_adapters.depth.pos_emb"].transpose(2, 3)}
    assert "input_adapters.depth.pos_emb" in refusal(columns_first)
    learned = state | {"output_adapters.rgb.pos_emb": torch.zeros(1, 16, GRID, GRID)}
    assert "output_adapters.rgb.pos_emb" in refusal(learned)
    fewer = {name: tensor for name, tensor in state.items() if name != "encoder.1.attn.qkv.bias"}
    assert "encoder.1.attn.qkv.bias" in refusal(fewer)
    assert "encoder.1.bias" in refusal(state | {"encoder.1.bias": torch.zeros(1)})


def without(*parts: str) -> tuple[set[str], set[str], str]:
    """Load a file without names that contain these parts: the names of all parameters, of those that keep their
    initial weights, and the message."""
    settings = settings_like_theirs()
    before = {name: parameter.detach().clone() for name, parameter in small_model(settings).named_parameters()}
    given = published(settings).items()
    model = small_model(settings)
    lines = load_multimae(model, {name: tensor for name, tensor in given if not any(part in name for part in parts)})
    kept = {name for name, parameter in model.named_parameters() if parameter.equal(before[name])}
    return set(before), kept, "; ".join(lines)


def test_absent_modalities_keep_their_initial_weights() -> None:
    names, kept, message = without("output_adapters.depth.")
    assert kept == {name for name in names if name.startswith("decoders.depth.")}
    assert "decoders.depth" in message


def test_an_input_that_the_file_lacks_starts_fresh_in_decoders_too() -> None:
    names, kept, message = without("input_adapters.depth.", ".task_embeddings.depth")
    assert {name for name in names if "depth_embedding" in name and name.startswith("decoders.")} <= kept
    assert "tokenisers.depth" in message and "embeddings of depth" in message


@pytest.mark.parametrize(
    "recipe",
    always(["mm_mae_vit_b_in1k_400", "mm_mae_vit_b_in1k_1600", "mm_mae_vit_b_s50_800"], "mm_mae_vit_b_in1k_400"),
)
def test_recipes_of_the_paper_import_multimae_b(recipe: str) -> None:
    """All weights of a MultiMAE-B, here with one block, are imported, and all of ours are set."""
    settings = load_recipe(recipe)
    settings.model.layers = 1
    state = random_weights(
        {"rgb": 3, "depth": 1, "semseg": 133},
        {"norm_rgb": ("rgb", 3), "rgb": ("rgb", 3), "depth": ("depth", 1), "semseg": ("semseg", 133)},
        patch=16,
        stride=4,
        width=768,
        feed_forward=3072,
        layers=1,
        decoder=256,
        decoder_layers=2,
        grid=14,
        embedding=64,
    )
    model = MultimodalMaskedAutoencoder(settings, {"semseg": 133})
    load_multimae(model, state)
    assert torch.equal(model.decoders["rgb"].mask_token, state["output_adapters.norm_rgb.mask_token"].flatten().float())
