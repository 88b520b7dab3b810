"""Choose images of a data set, encode them, and draw the similarity within and between classes (MLO-MAE C.3, Table
13), the plane of all images (Figure 6), and attention maps."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from trp_scale.config import RefusedError
from trp_scale.core.batch import Batch
from trp_scale.data.fetch import BatchBuilder
from trp_scale.data.hashing import Integers
from trp_scale.data.images.dataset import ImageDataset, open_image_dataset
from trp_scale.data.index import read_json
from trp_scale.data.plan import HeldOutPlan, MixtureMember
from trp_scale.data.raw_files import require_dataset
from trp_scale.errors import quote
from trp_scale.evaluation.encoders import BATCH, FrozenEncoder
from trp_scale.evaluation.figures.pictures import DPI, figure_class, show_image, small_axes
from trp_scale.finetuning.classification.batch import MeasuredImages
from trp_scale.finetuning.classification.settings import ClassificationTaskConfig
from trp_scale.finetuning.measurement import all_blocks
from trp_scale.models.attention import attention_shares
from trp_scale.models.positions import RelativeInputs
from trp_scale.models.vit import ImageEncoder, TransformerBlock

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class ImageChoice(NamedTuple):
    """Chosen images of a data set.

    Attributes:
        positions: [n] indices in stored order, shuffled so that the first few have many classes.
        classes: names, or numbers if there are none; empty for images without classes.
    """

    dataset: ImageDataset
    positions: Integers
    classes: tuple[str, ...]

    def class_name(self, label: int) -> str:
        """Name of a class; empty if unknown."""
        return self.classes[label] if 0 <= label < len(self.classes) else ""


def choose_images(data: Path, most: int) -> ImageChoice:
    """Choose at most `most` images of a data set; all for 0. Raises DataError for damaged data, RefusedError for
    other data."""
    require_dataset(data, f"--data {data}")
    kind = read_json(data / "dataset.json").get("kind")
    if kind != "image":
        raise RefusedError(f"--data {data}: kind {quote(kind)}; expected 'image': shards of trp-scale shard-images")
    dataset = open_image_dataset(data)
    classes = dataset.meta.classes or ()
    if "cls" in dataset.meta.suffixes and not classes:
        classes = tuple(str(number) for number in range(1 + int(dataset.samples.labels.max())))
    order = np.random.default_rng(0).permutation(dataset.samples.rows)
    return ImageChoice(dataset, order[:most] if most > 0 else order, classes)


def measured_images(config: ClassificationTaskConfig, choice: ImageChoice) -> Iterator[Batch]:
    """Yield batches of the images with the test transform of a classifier (crops.size, augmentation)."""
    config = copy.deepcopy(config)
    config.downstream.classes = max(1, len(choice.classes))
    return planned_batches(MeasuredImages(config, [choice.dataset], choice.dataset.meta), choice)


def planned_batches(builder: BatchBuilder, choice: ImageChoice) -> Iterator[Batch]:
    """Yield batches of the chosen images. Raises RefusedError if an image cannot be read."""
    blocks = choice.dataset.blocks
    (chosen,) = all_blocks([blocks])
    plan = HeldOutPlan(members=[MixtureMember(name="", weight=Fraction(1), table=blocks, chosen=chosen)])
    for first in range(0, len(choice.positions), BATCH):
        batch = builder.build(plan.locate(choice.positions[first : first + BATCH]), first)
        if batch.corrupt:
            raise RefusedError(
                f"--data {choice.dataset.directory}: {', '.join(batch.corrupt[:3])} cannot be read; copy or shard the "
                "data again"
            )
        yield batch


@dataclass(frozen=True, kw_only=True)
class ShownImages:
    """First of the chosen images.

    Attributes:
        images: [R, 3, S, S] in [0, 1], as the encoder sees them.
        labels: [R] classes, -1 without.
    """

    choice: ImageChoice
    images: Tensor
    labels: Tensor


@dataclass(frozen=True, kw_only=True)
class EncodedImages:
    """Features of n images.

    Attributes:
        features: [n, D] fp32.
        labels: [n] classes, -1 without.
        block: of the attention.
        attention: [N, N] float64 over patches, mean over heads and images.
        shown: images to show.
        shown_attention: [R, N, N] over patches, mean over heads, of the images to show.
    """

    features: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]
    block: int
    attention: Tensor
    shown: ShownImages
    shown_attention: Tensor


@torch.no_grad()
def encode_images(
    encoder: FrozenEncoder, config: ClassificationTaskConfig, choice: ImageChoice, *, block: int, shown: int
) -> EncodedImages:
    """Read and encode the images. Raises RefusedError if an image cannot be read.

    Args:
        config: of the encoder and its input images.
        block: with the recorded attention.
        shown: number of images for pictures.
    """
    features, labels = [], []
    images: list[Tensor] = []
    maps: list[Tensor] = []
    patches = encoder.module.grid**2
    total = torch.zeros(patches, patches, dtype=torch.float64)
    with recorded_attention(encoder.module, block) as recorded:
        for batch in measured_images(config, choice):
            features.append(encoder(batch["images"]).cpu().numpy())  # [B, D]
            labels.append(batch["labels"].numpy())
            attention = recorded.pop().cpu()  # [B, N, N]
            total += attention.double().sum(0)
            if (missing := shown - sum(len(batch_images) for batch_images in images)) > 0:
                images.append(batch["images"][:missing].float() / 255.0)
                maps.append(attention[:missing])
    return EncodedImages(
        features=np.concatenate(features),
        labels=np.concatenate(labels),
        block=block,
        attention=total / len(choice.positions),
        shown=ShownImages(
            choice=choice._replace(positions=choice.positions[:shown]),
            images=torch.cat(images),
            labels=torch.from_numpy(np.concatenate(labels)[:shown]),
        ),
        shown_attention=torch.cat(maps),
    )


@dataclass(frozen=True, kw_only=True)
class ClassSimilarity:
    """Mean cosine similarities.

    Attributes:
        intra: over all pairs of images of one class.
        inter: over all pairs of images of different classes.
        ratio: intra / inter; `None` if inter is not positive, since the quotient is then meaningless.
    """

    intra: float
    inter: float
    ratio: float | None


def class_similarity(features: npt.NDArray[np.floating], labels: npt.NDArray[np.integer]) -> ClassSimilarity:
    """Compute mean similarities over all pairs of features [n, D] with labels [n], in float64.

    Sums over pairs come from the sums of unit vectors: |s|^2 counts each pair twice and each image with itself once.
    The cost is n x D instead of n^2 x D. Raises RefusedError for fewer than two classes, no class with two images, or
    zero features.
    """
    wide = features.astype(np.float64)
    norms = np.linalg.norm(wide, axis=1, keepdims=True)
    if not norms.all() or not np.isfinite(norms).all():
        raise RefusedError(
            "a representation is zero or not finite, so it has no cosine; check the training of the encoder"
        )
    units = wide / norms  # [n, D]
    classes, index, counts = np.unique(labels, return_inverse=True, return_counts=True)
    same_pairs = float((counts * (counts - 1)).sum()) / 2
    other_pairs = len(labels) * (len(labels) - 1) / 2 - same_pairs
    if same_pairs == 0 or other_pairs == 0:
        raise RefusedError(
            f"{len(labels)} images of {len(classes)} classes; expected at least two classes, one of them with two "
            "images; raise --images"
        )
    sums = np.zeros((len(classes), units.shape[1]))  # [C, D]
    np.add.at(sums, index, units)
    same = (float(np.square(sums).sum()) - len(labels)) / 2
    every = (float(np.square(units.sum(0)).sum()) - len(labels)) / 2
    intra, inter = same / same_pairs, (every - same) / other_pairs
    return ClassSimilarity(intra=intra, inter=inter, ratio=intra / inter if inter > 0 else None)


PlaneKind = Literal["pca", "tsne"]


def project_to_plane(features: npt.NDArray[np.floating], kind: PlaneKind) -> tuple[npt.NDArray[np.floating], str]:
    """Project [n, D] to [n, 2], deterministically. Return the points and a caption."""
    if kind == "pca":
        from sklearn.decomposition import PCA

        fitted = PCA(n_components=2, svd_solver="full").fit(features)
        share = float(fitted.explained_variance_ratio_.sum())
        return fitted.transform(features), f"first two principal components, {share:.1%} of the variance"
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(features) - 1) / 3)
    points = TSNE(n_components=2, init="pca", perplexity=perplexity, random_state=0).fit_transform(features)
    return points, f"t-SNE, perplexity {perplexity:g}; distances between groups mean little"


def draw_plane(
    points: npt.NDArray[np.floating],
    labels: npt.NDArray[np.integer],
    names: Sequence[str],
    title: str,
    path: Path,
) -> None:
    """Draw each image as a point in the colour of its class.

    Args:
        points: [n, 2].
        labels: [n], all -1 without classes.
        names: of the classes.
    """
    from matplotlib import colormaps

    figure = figure_class()(figsize=(7.5, 6), layout="constrained")
    axes = figure.subplots()
    classes = np.unique(labels).tolist()
    palette = colormaps["tab10" if len(classes) <= 10 else "tab20"]
    for number, label in enumerate(classes):
        across, up = points[labels == label].T
        name = names[label] if 0 <= label < len(names) else str(label)
        axes.scatter(across, up, s=9, alpha=0.75, color=palette(number % palette.N), label=name, linewidths=0)
    axes.set(xticks=[], yticks=[])
    axes.set_title(title, fontsize=10)
    if 1 < len(classes) <= 20:  # more classes share colours
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9, markerscale=2, frameon=False)
    figure.savefig(path, dpi=DPI)


Position = tuple[int, int]
"""Row and column of a patch."""

BRIGHTEST = 0.995
"""Quantile of attention at the end of the colour scale, so that few patches do not hide the rest."""


def attention_weights(block: TransformerBlock, tokens: Tensor, relative: RelativeInputs | None) -> Tensor:
    """Compute softmax(Q K^T / sqrt(D / H) + bias), which the block itself never stores.

    Args:
        block: without gradients.
        tokens: [B, T, D] input of the block.
        relative: input of its relative bias (AdPE 4.2).

    Returns:
        [B, H, T, T] fp32: row i is the attention of token i; sums to one.
    """
    queries, keys, _ = (
        part.unflatten(-1, (block.heads, -1)).transpose(1, 2)
        for part in block.attn.qkv(block.norm1(tokens)).chunk(3, dim=-1)
    )  # [B, H, T, D / H]
    bias = None if block.relative_positions is None else block.relative_positions(queries, relative)
    return attention_shares(queries, keys, bias)


@contextmanager
def recorded_attention(encoder: ImageEncoder, number: int) -> Iterator[list[Tensor]]:
    """Record the attention of one block at each encoder pass in this context.

    Yields:
        a list of [B, N, N] fp32, mean over heads, without the class token; rows sum to at most one.
    """
    maps: list[Tensor] = []

    def record(block: nn.Module, arguments: tuple[Any, ...]) -> None:
        assert isinstance(block, TransformerBlock)
        with torch.no_grad():
            maps.append(attention_weights(block, *arguments).mean(1)[:, 1:, 1:])

    handle = encoder.blocks[number].register_forward_pre_hook(record)
    try:
        yield maps
    finally:
        handle.remove()


def mean_distance(attention: Tensor) -> float:
    """Return the mean attention distance in patches of `attention` [N, N]; each row has weight one."""
    grid = round(attention.shape[0] ** 0.5)
    patches = torch.cartesian_prod(torch.arange(grid), torch.arange(grid)).double()  # [N, 2]
    shares = attention.double() / attention.double().sum(1, keepdim=True)
    return float((shares * torch.cdist(patches, patches)).sum(1).mean())


def default_positions(grid: int) -> list[Position]:
    """Return three by three positions over the grid; fewer on a small grid."""
    along = sorted({grid // 6, grid // 2, grid - 1 - grid // 6})
    return [(row, column) for row in along for column in along]


def draw_attention(images: Tensor, attention: Tensor, positions: Sequence[Position], path: Path) -> None:
    """Draw a row per image: the image, then the attention of the patch at each position.

    Args:
        images: [R, 3, S, S] in [0, 1].
        attention: [R, N, N] over patches.
        positions: (row, column) of the query patches.
    """
    grid = round(attention.shape[1] ** 0.5)
    axes, figure = small_axes(len(images), 1 + len(positions))
    for row, (image, maps) in enumerate(zip(images, attention, strict=True)):
        show_image(axes[row, 0], image)
        chosen = torch.stack([maps[grid * at[0] + at[1]] for at in positions])
        brightest = float(chosen.quantile(BRIGHTEST))
        for column, (position, values) in enumerate(zip(positions, chosen, strict=True), start=1):
            _show_map(axes[row, column], values.view(grid, grid), position, brightest)
    axes[0, 0].set_title("image", fontsize=8)
    for column, position in enumerate(positions, start=1):
        axes[0, column].set_title(f"{position[0]}, {position[1]}", fontsize=8)
    figure.savefig(path, dpi=DPI)


def draw_average_attention(attention: Tensor, positions: Sequence[Position], path: Path) -> None:
    """Draw the attention [N, N] of the patch at each position, averaged over images, on one colour scale."""
    grid = round(attention.shape[0] ** 0.5)
    columns = min(len(positions), 9)
    rows = -(-len(positions) // columns)
    axes, figure = small_axes(rows, columns, side=1.5)
    chosen = torch.stack([attention[grid * at[0] + at[1]] for at in positions])
    brightest = float(chosen.quantile(BRIGHTEST))
    drawn = None
    for panel, position, values in zip(axes.flat, positions, chosen, strict=False):
        drawn = _show_map(panel, values.view(grid, grid), position, brightest)
        panel.set_title(f"{position[0]}, {position[1]}", fontsize=8)
    figure.colorbar(drawn, ax=axes.ravel().tolist(), shrink=0.8, label="attention")
    figure.savefig(path, dpi=DPI)


def _show_map(axes: Axes, values: Tensor, position: Position, brightest: float) -> Any:
    drawn = axes.imshow(values.numpy(), cmap="magma", vmin=0.0, vmax=brightest)
    row, column = position
    square = [column - 0.5, column + 0.5, column + 0.5, column - 0.5, column - 0.5]
    axes.plot(square, [row - 0.5, row - 0.5, row + 0.5, row + 0.5, row - 0.5], color="cyan", linewidth=1.0)
    return drawn
