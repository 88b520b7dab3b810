"""Representations in a plane, by principal components or t-SNE (MLO-MAE C.3, Figure 6)."""

from __future__ import annotations

import importlib.util
from typing import Literal

import numpy as np
import numpy.typing as npt

from trp_scale.config import RefusedError

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
