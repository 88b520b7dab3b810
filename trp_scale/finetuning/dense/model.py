"""Heads for dense prediction, and the model of encoder and head.

linear: one layer on each patch token. convnext: the head of MultiMAE (Bachmann et al. 2022). dpt: neck and depth head
of DPT (Ranftl et al. 2021). upernet: Xiao et al. 2018. The last two are modules of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from timm.models.convnext import ConvNeXtBlock
from torch import Tensor, nn

from trp_scale.checkpoint.export import Pair, WeightNames
from trp_scale.core.run import tensor_seed
from trp_scale.finetuning.dense.settings import DenseConfig, DenseTaskConfig
from trp_scale.models.batch_norm import BatchNorm
from trp_scale.models.initialise import initialise_vision, set_all
from trp_scale.models.vit import ImageEncoder, OnImageEncoder

OUTPUT_SCALE = 0.01
"""Scale of the last layer's initial weights: classes start almost equally likely, and depth at its mean."""


class DenseHead(nn.Module):
    """Converts tokens of encoder blocks to maps. Arguments of heads: `width` is D of tokens, `outputs` is C of maps.

    Attributes:
        after: numbers of the blocks to read, ascending, with possible repeats; empty = the encoder's normalised output.
        outputs: names of the last layers.
        multimae: table of MultiMAE's names for the weights; `None` for other heads.
    """

    after: tuple[int, ...] = ()
    outputs: tuple[str, ...] = ()
    multimae: WeightNames | None = None

    def forward(self, tokens: list[Tensor]) -> list[Tensor]:
        """Convert tokens [B, 1 + G^2, D] of each block of `after` to maps [B, C, H, W]: the prediction, and that of an
        auxiliary head if one exists."""
        raise NotImplementedError(f"{type(self).__name__} has no forward")


def as_map(tokens: Tensor) -> Tensor:
    """Drop the class token and reshape: [B, 1 + G^2, D] -> [B, D, G, G]."""
    batch, length, width = tokens.shape
    grid = math.isqrt(length - 1)
    return tokens[:, 1:].transpose(1, 2).reshape(batch, width, grid, grid)


def quarters(blocks: int) -> tuple[int, ...]:
    """Return the last block of each quarter: 2, 5, 8, 11 of 12; encoders of fewer than four blocks repeat some."""
    return tuple(-(-quarter * blocks // 4) - 1 for quarter in (1, 2, 3, 4))


def group_norm(channels: int) -> nn.GroupNorm:
    """Return a group norm of at most 32 groups. Unlike with a batch norm, results do not depend on how the batch is
    split into micro-batches."""
    groups = max(1, min(32, channels // 16))  # on a 1 x 1 map, a norm over fewer than 16 channels loses too much
    while channels % groups:
        groups -= 1
    return nn.GroupNorm(groups, channels)


def replace_batch_norms(module: nn.Module, norm: Callable[[int], nn.Module]) -> None:
    """Replace every torch.nn.BatchNorm2d, in place."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, norm(child.num_features))
        else:
            replace_batch_norms(child, norm)


def initialise_head(head: DenseHead, *, seed: int) -> None:
    """Initialise from (seed, name): matrices and kernels uniform within fan_in^(-1/2), as torch's layers, those of last
    layers scaled by OUTPUT_SCALE; biases 0, norm weights 1."""
    fans: dict[str, int] = {}
    for name, module in head.named_modules():
        if isinstance(module, nn.ConvTranspose2d):  # stride = kernel size, so kernels do not overlap
            fans[name] = module.in_channels
        elif isinstance(module, nn.Conv2d):
            fans[name] = module.in_channels // module.groups * math.prod(module.kernel_size)
        elif isinstance(module, nn.Linear):
            fans[name] = module.in_features

    def rule(name: str, parameter: nn.Parameter) -> Tensor | float:
        layer, _, kind = name.rpartition(".")
        if parameter.ndim < 2:
            return 1.0 if kind == "weight" else 0.0
        generator = torch.Generator().manual_seed(tensor_seed(seed, f"head.{name}"))
        bound = math.sqrt(1.0 / fans[layer]) * (OUTPUT_SCALE if layer in head.outputs else 1.0)
        return (2.0 * torch.rand(tuple(parameter.shape), generator=generator) - 1.0) * bound

    set_all(head, rule)


class LinearHead(DenseHead):
    """1 x 1 convolution of the encoder's normalised output."""

    outputs = ("classifier",)

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.classifier = nn.Conv2d(width, outputs, 1)

    def forward(self, tokens: list[Tensor]) -> list[Tensor]:
        """Map tokens [B, 1 + G^2, D] to [B, C, G, G]."""
        return [self.classifier(as_map(tokens[-1]))]


CELLS = 4
"""Cells of the ConvNeXt head along each side of a patch."""

BLOCKS = 4

CONVNEXT_WIDTH = 384
"""Channels of a cell: tokens are projected to 6144 = 16 x 384 values."""


class ConvNextHead(DenseHead):
    """Splits each token into 4 x 4 cells, then applies timm's ConvNeXt blocks without layer scale (Liu et al. 2022) and
    a 1 x 1 convolution. `after`: the last block for its raw tokens, as MultiMAE; else empty."""

    outputs = ("classifier",)
    multimae = WeightNames(
        Pair("projection.*", "proj_dec.*"),
        Pair("blocks.*.conv_dw.*", "blocks.*.dwconv.*"),
        Pair("blocks.*.mlp.fc1.*", "blocks.*.pwconv1.*"),
        Pair("blocks.*.mlp.fc2.*", "blocks.*.pwconv2.*"),
        Pair("blocks.*", "blocks.*"),
        Pair("classifier.*", "final_layer.*"),
    )

    def __init__(self, width: int, outputs: int, after: tuple[int, ...] = (), cell: int = CONVNEXT_WIDTH) -> None:
        super().__init__()
        self.after = after
        self.projection = nn.Linear(width, CELLS**2 * cell)
        self.blocks = nn.Sequential(*(ConvNeXtBlock(cell, ls_init_value=None) for _ in range(BLOCKS)))
        self.classifier = nn.Conv2d(cell, outputs, 1)

    def forward(self, tokens: list[Tensor]) -> list[Tensor]:
        """Map tokens [B, 1 + G^2, D] to [B, C, 4 G, 4 G]."""
        cells = self.projection(tokens[-1][:, 1:])  # [B, G^2, 16 W]
        return [self.classifier(self.blocks(finer_map(cells)))]


def finer_map(cells: Tensor) -> Tensor:
    """Reshape [B, G^2, 16 W] -> [B, W, 4 G, 4 G]: each token has 4 x 4 cells in row-major order."""
    batch, patches, _ = cells.shape
    grid = round(patches**0.5)
    parts = cells.view(batch, grid, grid, CELLS, CELLS, -1)  # [B, row, column, cell row, cell column, W]
    return parts.permute(0, 5, 1, 3, 2, 4).reshape(batch, -1, grid * CELLS, grid * CELLS)


class DptHead(DenseHead):
    """Transformers' DPT neck and depth head on tokens of four blocks: maps of 4, 2, 1 and 1/2 times the patch grid,
    fused from coarse to fine.

    Two modules of transformers are removed: the first residual unit of the first fusion, whose weights get no gradient;
    and the last ReLU, since outputs are standardised depth of either sign and start near zero.

    Fused maps have `channels` channels; maps before fusion have 3/8, 3/4, 3/2 and 3 times as many. Without
    dense.class_token, the head is MultiMAE's.
    """

    multimae = WeightNames(
        *(
            Pair(f"neck.{ours}.*", f"{theirs}.*")
            for level in range(4)
            for ours, theirs in (
                (f"reassemble_stage.layers.{level}.projection", f"act_{level + 1}_postprocess.0"),
                (f"reassemble_stage.layers.{level}.resize", f"act_{level + 1}_postprocess.1"),
                (f"convs.{level}", f"scratch.layer{level + 1}_rn"),
                # Fusions are numbered from coarse to fine here.
                (f"fusion_stage.layers.{3 - level}.projection", f"scratch.refinenet{level + 1}.out_conv"),
                (
                    f"fusion_stage.layers.{3 - level}.residual_layer*.convolution*",
                    f"scratch.refinenet{level + 1}.resConfUnit*.conv*",
                ),
            )
        ),
        Pair("decoder.head.*", "head.*"),
    )

    def __init__(self, width: int, outputs: int, after: tuple[int, ...], dense: DenseConfig) -> None:
        super().__init__()
        from transformers import DPTConfig
        from transformers.models.dpt.modeling_dpt import DPTDepthEstimationHead, DPTNeck

        if outputs != 1:
            raise ValueError(f"{outputs} outputs: the DPT head predicts depth; 1 is allowed")
        self.after, channels = after, dense.width or 256
        settings = DPTConfig(
            hidden_size=width,
            is_hybrid=False,
            neck_hidden_sizes=[channels * eighths // 8 for eighths in (3, 6, 12, 24)],
            fusion_hidden_size=channels,
            readout_type="project" if dense.class_token else "ignore",
        )
        self.neck = DPTNeck(settings)
        self.neck.fusion_stage.layers[0].residual_layer1 = nn.Identity()
        self.decoder = DPTDepthEstimationHead(settings)
        self.decoder.head[-1] = nn.Identity()
        self.outputs = (f"decoder.head.{len(self.decoder.head) - 2}",)

    def forward(self, tokens: list[Tensor]) -> list[Tensor]:
        """Map four tensors [B, 1 + G^2, D] to [B, 1, 16 G, 16 G]."""
        return [self.decoder(self.neck(tokens)).unsqueeze(1)]


class UperNetHead(DenseHead):
    """Transformers' UPerNet on tokens of four blocks, rescaled to 4, 2, 1 and 1/2 times the patch grid by transposed
    convolutions and pooling (Bao et al. 2022, He et al.). With dense.auxiliary_weight, a small second head reads the
    third map. dense.norm replaces torch's batch norms."""

    def __init__(self, width: int, outputs: int, after: tuple[int, ...], dense: DenseConfig) -> None:
        super().__init__()
        from transformers import UperNetConfig
        from transformers.models.upernet.modeling_upernet import UperNetFCNHead
        from transformers.models.upernet.modeling_upernet import UperNetHead as LibraryHead

        self.after = after
        norm = BatchNorm if dense.norm == "batch" else group_norm
        settings = UperNetConfig(
            hidden_size=dense.width or 512, num_labels=outputs, auxiliary_channels=256, auxiliary_num_convs=1
        )
        widths = [width] * len(after)
        self.pyramid = Pyramid(width, norm)
        self.decoder = LibraryHead(settings, widths)
        # The auxiliary head reads the third feature map, as in MMSegmentation.
        self.auxiliary = UperNetFCNHead(settings, widths, in_index=2) if dense.auxiliary_weight else None
        replace_batch_norms(self, norm)
        for head in filter(None, (self.decoder, self.auxiliary)):
            head.classifier.register_forward_pre_hook(
                lambda layer, maps: F.dropout2d(maps[0], dense.dropout, layer.training)
            )
        self.outputs = ("decoder.classifier", "auxiliary.classifier")

    def forward(self, tokens: list[Tensor]) -> list[Tensor]:
        """Map four tensors [B, 1 + G^2, D] to [B, C, 4 G, 4 G], and [B, C, G, G] for an auxiliary head."""
        maps = self.pyramid([as_map(layer) for layer in tokens])
        outputs = [self.decoder(maps)]
        return outputs if self.auxiliary is None else [*outputs, self.auxiliary(maps)]


def rescale(width: int, level: int, norm: Callable[[int], nn.Module], shrink: int = 1) -> tuple[nn.Module, int]:
    """Return a module that rescales a map to 4, 2, 1 or 1/2 times its resolution by `level`, and its output channels.

    Each doubling is a transposed convolution of stride 2, with a norm and GELU between two; halving is max pooling (Li
    et al. 2021; Li et al. 2022, where each doubling divides the channels by `shrink`).
    """
    half = nn.ConvTranspose2d(width, width // shrink, 2, stride=2)
    if level == 0:
        quarter = nn.ConvTranspose2d(width // shrink, width // shrink**2, 2, stride=2)
        return nn.Sequential(half, norm(width // shrink), nn.GELU(), quarter), width // shrink**2
    if level == 1:
        return half, width // shrink
    return (nn.Identity() if level == 2 else nn.MaxPool2d(2)), width


class Pyramid(nn.Module):
    """Rescales four maps of D = `width` channels to four resolutions."""

    def __init__(self, width: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.levels = nn.ModuleList(rescale(width, level, norm)[0] for level in range(4))

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        """Map four tensors [B, D, G, G] to [B, D, 4 G, 4 G], [B, D, 2 G, 2 G], [B, D, G, G], [B, D, G / 2, G / 2]."""
        return [level(tokens) for level, tokens in zip(self.levels, maps, strict=True)]


def build_head(config: DenseTaskConfig, outputs: int) -> DenseHead:
    """Build the head of a checked section `dense`, not yet initialised."""
    dense, width, blocks = config.dense, config.model.hidden_size, config.model.layers
    if dense.head == "linear":
        return LinearHead(width, outputs)
    if dense.head == "convnext":
        last = (blocks - 1,) if dense.raw_tokens else ()
        return ConvNextHead(width, outputs, last, dense.width or CONVNEXT_WIDTH)
    after = tuple(dense.after) or quarters(blocks)
    if dense.head == "upernet":
        return UperNetHead(width, outputs, after, dense)
    return DptHead(width, outputs, after, dense)


def load_multimae_head(head: DenseHead, state: Mapping[str, Tensor], task: str) -> None:
    """Set a head's weights to those of a model that MultiMAE's code has fine-tuned for `task`, depth or semseg. Raises
    ValueError: the names or shapes in the model's `state` are not those of this head."""
    assert head.multimae is not None, "checked with the settings"
    prefix = f"output_adapters.{task}."
    # Second names in a DPT head, and tensors that no forward pass uses
    parts = ("act_postprocess.", "scratch.layer_rn.", "scratch.refinenet4.resConfUnit1.")
    unused = tuple(prefix + name for name in parts)
    names = [name for name in state if name.startswith(prefix) and not name.startswith(unused)]
    head.multimae.import_weights(head, {name.removeprefix(prefix): state[name] for name in names})


class PixelModel(OnImageEncoder):
    """Encoder and head; `outputs` is C, the values of a pixel."""

    def __init__(self, config: DenseTaskConfig, outputs: int) -> None:
        super().__init__()
        self.encoder = ImageEncoder(config, biased=config.dense.position_bias)
        initialise_vision(self, seed=config.training.seed, std=config.model.initializer_range)
        self.head = build_head(config, outputs)
        initialise_head(self.head, seed=config.training.seed)

    def forward(self, images: Tensor) -> list[Tensor]:
        """Map normalised pixels [B, 3, S, S] to [B, C, S, S], and another [B, C, S, S] for an auxiliary head."""
        blocks = sorted(set(self.head.after))
        tokens = dict(zip(blocks or [0], self.encoder(images, after=blocks), strict=True))
        maps = self.head([tokens[number] for number in self.head.after] or [tokens[0]])
        size = images.shape[-2:]
        return [F.interpolate(values, size=size, mode="bilinear", align_corners=False) for values in maps]
