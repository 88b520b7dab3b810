"""Tasks by source: names, fields and refusals, and a share of the rows that is no weight. Parity: tests/parity."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.runs import flags, lines, pretrain_here
from tests.synthetic import SOURCES, Layout, row, small_config, trainer_for
from trp_scale.config import Config, RefusedError
from trp_scale.core.batch import Batch
from trp_scale.data.mixture import parse_members
from trp_scale.data.sources import Sources
from trp_scale.data.text.dataset import GROUPS
from trp_scale.pretraining.base import open_sources
from trp_scale.pretraining.pos_bert.batch import kept_positions
from trp_scale.pretraining.tasks import SOURCE, blank_batch, rows_by_source, source_names

PATH = "books:0.7=/a,wiki:0.3=/b"


def config(tasks: str = "sources", path: str = PATH, **objective: str) -> Config:
    return small_config(Layout(), objective={"tasks": tasks, **objective}, data={"path": path})


def problems(settings: Any) -> list[str]:
    return list(settings.objective.problems(settings))


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        ("parts_of_speech", GROUPS),
        ("sources", ("books", "wiki")),
        ("parts_of_speech_by_sources", (*(f"books/{g}" for g in GROUPS), *(f"wiki/{g}" for g in GROUPS))),
    ],
)
def test_names_of_the_tasks(tasks: str, words: tuple[str, ...]) -> None:
    objective = trainer_for(Layout(), config(tasks)).objective
    assert objective.tasks == (*words, "next_sentence")
    weighted = [objective.tasks[task] for task in objective.balanced]
    assert weighted == [task for task in words if not task.endswith("other")]


def test_other_words_of_each_source_keep_their_natural_share() -> None:
    objective = trainer_for(Layout(), config("parts_of_speech_by_sources")).objective
    counts = torch.arange(len(objective.tasks)).double()
    shares = counts / counts[:-1].sum()
    expected = [float(share) * task.endswith("/other") for share, task in zip(shares, objective.tasks, strict=True)]
    assert objective.outside_weights(counts).tolist() == pytest.approx([*expected[:-1], 1.0])


@pytest.mark.parametrize("other", ["exclude", "task"])
def test_sources_have_the_words_of_all_groups(other: str) -> None:
    (problem,) = problems(config(other=other))
    assert f"--objective.other is {other}" in problem
    assert problems(config("parts_of_speech_by_sources", other=other)) == []


@pytest.mark.parametrize("path", ["/a", "books:1=/a"])
def test_one_data_set_has_no_sources(path: str) -> None:
    with pytest.raises(RefusedError, match=re.escape("--data.path")):
        source_names(config(path=path))
    assert source_names(config("parts_of_speech", path)) == ()


def test_rows_by_source() -> None:
    batch = Batch(fields={SOURCE: torch.tensor([2, 0, 2])}, keys=torch.arange(3), start=0)
    assert rows_by_source(batch, 3).tolist() == [[0, 0, 1], [1, 0, 0], [0, 0, 1]]
    assert set(blank_batch(config("parts_of_speech"), 2, {}).fields) == {"row_weights"}


def test_the_source_of_a_row_is_its_member_of_the_mixture(text_dataset: Path) -> None:
    path = f"books:0.75={text_dataset},wiki:0.25={text_dataset}"
    settings = small_config(
        Layout(micro_size=8),
        objective={"tasks": "sources"},
        data={"path": path, "workers": 0, "validation_fraction": 0.2},
        model={"max_positions": 512},
    )
    sources: Sources = open_sources(settings, rank=0, world=1)
    (batch,) = sources.train.next_window()
    assert batch[SOURCE].bincount(minlength=2).tolist() == [6, 2]  # a cycle of four rows has the exact shares
    held_out = torch.cat([micro[SOURCE] for micro in sources.validation.windows()])
    assert held_out.unique().tolist() == [0, 1]
    sources.close()


def repeated(times: tuple[int, int, int]) -> Batch:
    """Eight rows of each source, each of them so many times."""
    fields = [row(position, ()) | {SOURCE: torch.tensor(position // 8)} for position in range(8 * len(SOURCES))]
    rows = [each for source, count in enumerate(times) for each in fields[8 * source : 8 * source + 8] * count]
    batch = {name: torch.stack([each[name] for each in rows]) for name in rows[0]}
    batch["kept"] = torch.from_numpy(kept_positions(batch["attention_mask"].numpy()))
    return Batch(fields=batch, keys=torch.arange(len(rows)), start=0)


def gradient(tasks: str, times: tuple[int, int, int]) -> np.ndarray:
    """Gradient of the equally weighted mean losses over batches with these shares of the sources, in float64."""
    path = ",".join(f"{name}:1=/{name}" for name in SOURCES)
    trainer = trainer_for(Layout(), config(tasks, path))
    assert {name for name, _, _ in parse_members(path)} == set(SOURCES)
    model, objective = trainer.engine.module.double(), trainer.objective
    losses = objective(model, repeated(times))
    words = objective.next_sentence
    (losses.sums[:words] / losses.counts[:words].clamp(min=1)).mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).numpy()


def test_the_share_of_a_source_is_not_its_weight() -> None:
    """The expected gradient is the same for two shares; that of the parts of speech is not."""
    np.testing.assert_allclose(gradient("sources", (1, 1, 1)), gradient("sources", (1, 3, 2)), atol=1e-6)
    by_part = gradient("parts_of_speech", (1, 1, 1)) - gradient("parts_of_speech", (1, 3, 2))
    assert np.abs(by_part).max() > 1e-3


def test_a_resumed_run_continues_the_weights_of_sources_bit_for_bit(text_dataset: Path, tmp_path: Path) -> None:
    mixture = tmp_path / "mixture.txt"
    mixture.write_text(f"books:3={text_dataset},wiki:1={text_dataset}\n")
    changes = {
        "objective__tasks": "sources",
        "balancer__kind": "group_dro",
        "balancer__rate": 0.5,
        "validation__every": 4,
        "checkpoint__every": 4,
        "optimizer__schedule": "constant",
    }
    for name, steps in (("whole", (8,)), ("resumed", (4, 8))):
        for number in steps:
            given = flags(mixture, tmp_path / name, training__steps=number, **changes)  # type: ignore[arg-type]
            assert pretrain_here(given) == 0
    whole, resumed = (lines(tmp_path / name) for name in ("whole", "resumed"))
    exact = ("step", "loss", "tasks", "balancer", "validation")
    assert [[line.get(name) for name in exact] for line in resumed] == [
        [line.get(name) for name in exact] for line in whole
    ]
    weights = [line["tasks"]["books"]["weight"] for line in whole if "tasks" in line]
    assert len(set(weights)) > 4
    assert set(whole[-1]["validation"]["tasks"]) == {"books", "wiki", "next_sentence"}
