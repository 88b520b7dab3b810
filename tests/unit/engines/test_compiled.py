"""Graphs that torch.compile makes of an engine's model: counted, and those that no mode needed named."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from tests.fixtures import small_image_dataset
from tests.runs import flags, image_flags, pretrain_here
from tests.settings import changed
from trp_scale.config.loader import against_compiling, load_recipe
from trp_scale.core.batch import Batch, TaskLosses
from trp_scale.core.run import task_losses
from trp_scale.distributed.groups import ALONE, Group
from trp_scale.engines import compiled
from trp_scale.engines.compiled import Graphs, compile_model
from trp_scale.engines.plain import PlainEngine
from trp_scale.pretraining.pos_bert.settings import PosBertConfig


@pytest.fixture(autouse=True)
def traced_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Traced by aot_eager: the default backend would add minutes of a C++ compiler."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Scaled(nn.Module):
    """A layer of one width, and what a hook may add to it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, inputs: Tensor, times: int = 1, added: Tensor | None = None) -> Tensor:
        outputs: Tensor = self.linear(inputs) * times
        return outputs if added is None else outputs + added


class Blocks(nn.Module):
    """Two blocks of one form and a third of another; `layers` are the units that are compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Scaled(4), Scaled(4), Scaled(2)])

    def forward(self, inputs: Tensor, times: int = 1, added: Tensor | None = None) -> Tensor:
        first, second, third = self.layers
        found: Tensor = third(second(first(inputs, times, added))[..., :2])
        return found


def engine_of(how: str) -> tuple[PlainEngine, Graphs]:
    config = changed(PosBertConfig(), training={"compile": how})
    engine = PlainEngine(Blocks(), config, device=torch.device("cpu"))
    assert isinstance(engine.graphs, Graphs)
    engine.train(True)
    return engine, engine.graphs


class Listed(Blocks):
    """Its inputs are lists, mostly of nine."""

    def varying(self, inputs: Tensor) -> tuple[tuple[Tensor, ...], int]:
        return (inputs,), 9


@pytest.mark.parametrize("first", [5, 7])
def test_a_graph_is_made_for_the_usual_length_whichever_came_first(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    """Inductor chooses how it sums by the length a graph is made for: a resumed run begins with another than the run
    that was not stopped, and must sum alike."""
    hints: list[int] = []

    def noting(graph: Any, inputs: list[Any]) -> Any:
        hints.extend(each.node.hint for each in inputs if isinstance(each, torch.SymInt))
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile.func, backend=noting))  # type: ignore[attr-defined]
    module = Listed()
    compile_model(module, "whole")
    for length in (first, 12, 3):
        inputs = torch.randn(length, 4)
        assert torch.allclose(module(inputs), Blocks.forward(module, inputs))
    assert hints == [9], "one graph"


class Sized(Blocks):
    """Its inputs are of few lengths."""

    def sequence_length(self, inputs: Tensor, *others: object, **named: object) -> int:
        return len(inputs)


@pytest.mark.parametrize("order", [(5, 7), (7, 5)])
def test_each_length_has_its_graph_whichever_came_first(
    monkeypatch: pytest.MonkeyPatch, order: tuple[int, int]
) -> None:
    """torch would make one graph for all lengths when the second comes, and a resumed run begins with another."""
    shapes: list[list[tuple[int | torch.SymInt, ...]]] = []

    def noting(graph: Any, inputs: list[Any]) -> Any:
        shapes.append([tuple(each.shape) for each in inputs if isinstance(each, Tensor) and each.shape[-1:] == (4,)])
        assert not any(isinstance(each, torch.SymInt) for each in inputs)
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile.func, backend=noting))  # type: ignore[attr-defined]
    module = Sized()
    graphs = compile_model(module, "whole")
    assert graphs is not None
    for length in (*order, *order):
        module(torch.randn(length, 4))
    assert (len(shapes), graphs.made, graphs.surplus) == (2, 2, [])


def test_many_lengths_are_compiled_and_named() -> None:
    """torch by itself stops at eight graphs of a piece of code, and then runs it as it is."""
    module = Sized()
    graphs = compile_model(module, "whole")
    assert graphs is not None
    lengths = range(2, 2 + compiled.MOST_LENGTHS + 2)
    for length in lengths:
        module(torch.randn(length, 4))
    assert graphs.made == len(lengths)
    assert len(graphs.surplus) == 2 and "size mismatch at index 0" in graphs.surplus[0]


@pytest.mark.exhaustive
def test_learned_masks_need_no_graph_that_no_mode_names(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Lessons read whole images, where steps read what is seen of them, with gradients and without, in two precisions:
    more than eight graphs of one piece of code."""
    scenes = small_image_dataset(tmp_path / "scenes", count=64, size=32)
    flags_of_blocks = image_flags(
        "mlo_mae_tiny",
        scenes,
        tmp_path / "run",
        training__compile="blocks",
        training__precision="bf16",
        training__steps=4,
        vision__decoder_layers=2,
        multilevel__every=2,
        validation__every=4,
    )
    assert pretrain_here(flags_of_blocks) == 0
    assert "recompile_limit" not in caplog.text + "".join(capfd.readouterr())
    graphs = json.loads((tmp_path / "run" / "summary.json").read_text())["graphs"]
    assert graphs["made"] > 8 and graphs["surplus"] == 0


@pytest.mark.parametrize(("how", "forms"), [("whole", 1), ("blocks", 2)])
def test_each_mode_has_its_graphs_and_none_is_surplus(how: str, forms: int) -> None:
    engine, graphs = engine_of(how)
    inputs, made = torch.randn(3, 4, requires_grad=True), []
    for _ in range(2):
        engine(inputs).sum().backward()
    made.append(graphs.made)
    with torch.no_grad():
        engine(inputs.detach())
    made.append(graphs.made)
    engine.train(False)
    with torch.no_grad():
        engine(inputs.detach())
    engine.train(True)
    engine(inputs, added=torch.zeros(3, 4))
    engine(inputs, added=torch.zeros(3, 4, requires_grad=True))
    assert made == [forms, 2 * forms]
    assert graphs.surplus == []
    assert graphs.seconds() > 0


@pytest.mark.parametrize("how", ["whole", "blocks"])
def test_a_shape_that_changes_is_named(how: str) -> None:
    engine, graphs = engine_of(how)
    engine(torch.randn(3, 4, requires_grad=True)).sum().backward()
    needed = graphs.made
    engine(torch.randn(5, 4, requires_grad=True)).sum().backward()
    assert graphs.made > needed
    assert "size mismatch at index 0. expected 3, actual 5" in graphs.surplus[0]
    assert graphs.surplus[0].startswith(f"{'Blocks' if how == 'whole' else 'Scaled'} was compiled again")


def test_a_number_that_changes_is_named() -> None:
    engine, graphs = engine_of("whole")
    for times in (2, 3):
        engine(torch.randn(3, 4), times)
    assert len(graphs.surplus) == 1 and "times" in graphs.surplus[0]


class Summed:
    """One task: the sum of what the model gives. Attributes: reads: on the host, how many rows there are."""

    tasks, balanced, regression = ("sum",), (0,), ()

    def __init__(self, *, in_a_graph: bool = True, reads: bool = False) -> None:
        self.in_a_graph, self.reads = in_a_graph, reads

    def count(self, batch: Batch) -> Tensor:
        return torch.ones(1, dtype=torch.float64)

    def outside_weights(self, counts: Tensor) -> Tensor:
        return torch.zeros_like(counts)

    def __call__(self, forward: Any, batch: Batch) -> TaskLosses:
        given = batch["inputs"] + (int(batch["row_weights"].sum()) if self.reads else 0)
        return TaskLosses(sums=forward(given).double().sum().reshape(1), counts=self.count(batch))


def rows(start: int = 0, count: int = 3) -> Batch:
    fields = {"inputs": torch.randn(count, 4), "row_weights": torch.ones(count)}
    return Batch(fields=fields, keys=torch.arange(start, start + count), start=start)


def test_losses_in_the_graph_and_beside_it() -> None:
    plain = PlainEngine(Blocks(), PosBertConfig(), device=torch.device("cpu"))
    engine, graphs = engine_of("whole")
    engine.module.load_state_dict(plain.module.state_dict())
    for objective in (Summed(), Summed(in_a_graph=False)):
        for start in (0, 3):
            batch = rows(start)
            found, expected = task_losses(objective, engine, batch), task_losses(objective, plain, batch)
            assert torch.equal(found.sums, expected.sums) and torch.equal(found.counts, expected.counts)
    assert (graphs.made, graphs.surplus) == (2, [])  # the second objective's is of the model alone


def test_losses_after_an_interrupted_shift_are_those_of_what_was_put_back() -> None:
    config = changed(PosBertConfig(), training={"compile": "whole", "precision": "bf16", "weights": "bf16"})
    engine = PlainEngine(Blocks(), config, device=torch.device("cpu"))
    batch = rows()
    batch.fields = {name: field.bfloat16() for name, field in batch.fields.items()}
    before = task_losses(Summed(), engine, batch).sums.detach().clone()
    with pytest.raises(KeyError), engine.perturb_weights(engine.weights().times(0.0).shift(1.0), 3.0):
        raise KeyError
    assert torch.equal(task_losses(Summed(), engine, batch).sums, before)


def test_exact_forwards_are_a_mode_of_their_own() -> None:
    config = changed(PosBertConfig(), training={"compile": "whole", "precision": "bf16"})
    engine = PlainEngine(Blocks(), config, device=torch.device("cpu"))
    assert isinstance(engine.graphs, Graphs)
    engine.train(True)
    for _ in range(2):
        task_losses(Summed(), engine, rows())
        with engine.exact_forwards():
            task_losses(Summed(), engine, rows())
    assert (engine.graphs.made, engine.graphs.surplus) == (2, [])


def test_losses_whose_shape_changes_are_named() -> None:
    engine, graphs = engine_of("whole")
    for count in (3, 5):
        task_losses(Summed(), engine, rows(count=count))
    assert graphs.made == 2 and "size mismatch at index 0. expected 3, actual 5" in graphs.surplus[0]


def test_a_graph_that_breaks_is_counted_once() -> None:
    engine, graphs = engine_of("whole")
    before = compiled.graphs_so_far()
    task_losses(Summed(reads=True), engine, rows())
    assert graphs.made == compiled.graphs_so_far() - before > 1


def test_a_copy_of_a_compiled_model_runs_its_own_weights() -> None:
    model = Blocks()
    compile_model(model, "blocks")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert twin(torch.randn(3, 4)).abs().max() == 0 < model(torch.randn(3, 4)).abs().max()


def test_nothing_is_counted_where_nothing_is_compiled() -> None:
    assert PlainEngine(Blocks(), PosBertConfig(), device=torch.device("cpu")).graphs is None


def test_a_run_says_what_its_start_took(
    text_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    changes = {"training__compile": "blocks", "training__steps": 3, "batch__micro_size": 8, "validation__every": 3}
    assert pretrain_here(flags(text_dataset, tmp_path / "run", **changes)) == 0
    said = capsys.readouterr().out
    assert f"cache of compiled graphs: {tmp_path / 'cache'} (TORCHINDUCTOR_CACHE_DIR)" in said
    assert "the first step was made" in said and "(graphs: 2, found in the cache: 0)" in said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 0 < summary["start_compile_seconds"] < summary["start_seconds"]
    # A block and the last, which is of its own form; and again for the validation.
    assert (summary["graphs"]["made"], summary["graphs"]["surplus"]) == (4, 0)
    report = (tmp_path / "run" / "report.txt").read_text()
    assert "s of them compilation" in report and "graphs compiled: 4 in" in report


@pytest.mark.exhaustive
def test_a_run_warns_of_a_graph_that_no_mode_needed(
    text_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Held-out rows in batches of another size than before: the second validation needs a graph more."""
    from trp_scale.data.sources import ValidationSource as Source

    whole = Source.windows
    sizes = iter([8, 4])

    def shrinking(source: Source):  # type: ignore[no-untyped-def]
        size = next(sizes)
        for batch in whole(source):
            batch.fields = {name: values[:size] for name, values in batch.fields.items() if name != "kept"}
            yield batch

    monkeypatch.setattr(Source, "windows", shrinking)
    changes = {"training__compile": "whole", "training__steps": 2, "batch__micro_size": 8, "validation__every": 1}
    assert pretrain_here(flags(text_dataset, tmp_path / "run", **changes)) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "warning: BertForMaskedPositions was compiled again for a mode that has a graph" in said
    assert "size mismatch at index 0. expected 8, actual 4" in said
    assert "graphs compiled: 3 in" in said and "1 not needed" in said


GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "stage", "reasons", "triton", "how", "why"),
    [
        (GPU, None, [], True, "blocks", "compiled block by block: the device is a GPU"),
        (GPU, 2, [], True, "blocks", "compiled block by block"),
        (CPU, None, [], True, "none", "not compiled: the device is a CPU, where compilation takes minutes"),
        (GPU, 3, [], True, "none", "not compiled: ZeRO stage 3 gathers weights"),
        (GPU, None, ["rows change"], True, "none", "not compiled: rows change"),
        (GPU, None, [], False, "none", "not compiled: torch finds no Triton for this GPU"),
    ],
)
def test_what_auto_is(
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    stage: int | None,
    reasons: list[str],
    triton: bool,
    how: str,
    why: str,
) -> None:
    monkeypatch.setattr(compiled, "has_triton", lambda: triton)
    chosen, said = compiled.choose_compile(device, stage, reasons, ALONE)
    assert chosen == how and said.startswith(why)


def test_all_ranks_choose_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "has_triton", lambda: True)
    monkeypatch.setattr(Group, "gather_objects", lambda self, own: [own, ["another rank lacks it"]])
    assert compiled.choose_compile(GPU, None, [], Group("world", rank=0, size=2)) == (
        "none",
        "not compiled: another rank lacks it",
    )


@pytest.mark.parametrize(
    ("recipe", "changes", "reason"),
    [
        ("pos_bert_base", {}, ""),
        ("mlo_mae_imagenet", {}, ""),
        ("mlo_mae_imagenet", {"multilevel__final_ratio": 0.9}, "the number of visible patches"),
        ("classification_mae_vit_b", {}, "a fine-tuning run is short"),
    ],
)
def test_what_settings_speak_against(recipe: str, changes: dict[str, float], reason: str) -> None:
    config: Any = load_recipe(recipe)
    for name, value in changes.items():
        section, _, field = name.partition("__")
        setattr(getattr(config, section), field, value)
    assert "; ".join(against_compiling(config)).startswith(reason) and bool(against_compiling(config)) == bool(reason)


def test_a_run_on_a_cpu_is_not_compiled_by_itself(
    text_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pretrain_here(flags(text_dataset, tmp_path / "run", training__steps=1)) == 0
    said = capsys.readouterr().out
    assert "not compiled: the device is a CPU" in said and "graphs" not in said
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["training"]["compile"] == "none"
