"""Models made without content: each rank fills its pieces, and the weights are those of the model made whole."""

from __future__ import annotations

import ctypes
import platform
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.checkpoints import unequal
from tests.grids import always
from tests.ranks import Ranks
from tests.synthetic import TWO_RANKS, VOCABULARY, Layout, data_group, engine_of, small_config
from tests.synthetic_images import image_config
from tests.synthetic_modalities import CLASSES, modality_config
from trp_scale.config.registry import engine_rules
from trp_scale.models.initialise import build_with_initialisers, initial_tensor
from trp_scale.pretraining.mae.model import MaskedAutoencoder
from trp_scale.pretraining.mm_mae.model import MultimodalMaskedAutoencoder
from trp_scale.pretraining.pos_bert.model import BertForMaskedPositions

MMAP_THRESHOLD = -3
"""Of glibc's mallopt."""
MODELS = ("PoS-BERT", "MAE", "MM-MAE")


def model_of(name: str, layout: Layout) -> nn.Module:
    if name == "MAE":
        return MaskedAutoencoder(image_config(layout))
    if name == "MM-MAE":
        return MultimodalMaskedAutoencoder(modality_config(layout), {"semseg": CLASSES})
    config = small_config(layout)
    model = BertForMaskedPositions(config.model, vocab_size=VOCABULARY, seed=config.training.seed)
    model.set_output_bias(torch.linspace(-1, 1, VOCABULARY))
    return model


def engine_weights(layout: Layout, name: str) -> dict[str, Tensor]:
    """What an engine holds of a model that was made without content; and that it was."""
    config = image_config(layout) if name == "MAE" else small_config(layout)
    module = build_with_initialisers(lambda: model_of(name, layout))
    assert all(parameter.is_meta for parameter in module.parameters())
    engine = engine_of(layout, module, config, data_group())
    weights = engine.full_weights()
    engine.close()
    return weights


@pytest.mark.parametrize(
    ("layout", "name"),
    always(
        product(["plain", *TWO_RANKS], MODELS),
        *(("plain", "MAE"), ("ddp", "PoS-BERT"), ("fsdp", "MM-MAE"), ("zero2", "MAE"), ("zero3", "PoS-BERT")),
    ),
)
def test_every_engine_fills_what_the_model_made_whole_has(two_ranks: Ranks, name: str, layout: str) -> None:
    found = two_ranks.run_layout(engine_weights, {"plain": Layout(), **TWO_RANKS}[layout], name)[0]
    whole = dict(model_of(name, Layout()).named_parameters())
    assert unequal(found, whole) == []


def peak_rise(whole: bool) -> tuple[int, int]:
    """Bytes by which a rank's resident set rose at most while FSDP2 got a model, and those of the model's weights."""
    config = small_config(Layout(engine="fsdp"), model={"layers": 6, "hidden_size": 768, "intermediate_size": 3072})
    make = partial(BertForMaskedPositions, config.model, vocab_size=4096, seed=0)
    allocator = ctypes.CDLL(None)
    allocator.mallopt(MMAP_THRESHOLD, 1 << 17)  # what is freed goes back to the system, and is not there for the model
    allocator.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    module = make() if whole else build_with_initialisers(make)
    size = 4 * sum(parameter.numel() for parameter in module.parameters())
    engine = engine_rules("fsdp").build(module, config, device=torch.device("cpu"), data_group=data_group())
    rise = resident("VmHWM") - before
    engine.close()
    return rise, size


def resident(field: str) -> int:
    """Bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the peak of a resident set is read from Linux")
def test_no_rank_ever_has_the_whole_model(two_ranks: Ranks) -> None:
    """Half of it, and the largest tensor beside; 0.6 measured, 1.1 where the model was made whole."""
    for rise, size in two_ranks(peak_rise, False):
        assert rise < 0.8 * size
    assert min(rise for rise, _ in two_ranks(peak_rise, True)) > 0.95 * size


class Own(nn.Module):
    """A model of somebody else's, which knows nothing of shapes."""

    def __init__(self, touched: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 3)
        if touched:
            with torch.no_grad():
                self.second.weight.copy_(initial_tensor(1, "second", (3, 4), 0.1))


@pytest.mark.parametrize("touched", [False, True])
def test_a_model_with_first_values_of_its_own_is_made_whole(touched: bool) -> None:
    assert not any(parameter.is_meta for parameter in build_with_initialisers(lambda: Own(touched)).parameters())


def test_values_that_change_after_they_were_noted_are_not_lost() -> None:
    def changed() -> nn.Module:
        model = model_of("PoS-BERT", Layout())
        with torch.no_grad():
            next(model.parameters())[:2].add_(1.0)
        return model

    found = build_with_initialisers(changed)
    for value, wanted in zip(found.parameters(), changed().parameters(), strict=True):
        assert torch.equal(value, wanted)
