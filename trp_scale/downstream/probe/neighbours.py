"""Weighted nearest neighbours (Wu et al. 2018, 3.4; as DINO measures, Caron et al. 2021)."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from trp_scale.data.hashing import Integers
from trp_scale.downstream.probe.arguments import KnnSettings
from trp_scale.downstream.probe.features import Features, LabelledFeatures

CHUNK = 1024
"""Images whose neighbours are looked for at once."""


def nearest_neighbours(train: LabelledFeatures, features: Features, settings: KnnSettings) -> Integers:
    """[m] the class with most of the vote: of the k training images with the largest cosine, each votes for its class
    with exp(cosine / temperature). Where there are fewer than k, all vote.

    Args:
        train: who votes.
        features: [m, D].
        settings: k and temperature.
    """
    known = F.normalize(torch.from_numpy(train.features), dim=1)  # [n, D]
    labels = torch.from_numpy(train.labels)
    classes, k = int(labels.max()) + 1, min(settings.k, len(labels))
    found = []
    for part in torch.split(torch.from_numpy(features), CHUNK):
        cosines, nearest = (F.normalize(part, dim=1) @ known.T).topk(k, dim=1)  # [c, k]
        # The largest is taken off: a low temperature would overflow.
        votes = ((cosines - cosines[:, :1]) / settings.temperature).double().exp()
        scores = votes.new_zeros(len(part), classes).scatter_add_(1, labels[nearest], votes)  # [c, K]
        found.append(scores.argmax(dim=1))
    predicted: Integers = torch.cat(found).numpy().astype(np.int64)
    return predicted
