"""Loss and gradients against transformers' ViTMAE; import and export of weights for ViTMAE and timm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from tests.unit.models.small_images import GRID, PATCH, config, crops, loss_of, small_model
from tests.unit.models.vitmae_peer import images_and_noise, vitmae
from trp_scale.config import Config
from trp_scale.models.patches import patchify
from trp_scale.models.positions import PositionOrder
from trp_scale.pretraining.mae.image_weights import is_encoder, published_name
from trp_scale.pretraining.mae.model import MaskedAutoencoder
from trp_scale.pretraining.mae.upstream import MaskedPatchReconstruction
from trp_scale.pretraining.mae.weights import load_weights, stored_positions, to_timm, to_vitmae

MAE = config(tokens="visible")


def loaded(state: Mapping[str, Tensor], settings: Config = MAE) -> MaskedAutoencoder:
    model = MaskedAutoencoder(settings)
    load_weights(model, state)
    return model


@pytest.mark.parametrize("target", ["normalised", "pixels"])
def test_loss_and_gradients_are_those_of_vitmae(target: str) -> None:
    settings = config(tokens="visible")
    settings.objective.target = target  # type: ignore[assignment]
    peer = vitmae(settings).double()
    model = loaded(peer.state_dict()).double()
    model.encoder_positions = peer.vit.embeddings.position_embeddings.detach()[0, 1:]
    model.decoder_positions = peer.decoder.decoder_pos_embed.detach()[0, 1:]
    batch = crops(3)
    images, noise = images_and_noise(batch)
    expected = peer(images, noise=noise)
    expected.loss.backward()
    assert expected.mask.bool().nonzero()[:, 1].view(3, -1).equal(batch.masked)

    objective = MaskedPatchReconstruction(settings.objective, PATCH)
    prediction = model(*batch).prediction
    wanted = objective.target(batch.patches).gather(1, batch.masked.unsqueeze(-1).expand_as(prediction))
    loss = (prediction - wanted).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss, expected.loss, rtol=1e-9, atol=0)
    theirs = {name: parameter.grad for name, parameter in peer.named_parameters() if parameter.requires_grad}
    ours = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    found = to_vitmae(ours, grid=GRID)  # gradients are renamed as weights are
    for name, gradient in theirs.items():
        torch.testing.assert_close(found[published_name(name)], gradient, rtol=0, atol=1e-11, msg=name)
        assert name.endswith(("k_proj.bias", "key.bias")) or gradient.abs().max() > 1e-6, name


@pytest.mark.parametrize("order", ["column_row", "row_column"])
def test_weights_go_to_vitmae_and_back_unchanged(order: PositionOrder) -> None:
    settings = config(tokens="visible", position_order=order)
    model = small_model(settings, dtype=torch.float32)
    weights = dict(model.named_parameters())
    peer = vitmae(settings)
    state = to_vitmae(weights, grid=GRID, order=order)
    own_names = {published_name(name): name for name in peer.state_dict()}
    peer.load_state_dict({own_names[name]: tensor for name, tensor in state.items()})
    batch = crops(3, dtype=torch.float32)
    images, noise = images_and_noise(batch)
    with torch.no_grad():
        logits = peer(images, noise=noise).logits.gather(1, batch.masked.unsqueeze(-1).expand(-1, -1, 3 * PATCH**2))
        torch.testing.assert_close(model(*batch).prediction, logits, rtol=0, atol=1e-5)
    for given in (state, peer.state_dict()):
        back = dict(loaded(given, settings).named_parameters())
        assert all(torch.equal(back[name], tensor) for name, tensor in weights.items())


def random_images() -> Tensor:
    return torch.randn(3, 3, GRID * PATCH, GRID * PATCH, generator=torch.Generator().manual_seed(2))


def timm_vit(image_size: int = GRID * PATCH) -> VisionTransformer:
    """Return timm's model with the encoder's sizes."""
    sizes = {"embed_dim": 24, "depth": 2, "num_heads": 2, "mlp_ratio": 40 / 24, "num_classes": 0}
    return VisionTransformer(img_size=image_size, patch_size=PATCH, **sizes).eval()


@pytest.mark.parametrize("order", ["column_row", "row_column"])
def test_weights_go_to_timm_and_back_unchanged(order: PositionOrder) -> None:
    settings = config(position_order=order)
    model = small_model(settings, dtype=torch.float32)
    weights = dict(model.named_parameters())
    state = to_timm(weights, patch_size=PATCH, image_size=GRID * PATCH, order=order)
    peer = timm_vit()
    peer.load_state_dict(state)
    images = random_images()
    everything = torch.arange(GRID**2).expand(3, -1)
    with torch.no_grad():
        found = model.features(patchify(images, PATCH), everything)
        torch.testing.assert_close(found, peer.forward_features(images), rtol=0, atol=1e-5)
    other = small_model(settings, seed=1, dtype=torch.float32)
    decoder = {name: p.detach().clone() for name, p in other.named_parameters() if not is_encoder(name)}
    load_weights(other, state | {"head.weight": torch.ones(10, 24), "head.bias": torch.ones(10)})
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, decoder.get(name, weights[name])), name
    settings.vision.position_order = "column_row" if order == "row_column" else "row_column"
    with pytest.raises(ValueError, match=f"--vision.position_order {order}"):
        load_weights(small_model(settings, dtype=torch.float32), state)


def test_positions_for_timm_are_those_of_its_images() -> None:
    weights = dict(small_model(config(), dtype=torch.float32).named_parameters())
    state = to_timm(weights, patch_size=PATCH, image_size=32)
    timm_vit(32).load_state_dict(state)
    torch.testing.assert_close(state["pos_embed"], stored_positions(8, 24), rtol=0, atol=0)
    load_weights(small_model(config(), dtype=torch.float32), state)  # another grid is no other model


def test_position_of_the_class_token_is_added_to_the_token() -> None:
    state = to_timm(dict(small_model(MAE, dtype=torch.float32).named_parameters()), patch_size=PATCH, image_size=20)
    peer = timm_vit()
    state["pos_embed"][0, 0] = torch.randn(24)
    peer.load_state_dict(state)
    model = MaskedAutoencoder(MAE)
    load_weights(model, state)
    images = random_images()
    with torch.no_grad():
        found = model.features(patchify(images, PATCH), torch.arange(GRID**2).expand(3, -1))
        torch.testing.assert_close(found, peer.forward_features(images), rtol=0, atol=1e-5)


def test_relative_tables_keep_their_values() -> None:
    relative = config(tokens="visible", positions="relative")
    source = small_model(MAE, dtype=torch.float32)
    state = to_vitmae(dict(source.named_parameters()), grid=GRID)
    model = loaded(state, relative)
    batch = crops(dtype=torch.float32)
    torch.testing.assert_close(model(*batch), source(*batch), rtol=0, atol=1e-5)  # tables of zero


@pytest.mark.parametrize("tokens", ["visible", "all"])
def test_learned_positions_get_gradients(tokens: Literal["visible", "all"]) -> None:
    """Of the class token, visible patches and, if the encoder has them, masked ones; by finite differences."""
    settings = config(tokens=tokens)
    settings.vision.learned_positions = True
    model, batch = small_model(settings), crops(1)
    loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
    gradient = model.pos_embed.grad
    hidden = 1 + batch.masked[0]
    assert gradient[hidden].abs().sum().gt(0) == (tokens == "all")
    for place in (0, 1 + int(batch.visible[0, 2]), int(hidden[3])):
        moved = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                model.pos_embed[place, 5] += step
                moved.append(float(loss_of(model, batch)))
                model.pos_embed[place, 5] -= step
        assert float(gradient[place, 5]) == pytest.approx((moved[0] - moved[1]) / 2e-5, abs=1e-8)


def test_an_adversary_that_shifts_sine_cosine_positions_needs_them() -> None:
    settings = config(tokens="all", kind="absolute_coordinate")
    settings.vision.learned_positions = True
    assert any("--vision.learned_positions" in problem for problem in settings.problems())
    settings.vision.tokens = "visible"
    assert not any("--vision.learned_positions" in problem for problem in settings.problems())


def test_mismatched_weights_are_refused_without_changes() -> None:
    model = small_model(MAE, dtype=torch.float32)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    state = to_vitmae(before, grid=GRID)
    wrong = {
        "decoder_norm.bias": {k: v for k, v in state.items() if "der_norm.b" not in k},
        "adapter": state | {"adapter": torch.ones(3)},
        r"prediction.bias \(7,\)": state | {"decoder.decoder_pred.bias": torch.ones(7)},
        "vit.embeddings.position_embeddings": {k: v for k, v in state.items() if "position_emb" not in k},
        "decoder.decoder_pos_embed": state | {"decoder.decoder_pos_embed": torch.randn(1, 26, 16)},
        "decoder.decoder_pos_embed: not": state | {"decoder.decoder_pos_embed": torch.randn(1, 25, 16)},
    }
    for name, given in wrong.items():
        with pytest.raises(ValueError, match=name):
            load_weights(model, given)
    with pytest.raises(ValueError, match="pos_embed"):
        load_weights(model, timm_vit().state_dict())  # timm's own positions are learned
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
