"""Draw reconstructions of each modality, perturbed positions, and masks of a masking network (MLO-MAE, Figure 4) as
PNG files."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from trp_scale.checkpoint.run_directory import PICTURES
from trp_scale.config import RefusedError
from trp_scale.config.images import PatchSplit
from trp_scale.core.batch import Batch
from trp_scale.core.hooks import Hook
from trp_scale.core.run import RunContext, tensor_seed
from trp_scale.errors import error_text
from trp_scale.evaluation.arguments import PicturesSettings
from trp_scale.evaluation.figures.trained_images import (
    TrainedImages,
    TrainedModalities,
    load_masking_network,
    load_trained,
)
from trp_scale.methods.adversary.ascent import size
from trp_scale.methods.adversary.settings import AdversarySettings
from trp_scale.methods.learned_masks.masks import MaskingNetwork, select
from trp_scale.models.patches import CHANNEL_DEVIATION, CHANNEL_MEAN, TARGET_EPS, gather_patches, unpatchify
from trp_scale.models.positions import REACH, relaxed_index
from trp_scale.pretraining.mm_mae.settings import predicted_modality

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 110


class Picture(NamedTuple):
    """PNG file and its caption."""

    path: Path
    caption: str

    def __str__(self) -> str:
        return f"{self.path}: {self.caption}"


def figure_class() -> type[Figure]:
    """Return matplotlib's figure class, without a window."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RefusedError("pictures need matplotlib; run: pip install 'trp-scale[pictures]'") from error
    return Figure


def small_axes(rows: int, columns: int, side: float = 1.2) -> tuple[Any, Any]:
    """Return panels without ticks, [rows, columns], and their figure. `side`: side of a panel in inches."""
    figure = figure_class()(figsize=(side * columns + 0.4, (side + 0.15) * rows + 0.2), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for panel in axes.flat:
        panel.set(xticks=[], yticks=[], frame_on=False)
    return axes, figure


def show_image(axes: Axes, image: Tensor) -> None:
    """Show [3, H, W] in [0, 1]."""
    axes.imshow(image.permute(1, 2, 0).numpy())


def draw_legend(figure: Figure, entries: Sequence[tuple[str, Any]]) -> None:
    """Draw a legend of (text, colour) below a figure with the layout "constrained"."""
    from matplotlib.patches import Patch

    if entries:
        handles = [Patch(facecolor=colour, label=words) for words, colour in entries]
        # A column is 1.4 inches wide.
        columns = max(1, min(len(handles), int(figure.get_figwidth() / 1.4)))
        figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)


def draw_masks(trained: TrainedImages, network: MaskingNetwork, batch: Batch, path: Path) -> str:
    """Draw images, mask probabilities, and masks of the first crops: random, of the untrained network, and of the
    learned network, each with a tenth and with the run's share of the patches. Return the caption."""
    shown = mask_strips(trained, network, batch)
    probabilities, same = shown.pop("probability"), float(shown.pop("as untrained"))
    images = len(probabilities)
    axes, figure = small_axes(len(shown) + 1, images)
    _show_strips(axes, shown)
    axes[-1, 0].set_ylabel("probability", fontsize=8)
    grid = round(probabilities.shape[1] ** 0.5)
    for column, values in enumerate(probabilities):
        drawn = axes[-1, column].imshow(values.view(grid, grid).numpy(), vmin=0, vmax=1, cmap="magma")
    figure.colorbar(drawn, ax=axes[-1, :].tolist(), shrink=0.8)
    figure.savefig(path, dpi=DPI)
    spread = float(probabilities.std(dim=0).mean()) if images > 1 else 0.0
    differing = f", standard deviation between images {spread:.3f}" if images > 1 else ""
    return (
        f"learned, untrained and random masks; learned and untrained ones share {same:.1%} of the patches; {images} "
        f"images; mean probability of a patch {float(probabilities.mean()):.3f}{differing}"
    )


@torch.no_grad()
def mask_strips(trained: TrainedImages, network: MaskingNetwork, batch: Batch) -> dict[str, Tensor]:
    """Return {"image", "random 10 %", ...}: [R, 3, S, S] in [0, 1]; "probability": [R, N]; and "as untrained": the
    share of the learned masks, at the run's ratio, that the untrained network also selects."""
    first = Batch(fields={"images": batch["images"][:, :1]}, keys=batch.keys, start=batch.start)
    patches = trained.objective.patches(first)  # [R, N, P]
    embeddings = trained.model.patch_embed(patches)  # [R, N, D]
    probabilities = network(embeddings)  # [R, N]
    untrained = type(network)(trained.config).eval()(embeddings)  # initialised from the seed, as in the run
    count, patch_size = patches.shape[1], trained.config.vision.patch_size
    orders = torch.stack([random_scores(trained.config.training.seed, key, count) for key in batch.keys.tolist()])
    strips = {"image": pixels(patches, patch_size)}
    # A tenth of the patches is masked in the paper's figure; training masks nearly everything.
    for share in (0.1, trained.config.multilevel.final_ratio or trained.config.masking.ratio):
        split = PatchSplit(patches=count, visible=min(count - 1, int(count * (1.0 - share))))
        hidden = {}
        for name, scores in (("random", orders), ("untrained", untrained), ("learned", probabilities)):
            masked = select(scores, split).masked
            hidden[name] = torch.zeros(len(patches), count).scatter(1, masked, 1.0)  # [R, N]
            brightness = 1.0 - 0.75 * hidden[name]
            strips[f"{name} {100 * share:g} %"] = pixels(patches, patch_size, brightness.unsqueeze(-1))
    same = (hidden["learned"] * hidden["untrained"]).sum() / hidden["learned"].sum()
    return {**strips, "probability": probabilities, "as untrained": same}


def pixels(patches: Tensor, patch_size: int, brightness: Tensor | None = None) -> Tensor:
    """Convert normalised patches [R, N, P] to images [R, 3, S, S] in [0, 1], scaled by the brightness [R, N, 1]."""
    mean, deviation = torch.tensor([CHANNEL_MEAN, CHANNEL_DEVIATION]).view(2, 1, 3, 1, 1)
    images: Tensor = (unpatchify(patches, patch_size) * deviation + mean).clamp(0, 1)
    if brightness is None:
        return images
    return images * unpatchify(brightness.expand_as(patches), patch_size)


def random_scores(seed: int, key: int, count: int) -> Tensor:
    """Return random scores [N] that depend only on the seed and the image."""
    generator = torch.Generator().manual_seed(tensor_seed(seed, f"masks to show/{key}"))
    return torch.rand(count, generator=generator)


TRUE_COLOURS = "hidden patches are drawn with their true mean and deviation, which are not predicted"
"""Caption for targets that are normalised by patch: colours and contrast come from the image, structure from the
prediction."""


def draw_pictures(source: Path, output: Path, rows: int = 8, data: str = "", images: Sequence[Path] = ()) -> list[str]:
    """Draw reconstructions.png; with an adversary positions.png; with a masking network masks.png. Return captions with
    the losses on these images and those of a plain guess, such as the mean of each patch.

    Args:
        source: run directory or checkpoint.
        output: directory; created if it does not exist.
        rows: maximum number of images.
        data: current path of the run's data; empty = unchanged.
        images: files to draw instead; then the run's data is not read.

    Raises:
        RefusedError: not a masked autoencoder, missing data, an unreadable image, or matplotlib is not installed.
    """
    figure_class()
    trained = load_trained(source, data)
    batch = trained.own_images(images) if images else trained.images(rows)
    return [str(picture) for picture in draw_trained(trained, batch, output)]


def draw_trained(trained: TrainedImages | TrainedModalities, batch: Batch, output: Path) -> list[Picture]:
    """Draw the pictures of a run for a batch in the run's format."""
    output.mkdir(parents=True, exist_ok=True)
    path = output / "reconstructions.png"
    if isinstance(trained, TrainedModalities):
        draw_modalities(modality_reconstructions(trained, batch), path, trained.class_names())
        by_task = task_losses(trained, batch)
        losses = ", ".join(f"{task} {loss:.4f} (plain guess {plain:.4f})" for task, (loss, plain) in by_task.items())
        note = f"; of rgb {TRUE_COLOURS}" if "rgb" in by_task else ""
        return [Picture(path, f"{losses}; {batch.rows} images{note}")]
    strips, loss, mean_patch = reconstructions(trained, batch)
    axes, figure = small_axes(len(strips), batch.rows)
    _show_strips(axes, strips)
    figure.savefig(path, dpi=DPI)
    losses = f"reconstruction loss {loss:.4f}, with each patch's mean {mean_patch:.4f}"
    note = f"; {TRUE_COLOURS}" if trained.objective.normalised else ""
    pictures = [Picture(path, f"{losses} ({batch.rows} images, clean positions){note}")]
    if trained.shape is not None and trained.perturbation is not None:
        path = output / "positions.png"
        pictures.append(Picture(path, _draw_positions(trained, path)))
    if (network := load_masking_network(trained)) is not None:
        path = output / "masks.png"
        pictures.append(Picture(path, draw_masks(trained, network, batch, path)))
    return pictures


@torch.no_grad()
def reconstructions(trained: TrainedImages, batch: Batch) -> tuple[dict[str, Tensor], float, float]:
    """Reconstruct the first crop of each image.

    Returns:
        {"image", "masked", "reconstruction"}: [R, 3, S, S] in [0, 1]. The reconstruction keeps visible patches.
            Predictions of
        normalised targets get the true patch's mean and deviation, as is usual.
        Mean squared error over masked patches of the model, and of each patch's mean.
    """
    first = {name: value[:, :1] for name, value in batch.fields.items() if name in ("images", "visible", "masked")}
    objective = trained.objective
    masked = first["masked"][:, 0]  # [R, M]
    crops = Batch(fields={**first, "row_weights": batch["row_weights"]}, keys=batch.keys, start=batch.start)
    patches = objective.patches(crops)  # [R, N, P]
    prediction = trained.model(patches, first["visible"][:, 0], masked).prediction  # [R, M, P]
    true = gather_patches(patches, masked)
    target = objective.target(true)
    loss = float((prediction - target).square().mean())
    means = torch.zeros_like(target) if objective.normalised else true.mean(-1, keepdim=True).expand_as(true)
    mean_patch = float((means - target).square().mean())
    if objective.normalised:
        variance, mean = torch.var_mean(true, dim=-1, keepdim=True)
        prediction = prediction * (variance + TARGET_EPS).sqrt() + mean
    mask = masked.unsqueeze(-1).expand_as(prediction)
    grey = (0.5 - torch.tensor(CHANNEL_MEAN)) / torch.tensor(CHANNEL_DEVIATION)  # [3]
    hidden = grey.repeat(patches.shape[-1] // 3).expand_as(prediction)
    shown = {
        "image": patches,
        "masked": patches.scatter(1, mask, hidden),
        "reconstruction": patches.scatter(1, mask, prediction),
    }
    return {name: pixels(value, trained.config.vision.patch_size) for name, value in shown.items()}, loss, mean_patch


def _show_strips(axes: Any, strips: Mapping[str, Tensor]) -> None:
    for row, (name, images) in enumerate(strips.items()):
        axes[row, 0].set_ylabel(name, fontsize=8)
        for column, image in enumerate(images):
            show_image(axes[row, column], image)


def _draw_positions(trained: TrainedImages, path: Path) -> str:
    """Draw the perturbed quantity and return the caption."""
    assert trained.shape is not None and trained.perturbation is not None
    encoder, _ = trained.shape.split(trained.perturbation)
    grid = trained.config.crops.size // trained.config.vision.patch_size
    kind, figure_of = trained.config.adversary.kind, figure_class()
    if kind == "absolute_coordinate":
        figure = figure_of(figsize=(5, 5), layout="constrained")
        _draw_shifted_grid(figure.subplots(), grid, encoder[0])
        sentence = f"the {grid} x {grid} patches before and after the shift of masked ones"
    elif kind == "relative_coordinate":
        figure = figure_of(figsize=(10, 5), layout="constrained")
        left, right = figure.subplots(1, 2)
        _draw_shifts(left, encoder, trained.config.adversary.eps)
        block = int(encoder.norm(dim=-1).argmax())
        _draw_table_places(right, grid, encoder[block], block)
        sentence = f"the shift of each block, and where block {block} finds its offsets in the table"
    else:
        figure = figure_of(figsize=(6, 4), layout="constrained")
        _draw_sizes(figure.subplots(), encoder, trained.config.adversary)
        sentence = "the largest perturbation of each block"
    figure.savefig(path, dpi=120)
    return sentence


def _draw_shifted_grid(axes: Axes, grid: int, shift: Tensor) -> None:
    row, column = torch.meshgrid(torch.arange(grid), torch.arange(grid), indexing="ij")
    axes.scatter(column, row, color="0.6", label="before")
    axes.scatter(column + float(shift[1]), row + float(shift[0]), color="tab:red", label="after, where masked")
    arrows = [torch.full(column.shape, float(shift[axis])).numpy() for axis in (1, 0)]
    axes.quiver(column, row, *arrows, angles="xy", scale_units="xy", scale=1, width=0.003, color="tab:red")
    axes.set(xlabel="column in patches", ylabel="row in patches", aspect="equal")
    axes.invert_yaxis()
    axes.legend(loc="upper right")


def _draw_shifts(axes: Axes, shifts: Tensor, eps: float) -> None:
    axes.axhline(0, color="0.85")
    axes.axvline(0, color="0.85")
    axes.scatter(shifts[:, 1], shifts[:, 0], color="tab:red")
    for block, (row, column) in enumerate(shifts.tolist()):
        axes.annotate(str(block), (column, row), textcoords="offset points", xytext=(4, 4))
    limits = (-1.2 * eps, 1.2 * eps) if eps else None
    axes.set(xlabel="column shift in patches", ylabel="row shift in patches", aspect="equal", xlim=limits, ylim=limits)
    axes.set_title(f"shift of each encoder block (eps {eps:g})")


def _draw_table_places(axes: Axes, grid: int, shift: Tensor, block: int) -> None:
    offsets = torch.arange(1 - grid, grid, dtype=torch.float32)
    row, column = torch.meshgrid(offsets, offsets, indexing="ij")
    axes.scatter(_entry(column), _entry(row), s=14, color="0.6", label="before")
    after = _entry(column + float(shift[1])), _entry(row + float(shift[0]))
    axes.scatter(*after, s=14, color="tab:red", label="after, for masked queries")
    axes.set(xlabel="column entry of the table", ylabel="row entry of the table", aspect="equal")
    axes.set_title(f"block {block}: place of every offset in the relative table")
    axes.grid(color="0.9")
    axes.legend(loc="upper right")


def _entry(offset: Tensor) -> Tensor:
    """Return the continuous index into the table, between its entries -3..3."""
    return relaxed_index(offset).clamp(-REACH, REACH)


def _draw_sizes(axes: Axes, perturbation: Tensor, adversary: AdversarySettings) -> None:
    """Draw the largest norm in each block; eps is the limit of each vector of the last dimension."""
    sizes = size(perturbation, adversary.norm).reshape(len(perturbation), -1).amax(1)  # [L]
    axes.bar(range(len(sizes)), sizes.tolist(), color="tab:red")
    axes.axhline(adversary.eps, color="0.6", linestyle="--")
    title = f"perturbation of each block (eps {adversary.eps:g})"
    axes.set(xlabel="block", ylabel=f"largest {adversary.norm} norm", title=title)


@torch.no_grad()
def modality_reconstructions(trained: TrainedModalities, batch: Batch) -> dict[str, dict[str, Tensor]]:
    """Return maps by task and stage, as of `Modality.maps`. Masked patches show the prediction, others the input;
    unseen patches are unknown."""
    objective = trained.objective
    patches = objective.patches(batch)
    output = trained.model(objective.seen(patches, batch), batch["visible"])
    hidden = objective.masked_patches(batch)
    shown = {}
    for task, prediction in zip(objective.outputs, output.predictions, strict=True):
        modality = objective.modalities.output_modality(task)
        true, masked = patches[modality.name], hidden[modality.name].unsqueeze(-1)  # [R, N, P], [R, N, 1]
        guess = modality.reconstruction(task, prediction, true)
        unknown = torch.tensor(torch.nan if true.is_floating_point() else modality.blank, dtype=true.dtype)
        stages = {
            "input": true,
            "seen": torch.where(masked, unknown, true),
            "predicted": torch.where(masked, guess, true),
        }
        shown[task] = {stage: modality.maps(stage_values) for stage, stage_values in stages.items()}
    return shown


@torch.no_grad()
def task_losses(trained: TrainedModalities, batch: Batch) -> dict[str, tuple[float, float]]:
    """Return the loss of each task and that of the plain guess (`Modality.plainest`). rgb: mean of each patch (0
    after normalisation); raw_rgb: mean colour of the data; depth: mean of the image; semseg: class frequencies of
    these images. Tasks without data are omitted."""
    objective = trained.objective
    losses = objective(trained.model, batch)
    plain = objective(_plain_guesses(trained, batch), batch)
    means = [(sums.sums / sums.counts.clamp(min=1)).tolist() for sums in (losses, plain)]
    rows = zip(objective.tasks, *means, losses.counts.tolist(), strict=True)
    return {task: (loss, guess) for task, loss, guess, count in rows if count > 0}


def _plain_guesses(trained: TrainedModalities, batch: Batch) -> Any:
    """Return a model that makes the plain guess for every task."""
    objective = trained.objective
    patches = objective.patches(batch)

    def forward(seen: dict[str, Tensor], visible: Tensor) -> Any:
        output = trained.model(seen, visible)
        predictions = []
        for task, prediction in zip(objective.outputs, output.predictions, strict=True):
            modality = objective.modalities.output_modality(task)
            predictions.append(modality.plainest(task, prediction, patches[modality.name]))
        return output._replace(predictions=tuple(predictions))

    return forward


def draw_modalities(shown: dict[str, dict[str, Tensor]], path: Path, classes: Mapping[str, Sequence[str]]) -> None:
    """Draw three rows per task and a column per image, as in TRP Figure 3; only the prediction if the input is unknown.

    Args:
        classes: class names by modality.
    """
    kinds = {task: predicted_modality(task).load() for task in shown}
    known = {task: not kinds[task].is_unknown(stages["input"]) for task, stages in shown.items()}
    rows = [
        (task, stage, maps)
        for task, stages in shown.items()
        for stage, maps in stages.items()
        if known[task] or stage == "predicted"
    ]
    axes, figure = small_axes(len(rows), len(rows[0][2]), side=1.1)
    for row, (task, stage, maps) in enumerate(rows):
        axes[row, 0].set_ylabel(f"{task}\n{stage}", fontsize=8)
        for column, map_ in enumerate(maps):
            kinds[task].show(axes[row, column], map_, shown[task]["input"][column] if known[task] else map_)
            axes[row, column].set(xticks=[], yticks=[], frame_on=False)
    entries = [
        entry
        for kind in {kind.name: kind for kind in kinds.values()}.values()
        for entry in kind.legend([maps for task, _, maps in rows if kinds[task] is kind], classes.get(kind.name, ()))
    ]
    draw_legend(figure, entries)
    figure.savefig(path, dpi=DPI)


log = logging.getLogger(__name__)


class OnlinePictures(Hook):
    """Draw pictures of checkpoints during training (see the module).

    Raises:
        RefusedError: matplotlib is not installed.
    """

    name = "pictures"

    def __init__(self, settings: PicturesSettings, run: RunContext) -> None:
        figure_class()
        self.settings, self.draws = settings, run.world.rank == 0
        self.seen = 0
        self.latest: dict[str, Any] = {}

    def after_checkpoint(self, path: Path) -> None:
        self.seen += 1
        if self.draws and (self.seen - 1) % self.settings.every == 0:
            self.draw(path)

    def draw(self, checkpoint: Path) -> None:
        """Draw a checkpoint into its run directory. Failures are logged and do not stop the run."""
        start, folder = time.monotonic(), checkpoint.parent.parent / PICTURES / checkpoint.name
        self.latest = {"step": int(checkpoint.name.rpartition("_")[2])}
        try:
            with torch.random.fork_rng(devices=[]):
                drawn = draw_pictures(checkpoint, folder, rows=self.settings.rows)
            self.latest["files"] = len(drawn)
        except Exception as error:  # the other ranks wait at the next step
            self.latest["notice"] = f"no pictures of {checkpoint.name}: {error_text(error)}"
            log.warning("%s", self.latest["notice"])  # no line of metrics may follow
        self.latest["seconds"] = time.monotonic() - start

    def metrics(self) -> Mapping[str, Any]:
        """Return the latest drawing, once. step: of the checkpoint; files: number of pictures; seconds: duration;
        notice: error."""
        latest, self.latest = self.latest, {}
        return latest
