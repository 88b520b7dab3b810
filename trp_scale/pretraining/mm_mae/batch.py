"""Batches of images with aligned maps: one crop and one flip per sample, and the patches that the encoder sees (TRP
4.2.1).

Every row has the same number of visible patches. A draw from a symmetric Dirichlet distribution splits it among the
modalities; the visible patches of a modality are uniform. All draws are hashes of the row's word.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trp_scale.config import RefusedError
from trp_scale.core.batch import Batch
from trp_scale.data.fetch import BatchBuilder
from trp_scale.data.hashing import Integers, Words, mix, name_hash
from trp_scale.data.images.crops import Cropper, crop_words
from trp_scale.data.images.dataset import ImageDataset, ImageMeta, RowReader, agree_images, open_image_dataset
from trp_scale.data.mixture import MemberPath
from trp_scale.data.plan import Addresses, row_states
from trp_scale.data.sources import Rows, require_kind
from trp_scale.pretraining.mae.batch import random_order
from trp_scale.pretraining.mm_mae.settings import MmMaeConfig, predicted_modality, used_modalities
from trp_scale.pretraining.modalities.base import Modality
from trp_scale.pretraining.tasks import source_field


class RunModalities:
    """Modalities of a run.

    Attributes:
        inputs: names of the input modalities.
        tasks: names of the tasks, in the order of every [T] vector.
        used: input and predicted modalities by name, in the order of a sample's members.

    Raises:
        RefusedError: an unknown input or task, or a registered class that is not a modality.
    """

    def __init__(self, config: MmMaeConfig) -> None:
        self.inputs: tuple[str, ...] = tuple(config.modalities.inputs)
        self.tasks: tuple[str, ...] = tuple(config.modalities.outputs)
        self._names = {task: predicted_modality(task).name for task in self.tasks}
        self.used: dict[str, Modality] = {}
        for kind in used_modalities(self.inputs, self.tasks):
            settings = getattr(config, kind.name, None) if kind.has_settings else None
            modality = kind.load()(settings or kind.settings(), config.vision.patch_size)
            if not isinstance(modality, Modality) or modality.name != kind.name:
                raise RefusedError(
                    f"{kind.module} registers {type(modality).__name__} as the modality {kind.name!r}; allowed: a "
                    f"class derived from trp_scale.Modality, with name = {kind.name!r}"
                )
            self.used[kind.name] = modality

    def output_modality(self, task: str) -> Modality:
        """Return the modality that a task predicts."""
        return self.used[self._names[task]]

    @property
    def stored(self) -> tuple[str, ...]:
        """Names of the modalities that are stored as maps."""
        return tuple(name for name, kind in self.used.items() if kind.format is not None)


def visible_slots(visible: Tensor, tokens: int) -> Tensor:
    """Return the index of each of I N tokens among the visible tokens: [R, V] -> [R, I N] int64; V for masked tokens.

    Token i N + p is patch p (of N, row by row) of input modality i (TRP 4.2.1; Bachmann et al., 3.1).
    """
    rows, count = visible.shape
    order = torch.arange(count, device=visible.device).expand(rows, -1)
    return torch.full((rows, tokens), count, device=visible.device).scatter(1, visible, order)


_SHARES = np.uint64(name_hash("mask: shares of modalities"))
_PATCHES = np.uint64(name_hash("mask: patches of modalities"))

_LEAST = -600.0
"""Smallest logarithm of a share relative to the largest: such a share gets patches only after the others are full."""

Shares = npt.NDArray[np.float64]


class ModalityMasks:
    """Draws the visible patches.

    Args:
        modalities: number of input modalities, I.
        patches: patches per modality, N.
        visible: visible patches of all modalities, V, at most I N.
        concentration: concentration of the Dirichlet distribution; values other than 1 need scipy.
    """

    def __init__(self, *, modalities: int, patches: int, visible: int, concentration: float) -> None:
        if concentration != 1.0:
            _inverse_gamma(concentration)  # raise here, not in a worker
        self._modalities, self._patches, self._visible = modalities, patches, visible
        self._concentration = concentration

    def draw(self, words: Words) -> Integers:
        """Draw the visible tokens [R, V], ascending, from one word per row [R]."""
        numbers = np.arange(self._modalities, dtype=np.uint64)
        shares = draw_shares(mix(words ^ _SHARES)[:, None] ^ numbers, self._concentration)  # [R, I]
        counts = share_out(shares, self._visible, self._patches)  # [R, I]
        order = random_order(mix(mix(words ^ _PATCHES)[:, None] ^ numbers), self._patches)  # [R, I, N]
        tokens = order + np.arange(self._modalities)[:, None] * self._patches
        seen = np.arange(self._patches) < counts[:, :, None]  # [R, I, N] the first patches of each order
        visible = tokens[seen].reshape(len(words), self._visible)  # [R, V]: every row has V visible tokens
        visible.sort(axis=1)
        return visible


def draw_shares(words: Words, concentration: float) -> Shares:
    """Draw shares from a symmetric Dirichlet distribution, one per word [R, I], as gamma variables over their sum."""
    uniform = ((mix(words) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52  # in (0, 1), ends excluded
    logarithms = _log_gamma(uniform, concentration)
    logarithms -= logarithms.max(axis=1, keepdims=True)
    gammas = np.exp(np.maximum(logarithms, _LEAST))
    shares: Shares = gammas / gammas.sum(axis=1, keepdims=True)
    return shares


def _log_gamma(uniform: Shares, concentration: float) -> Shares:
    """Return logarithms of Gamma(concentration) variables, by the inverse of their distribution function."""
    if concentration == 1.0:
        exponential: Shares = np.log(-np.log(uniform))
        return exponential
    values = _inverse_gamma(concentration)(concentration, uniform)
    tiny = values < 1e-100  # may underflow to 0; here the distribution function is x^c / Gamma(c + 1)
    small = (np.log(uniform) + math.lgamma(concentration + 1)) / concentration
    result: Shares = np.where(tiny, small, np.log(np.where(tiny, 1.0, values)))
    return result


def _inverse_gamma(concentration: float) -> Callable[[float, Shares], Shares]:
    """Return scipy.special.gammaincinv. Nothing else needs scipy."""
    try:
        from scipy.special import gammaincinv  # type: ignore[import-untyped]
    except ImportError as error:
        raise RefusedError(
            f"--modalities.concentration {concentration} needs scipy: pip install 'trp-scale[evaluation]', "
            f"or use 1, as in the paper"
        ) from error
    inverse: Callable[[float, Shares], Shares] = gammaincinv
    return inverse


def share_out(shares: Shares, total: int, most: int) -> Integers:
    """Round shares x total to integers by largest remainders, [R, I], none above `most`; rows sum to `total`.

    The excess of a full modality goes to the others in proportion to their shares.

    Args:
        shares: [R, I] above 0, rows sum to 1.
        total: at most I x most.
        most: maximum per modality.
    """
    quotas = shares * total
    for _ in range(shares.shape[1] - 1):  # each iteration fills at least one modality, or changes nothing
        full = quotas >= most
        left = total - most * full.sum(axis=1, keepdims=True)  # [R, 1] patches for modalities that are not full
        open_shares = np.where(full, 0.0, shares)
        sums = open_shares.sum(axis=1, keepdims=True)
        quotas = np.where(full, float(most), open_shares * left / np.where(sums > 0, sums, 1.0))
    counts = np.floor(quotas).astype(np.int64)
    missing = total - counts.sum(axis=1)  # [R] 0 .. I - 1
    rank = np.argsort(np.argsort(counts - quotas, axis=1, kind="stable"), axis=1)  # 0: largest remainder
    counts += rank < missing[:, None]
    return counts


class MultimodalBatchBuilder(BatchBuilder):
    """Builds batches of R images, one crop of S x S pixels each, with N patches in each of I input modalities.

    Fields of the batch:
        visible [R, V] int64, ascending: patch p of input modality i is token i N + p.
        labels [R] int64: the class of the image, or -1.
        row_weights [R] float32: 1, or 0 for a row that is absent or cannot be decoded; its image is grey, its maps
            unknown.
        fields of each used modality (Modality.fields), for example images [R, 3, S, S] uint8, or depth [R, S, S] uint16
            with depth_statistics [R, 3] float32 and depth_counts [R, N] int32.

    All draws come from (training.seed, row key, epoch modulo masking.maskings).
    """

    def __init__(self, config: MmMaeConfig, datasets: list[ImageDataset], meta: ImageMeta) -> None:
        self._config = config
        self._seed, self._maskings = config.training.seed, config.masking.maskings
        self._rows = RowReader(datasets, meta, verify=config.data.verify)
        self._cropper = Cropper(config.crops)
        self._modalities = RunModalities(config).used
        self._stored = [{maps.name: maps for maps in dataset.maps} for dataset in datasets]
        patches = (config.crops.size // config.vision.patch_size) ** 2
        inputs, visible = len(config.modalities.inputs), config.modalities.visible_tokens
        self._masks = ModalityMasks(
            modalities=inputs, patches=patches, visible=visible, concentration=config.modalities.concentration
        )
        self.limit = inputs * patches - visible
        """Masked patches of all inputs."""

    def build(self, addresses: Addresses, start: int) -> Batch:
        """Build the batch of the rows at `addresses`; the first is at position `start` of its source."""
        began = time.perf_counter()
        states = row_states(addresses, seed=self._seed, maskings=self._maskings)
        rows = self._rows.read(addresses, self._cropper.scales(states))
        crops = self._cropper.draw(states, rows.sizes)
        visible = torch.from_numpy(self._masks.draw(crop_words(states, 1)[:, 0]))
        fields = {"visible": visible, **source_field(self._config, addresses)}
        of_rows = [self._stored[member] for member in addresses.member.tolist()]
        for name, modality in self._modalities.items():
            stored = [] if modality.format is None else [maps[name] for maps in of_rows]
            fields |= modality.fields(rows, crops, self._cropper, stored)
        return rows.batch(fields, addresses, start=start, began=began)


def open_rows(config: MmMaeConfig, paths: Sequence[MemberPath]) -> Rows:
    """Open image data sets (see `Upstream.open_rows`)."""
    require_kind(paths, config.reads)
    stored = RunModalities(config).stored
    datasets = [open_image_dataset(path.path, path.name, stored) for path in paths]
    meta = agree_images(datasets)
    return Rows.from_datasets(
        datasets, meta, MultimodalBatchBuilder(config, datasets, meta), [dataset.samples.labels for dataset in datasets]
    )
