"""benchmarks/mlo_cost.py: its reference is right, and every row of its table is there."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import mlo_cost
from benchmarks.image_steps import ENCODERS
from benchmarks.mlo_cost import OURS, PLAIN, REFERENCE, Options, large, over_plain
from benchmarks.mlo_unrolled import Rates, UnrolledMasks
from tests.unit.models.small_images import VISIBLE, config, crops, small_model
from trp_scale.config.registry import settings_of
from trp_scale.methods.learned_masks.masking_network import FlattenedMasking
from trp_scale.pretraining.mae.settings import MaeConfig

RATES = Rates(encoder=0.3, head=0.2)
CLASSES = 3


def reference(network: nn.Module) -> UnrolledMasks:
    model = small_model(config(tokens="visible"))
    masks = UnrolledMasks(model, network, classes=CLASSES, visible=VISIBLE, unroll=1, rates=RATES)
    generator = torch.Generator().manual_seed(1)
    masks.head = [torch.randn(value.shape, generator=generator, dtype=torch.float64) for value in masks.head]
    return masks


def batches() -> tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Patches of D_u; patches and labels of D_tr and of D_val."""
    images = [crops(4, seed=seed).patches for seed in range(3)]
    labels = torch.arange(4) % CLASSES
    return images[0], (images[1], labels), (images[2], labels)


def test_the_reference_s_gradient_is_that_of_the_validation_loss() -> None:
    """Against central differences of it along a random direction, in float64; the masks stay what they are."""
    settings = config(tokens="visible")
    settings.multilevel = settings_of("multilevel", "head", hidden_size=8)
    network = FlattenedMasking(settings).double()
    masks, data = reference(network), batches()
    generator = torch.Generator().manual_seed(2)
    directions = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in network.parameters()]

    def moved(distance: float) -> Tensor:
        """The loss after the network has moved by so much further."""
        with torch.no_grad():
            for parameter, direction in zip(network.parameters(), directions, strict=True):
                parameter.add_(distance * direction)
        with sdpa_kernel(SDPBackend.MATH):
            return masks.validation_loss(*data)[0]

    gradients = torch.autograd.grad(moved(0.0), list(network.parameters()))
    along = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True))
    step = 1e-5
    slope = (moved(step).detach() - moved(-2 * step).detach()) / (2 * step)
    assert abs(float(slope)) > 1e-6
    assert float(along) == pytest.approx(float(slope), rel=1e-5)


def test_a_cycle_moves_all_three_levels() -> None:
    settings = config(tokens="visible")
    settings.multilevel = settings_of("multilevel", "head", hidden_size=8)
    network = FlattenedMasking(settings).double()
    masks = reference(network)
    masks.unroll = 2
    before = [dict(masks.weights), list(masks.head), [p.detach().clone() for p in network.parameters()]]
    unlabelled, train, held = batches()
    masks.cycle([unlabelled, unlabelled], train, held)
    assert all(not torch.equal(masks.weights[name], value) for name, value in before[0].items())
    assert all(not torch.equal(one, other) for one, other in zip(masks.head, before[1], strict=True))
    assert all(not torch.equal(one, other) for one, other in zip(network.parameters(), before[2], strict=True))
    assert not any(value.requires_grad for value in masks.weights.values())


def two_blocks(options: Options) -> MaeConfig:
    """The large model with two blocks in place of twelve, and one decoder block."""
    settings = large(options)
    settings.model.layers, settings.vision.decoder_layers = 2, 1
    return settings


@pytest.mark.exhaustive
def test_the_table_has_a_row_for_each(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlo_cost, "large", two_blocks)
    monkeypatch.setitem(ENCODERS, "tiny", (1, 24, 3))
    mlo_cost.main(Options(rows=2, rounds=1, decoder_layers=1, size=32, network="patchwise"))
    printed = capsys.readouterr().out
    for name in (PLAIN, *OURS, *REFERENCE):
        assert re.search(rf"{name} +│( +[\d.,]+ │){{4}} +[\d.]+ to [\d.]+ │( +[\d.]+ │){{2}}", printed), (name, printed)


def test_the_reference_s_arithmetic_is_more_than_ours() -> None:
    """With as many blocks as ViT-B has, W, which both pass three times each, is most of it."""
    options = Options(rows=2)
    found = over_plain(two_blocks(options), options)
    assert found[PLAIN] == 1.0
    assert found["unroll 2, every 5"] < found["unroll 2, every 1"] < found["unroll 1, every 1"]
    for unroll in (1, 2):
        ours, theirs = found[f"unroll {unroll}, every 1"], found[f"automatic differentiation, unroll {unroll}"]
        # What differs is the difference's 2 F in place of the double backward pass through F.
        assert ours < theirs < 1.5 * ours
