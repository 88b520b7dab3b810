"""How representations lie: images of one class and of two (MLO-MAE C.3, Table 13), and all in a plane (Figure 6)."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from trp_scale.config import RefusedError


@dataclass(frozen=True, kw_only=True)
class ClassSimilarity:
    """Mean cosine similarities of representations.

    Attributes:
        intra: over all pairs of two images of one class.
        inter: over all pairs of two images of different classes.
        ratio: intra / inter; None where inter is not positive, since a quotient then says nothing.
    """

    intra: float
    inter: float
    ratio: float | None


def class_similarity(features: npt.NDArray[np.floating], labels: npt.NDArray[np.integer]) -> ClassSimilarity:
    """Similarities over every pair, each pair counted once.

    Sums over pairs are those of the classes' summed unit vectors: |s|^2 counts each pair twice and each image with
    itself once, so the cost is n x D and not n^2 x D. In float64.

    Args:
        features: [n, D].
        labels: [n] classes.

    Raises:
        RefusedError: fewer than two classes, no class with two images, or a representation that is zero.
    """
    wide = features.astype(np.float64)
    norms = np.linalg.norm(wide, axis=1, keepdims=True)
    if not norms.all() or not np.isfinite(norms).all():
        raise RefusedError(
            "a representation is zero or not finite: it has no cosine; look at how the encoder was trained"
        )
    units = wide / norms  # [n, D]
    classes, index, counts = np.unique(labels, return_inverse=True, return_counts=True)
    same_pairs = float((counts * (counts - 1)).sum()) / 2
    other_pairs = len(labels) * (len(labels) - 1) / 2 - same_pairs
    if same_pairs == 0 or other_pairs == 0:
        raise RefusedError(
            f"{len(labels)} images of {len(classes)} classes; allowed: two classes or more, two images of one: "
            "look at more images (--images)"
        )
    sums = np.zeros((len(classes), units.shape[1]))  # [C, D]
    np.add.at(sums, index, units)
    same = (float(np.square(sums).sum()) - len(labels)) / 2
    every = (float(np.square(units.sum(0)).sum()) - len(labels)) / 2
    intra, inter = same / same_pairs, (every - same) / other_pairs
    return ClassSimilarity(intra=intra, inter=inter, ratio=intra / inter if inter > 0 else None)


PlaneKind = Literal["pca", "tsne"]

PERPLEXITY = 30.0
"""t-SNE: neighbours that a point keeps, fewer of few images."""


def check_library() -> None:
    """Refuse where scikit-learn is not installed."""
    if importlib.util.find_spec("sklearn") is None:
        raise RefusedError("representations in a plane need scikit-learn: pip install 'trp-scale[evaluation]'")


def plane(features: npt.NDArray[np.floating], kind: PlaneKind) -> tuple[npt.NDArray[np.floating], str]:
    """[n, D] -> [n, 2], and a sentence about it; the same every time."""
    if kind == "pca":
        from sklearn.decomposition import PCA

        fitted = PCA(n_components=2, svd_solver="full").fit(features)
        share = float(fitted.explained_variance_ratio_.sum())
        return fitted.transform(features), f"first two principal components, {share:.1%} of the variance"
    from sklearn.manifold import TSNE

    perplexity = min(PERPLEXITY, (len(features) - 1) / 3)
    placed = TSNE(n_components=2, init="pca", perplexity=perplexity, random_state=0).fit_transform(features)
    return placed, f"t-SNE, perplexity {perplexity:g}; distances between groups mean little"
