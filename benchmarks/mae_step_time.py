"""Step time of ours against transformers' ViTMAEForPreTraining: same weights, same images, same masks, same precision.

    python benchmarks/mae_step_time.py [--precision fp32] [--rows 32] [--compile]

ViT-Ti/16 (12 x 192) with MAE's decoder (8 x 512, 16 heads), 224 px, fused AdamW and SDPA on both sides. The peer gets
its masks as noise and its images as normalised floats; ours turns bytes into those within the step. The first losses
are checked to be equal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from torch import Tensor
from transformers import ViTMAEForPreTraining

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.image_steps import EncoderSize, random_images, resized
from benchmarks.rounds import alternate, print_pairs, print_ratios
from trp_scale.config import Config
from trp_scale.core.batch import Batch
from trp_scale.engines.optimizer import build_optimizer
from trp_scale.engines.plain import PlainEngine
from trp_scale.models.patches import unpatchify
from trp_scale.recipes.loader import load_recipe
from trp_scale.upstreams.mae.export import vitmae_config
from trp_scale.upstreams.mae.model import MaskedAutoencoder
from trp_scale.upstreams.mae.objective import MaskedPatchReconstruction
from trp_scale.upstreams.mae.weights import published_name, to_vitmae

LR = 1e-4
SAME_LOSS = 1e-3


@dataclass(kw_only=True)
class Options:
    """What to measure."""

    rows: int = 32
    """Images per step."""
    rounds: int = 7
    """Measured steps of each."""
    model: EncoderSize = "tiny"
    """ViT-Ti, S, B or L."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Of forward and backward, on both sides."""
    compile: bool = False
    """torch.compile on both sides."""
    threads: int = 0
    """Threads of torch; 0 = as torch chooses."""


def our_step(config: Config, batch: Batch, device: torch.device) -> tuple[Callable[[], Tensor], PlainEngine]:
    """Objective, backward pass, check of the gradients and optimizer, as in the loop."""
    engine = PlainEngine(MaskedAutoencoder(config), config, device=device)
    objective = MaskedPatchReconstruction(config.objective, config.vision.patch_size)
    batch = batch.to(device)

    def step() -> Tensor:
        losses = objective(engine, batch)
        loss = losses.sums[0] / losses.counts[0]
        engine.backward(loss, last=True)
        engine.check_gradients()
        engine.step(LR)
        return loss.detach()

    return step, engine


def peer_inputs(config: Config, batch: Batch) -> dict[str, Tensor]:
    """Normalised images [B, 3, S, S], and noise [B, N] of which the smallest values choose the visible patches."""
    objective = MaskedPatchReconstruction(config.objective, config.vision.patch_size)
    patches = objective.patches(batch)  # [B, N, P]
    visible = batch["visible"].flatten(0, 1)  # [B, V]
    steps = torch.arange(patches.shape[1]) / (2 * patches.shape[1])  # no ties
    noise = torch.ones(patches.shape[:2]).scatter(1, visible, 0.0) + steps
    return {"pixel_values": unpatchify(patches, config.vision.patch_size), "noise": noise}


def peer_step(
    config: Config, batch: Batch, device: torch.device, weights: dict[str, Tensor]
) -> tuple[Callable[[], Tensor], torch.nn.Module]:
    """transformers' model as its documentation has it."""
    description = vitmae_config(config)
    description._attn_implementation = "sdpa"
    peer = ViTMAEForPreTraining(description)
    grid = config.crops.size // config.vision.patch_size
    own_names = {published_name(name): name for name in peer.state_dict()}
    state = to_vitmae(weights, patch_size=config.vision.patch_size, grid=grid)
    peer.load_state_dict({own_names[name]: tensor for name, tensor in state.items()})
    peer.to(device)
    optimizer = build_optimizer(peer, config.optimizer)
    forward = torch.compile(peer) if config.training.compile else peer
    inputs = {name: value.to(device) for name, value in peer_inputs(config, batch).items()}

    def step() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=config.training.precision == "bf16"):
            loss = forward(**inputs).loss
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = LR
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()  # type: ignore[no-any-return]

    return step, peer


def main(options: Options) -> None:
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = resized(load_recipe("mae_vit_b"), options.model)
    config.training.precision, config.training.compile = options.precision, options.compile
    batch = random_images(config, options.rows)
    ours, engine = our_step(config, batch, device)
    peer, module = peer_step(config, batch, device, engine.full_weights())
    engine.train(True), module.train()
    first = [float(ours()), float(peer())]
    assert abs(first[0] - first[1]) < SAME_LOSS * abs(first[1]), f"the losses differ: ours {first[0]}, peer {first[1]}"
    print(f"{options.rows} images of {config.crops.size} px, ViT {options.model}, {options.precision}, {device.type}, ")
    print(f"{torch.get_num_threads()} threads; first loss {first[0]:.5f} and {first[1]:.5f}")
    measured = alternate({"trp_scale": ours, "transformers": peer}, rounds=options.rounds)
    print_ratios(measured, "transformers")
    print_pairs(measured, "transformers")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
