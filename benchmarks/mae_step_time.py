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

import torch
import tyro
from torch import Tensor
from transformers import ViTMAEForPreTraining

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.image_steps import ImageStepOptions, image_recipe, mae_objective, mae_workload, random_images
from benchmarks.peer import peer_step_of, print_same_work, set_training
from benchmarks.rounds import alternate, print_pairs, print_ratios
from benchmarks.steps import Precision, endless
from trp_scale.core.batch import Batch
from trp_scale.engines.plain import PlainEngine
from trp_scale.models.patches import unpatchify
from trp_scale.pretraining.mae.export import vitmae_config
from trp_scale.pretraining.mae.settings import MaeConfig
from trp_scale.pretraining.mae.weights import published_name, to_vitmae


@dataclass(kw_only=True)
class Options(ImageStepOptions):
    """What to measure."""

    precision: Precision = "bf16"
    """Of forward and backward, on both sides."""
    compile: bool = False
    """torch.compile on both sides."""


def our_step(config: MaeConfig, device: torch.device) -> tuple[Callable[[], Tensor], PlainEngine]:
    """Objective, backward pass, check of the gradients and optimizer, as in the loop."""
    work = mae_workload(config)
    engine, objective, batch = work.plain(device), work.objective, work.rows.to(device)

    def step() -> Tensor:
        losses = objective(engine, batch)
        loss = losses.sums[0] / losses.counts[0]
        engine.backward(loss, last=True)
        engine.check_gradients()
        engine.step(config.optimizer.lr)
        return loss.detach()

    return step, engine


def peer_inputs(config: MaeConfig, batch: Batch) -> dict[str, Tensor]:
    """Normalised images [B, 3, S, S], and noise [B, N] of which the smallest values choose the visible patches."""
    patches = mae_objective(config).patches(batch)  # [B, N, P]
    visible = batch["visible"].flatten(0, 1)  # [B, V]
    steps = torch.arange(patches.shape[1]) / (2 * patches.shape[1])  # no ties
    noise = torch.ones(patches.shape[:2]).scatter(1, visible, 0.0) + steps
    return {"pixel_values": unpatchify(patches, config.vision.patch_size), "noise": noise}


def peer_step(
    config: MaeConfig, device: torch.device, weights: dict[str, Tensor]
) -> tuple[Callable[[], Tensor], torch.nn.Module]:
    """transformers' model as its documentation has it."""
    description = vitmae_config(config)
    description._attn_implementation = "sdpa"
    peer = ViTMAEForPreTraining(description)
    grid = config.crops.size // config.vision.patch_size
    own_names = {published_name(name): name for name in peer.state_dict()}
    state = to_vitmae(weights, patch_size=config.vision.patch_size, grid=grid)
    peer.load_state_dict({own_names[name]: tensor for name, tensor in state.items()})
    inputs = peer_inputs(config, random_images(config, config.batch.global_size))
    return peer_step_of(peer, inputs, config, device), peer


def main(options: Options) -> None:
    device = options.device()
    config = endless(image_recipe("mae_vit_b", MaeConfig, options.model), options.rows, precision=options.precision)
    config.training.compile, config.optimizer.lr = "whole" if options.compile else "none", 1e-4
    ours, engine = our_step(config, device)
    peer, module = peer_step(config, device, engine.full_weights())
    set_training(True, engine, module)
    print(f"{options.rows} images of {config.crops.size} px, ViT {options.model}, {options.precision}, {device.type}, ")
    print(f"{torch.get_num_threads()} threads; ", end="")
    print_same_work(float(ours()), float(peer()))
    measured = alternate({"trp_scale": ours, "transformers": peer}, rounds=options.rounds)
    print_ratios(measured, "transformers")
    print_pairs(measured, "transformers")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
