"""The word prediction may start at how often each piece occurs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.runs import flags, image_flags
from tests.unit.data.loaded import table_of
from trp_scale.config import RefusedError
from trp_scale.config.run_flags import parse
from trp_scale.data.split import held_out
from trp_scale.data.tar_reader import ArrayReader
from trp_scale.distributed.environment import Environment
from trp_scale.pretraining.pos_bert.upstream import TextUpstream, piece_counts

BIAS = "cls.predictions.bias"


def upstream(dataset: Path, run_dir: Path, **changes: Any) -> TextUpstream:
    config = parse(flags(dataset, run_dir, **changes)).config
    return TextUpstream(config, Environment())


def test_pieces_are_counted_as_they_are_stored(text_dataset: Path, tmp_path: Path) -> None:
    """All training rows, whole: without pairs of sentences a row is used once."""
    task = upstream(text_dataset, tmp_path, objective__next_sentence="off")
    table, blocks = table_of(text_dataset)
    reader, stored = ArrayReader(table, blocks, verify=False), np.zeros(task.meta.vocab_size, dtype=np.int64)
    for block in np.flatnonzero(~held_out(blocks.identities, 0.1, where="")):
        tokens, _, ends = reader.arrays(int(block))
        inside = np.arange(tokens.shape[1]) < ends[:, -1:].astype(np.int64)
        stored += np.bincount(tokens[inside], minlength=len(stored))
    counts = piece_counts(task.source.first_rows(task.source.rows), task.meta)
    assert counts.tolist() == stored.tolist() and stored.sum() > 10_000


def test_only_the_bias_starts_elsewhere_and_the_order_stays(text_dataset: Path, tmp_path: Path) -> None:
    ours, zero = (upstream(text_dataset, tmp_path, objective__output_bias=kind) for kind in ("frequency", "zero"))
    mine, theirs = (dict(task.model().named_parameters()) for task in (ours, zero))
    assert [name for name in theirs if not torch.equal(mine[name], theirs[name])] == [BIAS]
    vocabulary = ours.meta.vocab_size
    torch.testing.assert_close(mine[BIAS][:vocabulary].exp().sum(), torch.tensor(1.0))
    assert not mine[BIAS][vocabulary:].any() and not theirs[BIAS].any()
    counts = piece_counts(ours.source.first_rows(min(2048, ours.source.rows)), ours.meta)
    assert mine[BIAS][:vocabulary].argmax() == counts.argmax()
    assert ours.source.cursor == 0
    windows = [task.source.next_window() for task in (ours, zero)]
    assert all(torch.equal(one["tokens"], other["tokens"]) for one, other in zip(*windows, strict=True))


def test_given_weights_bring_their_own(text_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = upstream(text_dataset, tmp_path, objective__output_bias="frequency")
    task.config.model.weights = "elsewhere"

    def give(model: torch.nn.Module, settings: object, load: object) -> None:
        with torch.no_grad():
            model.get_parameter(BIAS).fill_(7.0)

    monkeypatch.setattr("trp_scale.pretraining.pos_bert.upstream.give_weights", give)
    assert (task.model().get_parameter(BIAS) == 7.0).all()


def test_images_have_none(image_dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"output_bias.*pos_bert.*run's"):
        parse(image_flags("adpe_tiny", image_dataset, tmp_path, objective__output_bias="frequency"))
