"""Pascal VOC 2007's average precision: one overlap threshold, eleven points of recall (Everingham et al. 2010, 4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

OVERLAP = 0.5
POINTS = 11


@dataclass(frozen=True, kw_only=True)
class Truth:
    """Objects of one class in one image.

    Attributes:
        boxes: [n, 4] left, top, right, bottom.
        difficult: [n] objects that need not be found, and whose detection counts neither way.
    """

    boxes: Floats
    difficult: npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Found:
    """Detections of one class, of all images.

    Attributes:
        image: [n] number of the image, into the list of truths.
        boxes: [n, 4].
        scores: [n].
    """

    image: npt.NDArray[np.int64]
    boxes: Floats
    scores: Floats


def average_precision(truths: Sequence[Truth], found: Found) -> float | None:
    """The mean over the recalls 0, 0.1, ..., 1 of the highest precision at that recall or a higher one.

    Detections are taken by falling score, equal ones in the order they are given. Each belongs to the object of its
    image that it overlaps most. If that is by a half or more, the first detection of the object is right and every
    further one wrong; detections of difficult objects count neither way; all others are wrong.

    Returns:
        None where there is no object that has to be found.
    """
    objects = sum(int((~truth.difficult).sum()) for truth in truths)
    if objects == 0:
        return None
    right = np.cumsum(counted) if len(counted := matches(truths, found)) else np.zeros(0, dtype=np.int64)  # [k]
    precision = right / np.arange(1, len(right) + 1)
    # In whole numbers, since 3 objects of 10 would not reach the recall 3 x 0.1 in floating point.
    reached = [right * (POINTS - 1) >= point * objects for point in range(POINTS)]
    return float(np.mean([precision[there].max() if there.any() else 0.0 for there in reached]))


def matches(truths: Sequence[Truth], found: Found) -> npt.NDArray[np.bool_]:
    """[k] by falling score: whether each detection that counts is right."""
    seen = [np.zeros(len(truth.boxes), dtype=np.bool_) for truth in truths]
    right = []
    for place in np.argsort(-found.scores, kind="stable").tolist():
        image = int(found.image[place])
        shares = overlaps(found.boxes[place], truths[image].boxes)  # [n]
        best = int(shares.argmax()) if len(shares) else -1
        if best < 0 or shares[best] < OVERLAP:
            right.append(False)
        elif not truths[image].difficult[best]:
            right.append(not seen[image][best])
            seen[image][best] = True
    return np.array(right, dtype=np.bool_)


def overlaps(box: Floats, boxes: Floats) -> Floats:
    """[n] intersection over union of a box [4] with boxes [n, 4]."""
    sides = np.minimum(box[2:], boxes[:, 2:]) - np.maximum(box[:2], boxes[:, :2])  # [n, 2]
    both = np.clip(sides, 0.0, None).prod(axis=1)
    either = (box[2:] - box[:2]).prod() + (boxes[:, 2:] - boxes[:, :2]).prod(axis=1) - both
    shares: Floats = both / either
    return shares
