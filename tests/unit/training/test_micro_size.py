"""`batch.micro_size: auto`: which number it becomes."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.grids import always
from tests.runs import flags, image_flags, pretrain_here
from tests.synthetic import LENGTH, VOCABULARY, Layout, batch, small_config, trainer_for
from trp_scale.checkpoint.format import read_full_state
from trp_scale.checkpoint.run_directory import newest_complete
from trp_scale.config import Config, RefusedError
from trp_scale.config.loader import check, from_dict, load_recipe
from trp_scale.config.registry import EngineRules
from trp_scale.config.run_flags import parse
from trp_scale.core.batch import Batch
from trp_scale.core.run import Objective
from trp_scale.data.text.dataset import GROUPS
from trp_scale.distributed.environment import Environment
from trp_scale.engines.plain import PlainEngine
from trp_scale.models.counting import fake_pass, saved_bytes
from trp_scale.pretraining.base import build_upstream
from trp_scale.pretraining.pos_bert.model import BertForMaskedPositions
from trp_scale.pretraining.pos_bert.upstream import PosMaskedLanguageModelling
from trp_scale.training import micro_size
from trp_scale.training.micro_size import METHODS, Choice, Need

CPU = torch.device("cpu")


def settings(dataset: Path, tmp_path: Path, **changes: Any) -> Config:
    """A small run whose micro-batch is to be chosen."""
    config = parse(flags(dataset, tmp_path / "run", batch__micro_size="auto", batch__global_size=24, **changes)).config
    assert config.batch.micro_size == "auto"
    return config


def chosen(config: Config, **named: Any) -> Choice:
    """What auto chooses on one rank."""
    with Environment() as environment:
        return micro_size.choose(config, environment, build=build_upstream, engine_name="plain", **named)


def counted(config: Config) -> Need:
    """What a run of this kind needs by the count."""
    sized = copy.deepcopy(config)
    sized.batch.micro_size = 1
    with Environment() as environment:
        return micro_size.count_memory(build_upstream(sized, environment), sized, environment, "plain", None)


def saved(model: torch.nn.Module, objective: Objective, rows: Batch) -> int:
    """Return the bytes that a forward pass of a copy on fake tensors saves."""
    model = copy.deepcopy(model)
    with fake_pass(model, device=CPU, half=False, rounded=False) as losses_of:
        return saved_bytes(model, partial(losses_of, objective, rows))


def test_what_is_saved_on_fake_tensors_is_what_a_forward_pass_saves() -> None:
    config = small_config(Layout())
    model = BertForMaskedPositions(config.model, vocab_size=VOCABULARY, seed=0)
    objective = PosMaskedLanguageModelling(config.objective, GROUPS, config.model.hidden_size)
    weights = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    for rows in (2, 6):
        kept: dict[int, Tensor] = {}

        def keep(tensor: Tensor, kept: dict[int, Tensor] = kept) -> Tensor:
            if (place := tensor.untyped_storage().data_ptr()) not in weights:
                kept[place] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            losses = objective(model, batch(range(rows)))
        real = [tensor.untyped_storage().nbytes() for tensor in kept.values()]
        found = saved(model, objective, batch(range(rows)))
        assert losses.sums.requires_grad and rows * LENGTH * config.model.hidden_size * 4 < sum(real)
        assert found == sum(real) + 2 * max(real)


def test_the_largest_divisor_that_fits(text_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(text_dataset, tmp_path)
    need = counted(config)
    assert need.fixed > micro_size.WORKSPACE and need.row > 1000
    monkeypatch.setattr(micro_size, "SURE", 1.0)  # nothing is tried
    for rows in (1, 6, 24):
        choice = chosen(config, free=need.step_bytes(rows))
        assert choice.rows == rows
        assert str(choice).startswith(f"micro-batches of {rows} row{'s' if rows > 1 else ''}: ")
    assert "GiB of" in str(choice) and "whole share" in choice.why
    assert "may not fit" in chosen(config, free=1000).why
    assert config.batch.micro_size == "auto", "the caller writes it down"


class Full(PlainEngine):
    """Is out of memory above so many rows."""

    room = 0
    asked: tuple[int, ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rows = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)).shape[0]
        Full.asked = (*Full.asked, rows)
        if rows > Full.room:
            raise torch.OutOfMemoryError(f"{rows} rows")
        return super().__call__(*args, **kwargs)


def test_where_it_is_close_it_is_tried_and_steps_back(
    text_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(rules: EngineRules, module: torch.nn.Module, config: Config, **settings: Any) -> PlainEngine:
        assert config.training.compile == "none", "graphs of a size that is only tried"
        return Full(module, config, device=settings["device"])

    monkeypatch.setattr(EngineRules, "build", build)
    config = settings(text_dataset, tmp_path)
    config.training.compile = "whole"
    free = counted(config).step_bytes(24)
    for room, tried in ((24, (24,)), (11, (24, 12, 8))):
        Full.room, Full.asked = room, ()
        choice = chosen(config, free=free)
        assert (choice.rows, Full.asked) == (tried[-1], tried)
        assert "one step succeeded" in choice.why


def test_nothing_is_tried_where_another_rank_would_wait() -> None:
    need = Need(fixed=100, row=10)
    assert micro_size.choose_by_memory([1, 2, 4, 8], need, 200, lambda rows: True).rows == 8
    assert micro_size.choose_by_memory([1, 2, 4, 8], need, 200, None).rows == 4


@pytest.mark.parametrize(
    ("engine", "stage", "ranks", "expected"),
    [
        ("plain", None, 1, 16),
        ("fsdp", None, 4, 4),
        ("deepspeed", 0, 4, 16),
        ("deepspeed", 1, 4, 11),
        ("deepspeed", 3, 4, 5),
    ],
)
def test_states(engine: str, stage: int | None, ranks: int, expected: float) -> None:
    assert micro_size.state_bytes(engine, stage, ranks) == expected
    assert METHODS == 3 * 4


def test_on_a_cpu_the_cores_are_kept_busy() -> None:
    sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert [micro_size.choose_by_cores(sizes, 128, threads).rows for threads in (1, 2, 64)] == [32, 64, 128]
    assert micro_size.choose_by_cores(sizes, 50_000, 1).rows == 1
    assert "4 rows: 512 of at most 6,144 " in str(micro_size.choose_by_cores([1, 2, 4], 128, 1))


def test_sizes_that_other_settings_refuse_are_left_out(image_dataset: Path, tmp_path: Path) -> None:
    tiny = load_recipe("pos_bert_tiny")
    tiny.data.path, tiny.batch.global_size = "data", 12
    assert micro_size.candidates(tiny, 1) == [1, 2, 3, 4, 6, 12]
    assert micro_size.candidates(tiny, 2) == [1, 2, 3, 6]
    with pytest.raises(RefusedError, match=r"12 .* 5 ranks"):
        micro_size.candidates(tiny, 5)
    noise = from_dict({"upstream": "pos_bert", "data": {"path": "data"}, "hooks": ["gradient_noise_scale"]})
    assert micro_size.candidates(noise, 1)[-1] == 128
    mixing = load_recipe("classification_mae_vit_b")
    mixing.data.path, mixing.batch.global_size = "data", 12
    assert micro_size.candidates(mixing, 1) == [2, 4, 6, 12]
    mixing.batch.global_size = 3
    with pytest.raises(RefusedError, match=r"3 rows.*\n.*even"):
        micro_size.candidates(mixing, 1)


@pytest.mark.parametrize(
    ("recipe", "section", "field", "value", "words"),
    [
        ("pos_bert_tiny", "balancer", "estimate", "micro", "auto.*--balancer.estimate micro "),
        ("detection_tiny", "batch", "micro_size", "auto", "auto.*detection"),
        ("pos_bert_tiny", "batch", "micro_size", 0, "--batch.micro_size .*0"),
        ("pos_bert_tiny", "batch", "micro_size", 7, "7 .*--batch.global_size 32"),
    ],
)
def test_what_it_cannot_be(recipe: str, section: str, field: str, value: object, words: str) -> None:
    config = load_recipe(recipe)
    config.data.path = "data"
    setattr(getattr(config, section), field, value)
    with pytest.raises(RefusedError, match=words):
        check(config)


def test_a_forward_pass_that_reads_its_tensors_is_refused(text_dataset: Path, tmp_path: Path) -> None:
    config = settings(text_dataset, tmp_path)

    def build(sized: Config, environment: Environment) -> Any:
        upstream = build_upstream(sized, environment)
        objective = upstream.objective

        def reading(forward: Any, rows: Any) -> Any:
            losses = objective(forward, rows)
            assert float(losses.sums.detach().sum()) > 0
            return losses

        upstream.objective = reading  # type: ignore[misc,assignment]
        return upstream

    with Environment() as environment, pytest.raises(RefusedError, match=r"--batch.micro_size"):
        micro_size.choose(config, environment, build=build, engine_name="plain", free=1 << 40)


@pytest.mark.parametrize("recipe", always(["pos_bert_tiny", "adpe_tiny"], "adpe_tiny"))
def test_a_run_learns_the_same_whatever_was_chosen_and_keeps_it(
    request: pytest.FixtureRequest, tmp_path: Path, recipe: str
) -> None:
    text = recipe == "pos_bert_tiny"
    dataset: Path = request.getfixturevalue("text_dataset" if text else "image_dataset")

    def run(name: str, **changes: Any) -> Path:
        steps = {"training__steps": 4, "optimizer__kind": "sgd", "optimizer__schedule": "constant"}
        given = {**steps, "model__dropout": 0.0, **changes} if text else {**steps, **changes}
        words = flags(dataset, tmp_path / name, **given)
        words = words if text else image_flags("adpe_tiny", dataset, tmp_path / name, **given)
        assert pretrain_here(words) == 0
        return tmp_path / name

    def size(run_dir: Path) -> Any:
        number = json.loads((run_dir / "environment.json").read_text())["micro_size"]
        config: Any = load_recipe(run_dir / "config.yaml")
        assert config.batch.micro_size == number
        return number

    def weights(run_dir: Path) -> dict[str, Tensor]:
        path = newest_complete(run_dir).path
        assert path is not None
        return read_full_state(path, state="weight")

    auto, hand = run("auto", batch__micro_size="auto"), run("hand", batch__micro_size=2)
    assert (size(auto), size(hand)) == (8, 2)
    theirs = weights(hand)
    assert any(not torch.equal(weight, theirs[name]) for name, weight in weights(auto).items()), "nothing was split"
    for name, weight in weights(auto).items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-5, atol=1e-5)
    # Where the first choice was another, a resume keeps it; a number by hand is taken.
    run("hand", batch__micro_size="auto", training__steps=5)
    assert size(hand) == 2
    run("hand", batch__micro_size=4, training__steps=6)
    assert size(hand) == 4


@pytest.mark.parametrize(("rows", "passes"), [(8, 1), (4, 4)])
def test_exact_weights_of_one_micro_batch_come_out_of_the_pass_that_is_weighted(rows: int, passes: int) -> None:
    layout = Layout(micro_size=rows)
    trainer = trainer_for(layout, small_config(layout, balancer={"kind": "minimax", "estimate": "exact"}))
    forwards = 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    trainer.engine.module.register_forward_pre_hook(count)
    trainer.train_step()
    assert forwards == passes


@pytest.mark.exhaustive
def test_text_is_counted_as_if_nothing_were_padded(text_dataset: Path, tmp_path: Path) -> None:
    """The first rows may be shorter than any later ones: what they leave out is no room."""
    config = settings(text_dataset, tmp_path)
    config.batch.micro_size = 1
    with Environment() as environment:
        upstream = build_upstream(config, environment)
        short = upstream.sources.train.first_rows(4)
        full = micro_size.first_rows(upstream, 4)
    assert len(short["kept"]) < short["tokens"].numel()
    assert torch.equal(full["kept"], torch.arange(short["tokens"].numel()))
    assert torch.equal(full["attention_mask"], short["attention_mask"])

    padded = replace(short, fields={name: value for name, value in short.fields.items() if name != "kept"})
    on_full, on_short, on_padded = (saved(upstream.model(), upstream.objective, rows) for rows in (full, short, padded))
    assert on_full > max(on_short, on_padded)
