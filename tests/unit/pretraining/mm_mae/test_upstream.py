"""MM-MAE on stored images: losses against plain loops over rows, patches and pixels, and gradients of single tasks by
taps."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.synthetic_modalities import CLASSES, PATCH, SIDE, STRIDE, batch, depth_of
from tests.unit.data.images.multimodal import SEMSEG_CLASSES, multimodal_config, samples, write_multimodal
from tests.unit.models.small_modalities import ALL, EVERY_TASK, changed, config, small_model
from trp_scale.config import Config, ModelConfig
from trp_scale.core.batch import Batch
from trp_scale.core.run import RunContext, TapPlace
from trp_scale.distributed.environment import Environment
from trp_scale.models.patches import CHANNEL_DEVIATION, CHANNEL_MEAN
from trp_scale.pretraining.base import DataFacts, build_upstream
from trp_scale.pretraining.mm_mae.model import MultimodalMaskedAutoencoder, MultimodalOutput
from trp_scale.pretraining.mm_mae.upstream import MultimodalReconstruction, MultimodalUpstream
from trp_scale.pretraining.modalities.depth import NOT_MEASURED
from trp_scale.pretraining.modalities.semseg import VOID


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Config:
    path = write_multimodal(tmp_path_factory.mktemp("data") / "images", [samples(7), samples(6)])
    settings = multimodal_config(path, modalities={"outputs": ["rgb", "depth", "semseg", "raw_rgb"]})
    settings.model = ModelConfig(layers=1, hidden_size=16, heads=2, intermediate_size=32)
    settings.vision.decoder_layers, settings.vision.decoder_hidden_size, settings.vision.decoder_heads = 1, 16, 2
    settings.data.workers = 0
    return settings


def upstream(stored: Config) -> MultimodalUpstream:
    return build_upstream(stored, Environment(use_gpu=False))


@pytest.mark.parametrize("reduction", ["sample", "element"])
def test_counts_of_stored_rows_are_those_of_the_losses(stored: Config, reduction: str) -> None:
    stored.objective.reduction = reduction  # type: ignore[assignment]
    found = upstream(stored)
    for micro in found.sources.train.next_window():
        losses = found.objective(found.model(), micro)
        assert losses.counts.tolist() == found.objective.count(micro).tolist()
        losses.sums.sum().backward()  # type: ignore[no-untyped-call]
        assert losses.sums.isfinite().all() and (losses.sums > 0).all()
    found.sources.close()


def test_properties_of_the_upstream(stored: Config) -> None:
    found = upstream(stored)
    model = found.model()
    assert isinstance(model, MultimodalMaskedAutoencoder)
    assert model.tokenisers["semseg"].classes == len(SEMSEG_CLASSES) == 3
    rows = stored.batch.global_size
    assert found.positions_per_step == rows * 3 * (stored.crops.size // stored.vision.patch_size) ** 2
    assert found.step_flops == found.outline(stored, DataFacts(classes={"semseg": 3})).step_flops(1) > 0
    names = {"semseg": list(SEMSEG_CLASSES)}
    assert found.checkpoint_extra() == {"map_classes": {"semseg": 3}, "class_names": names}
    assert found.hooks(RunContext(config=stored, objective=found.objective, engine=None)) == []  # type: ignore[arg-type]


ROWS, GRID = 3, SIDE // PATCH
VALUES = {"rgb": 3 * PATCH**2, "raw_rgb": 3 * PATCH**2, "depth": PATCH**2, "semseg": (PATCH // STRIDE) ** 2 * CLASSES}

CASES: dict[str, dict[str, Any]] = {
    "all": {"outputs": EVERY_TASK},
    "one input, in another order": {"inputs": ("depth",), "outputs": EVERY_TASK[::-1], "visible_tokens": 5},
    "nearly all visible": {"inputs": ("semseg", "rgb"), "outputs": EVERY_TASK, "visible_tokens": 29},
}


class Recorder:
    """A model that predicts fixed values and records its inputs."""

    def __init__(self, settings: Config) -> None:
        generator = torch.Generator().manual_seed(2)
        shapes = [(ROWS, GRID**2, VALUES[task]) for task in settings.modalities.outputs]
        self.predictions = tuple(torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)

    def __call__(self, patches: dict[str, Tensor], visible: Tensor, **extras: Any) -> MultimodalOutput:
        self.patches, self.visible, self.extras = patches, visible, extras
        return MultimodalOutput(self.predictions)


def rows_for(settings: Config, **fields: Tensor) -> Batch:
    modalities = settings.modalities
    return changed(batch(range(ROWS), modalities.visible_tokens, len(modalities.inputs)), **fields)


def element_losses(task: str, guess: Tensor, rows: Batch, row: int, place: int) -> list[float]:
    """Losses of one patch's elements."""
    top, left = place // GRID, place % GRID
    if task == "semseg":
        side = PATCH // STRIDE
        labels = rows["semseg"][row, top * side :, left * side :][:side, :side].flatten().tolist()
        logits = guess.view(side**2, CLASSES).tolist()
        pairs = [(label, scores) for label, scores in zip(labels, logits, strict=True) if label != 255]
        return [math.log(sum(math.exp(s) for s in scores)) - scores[label] for label, scores in pairs]
    if task == "depth":
        depth = depth_of(rows)[row, top * PATCH :, left * PATCH :][:PATCH, :PATCH].flatten().tolist()
        return [abs(a - b) for a, b in zip(guess.tolist(), depth, strict=True) if not math.isnan(b)]
    if rows["row_weights"][row] == 0:
        return []
    pixels = rows["images"][row, :, top * PATCH :, left * PATCH :][:, :PATCH, :PATCH].double() / 255
    pixels = (pixels - torch.tensor(CHANNEL_MEAN).view(3, 1, 1)) / torch.tensor(CHANNEL_DEVIATION).view(3, 1, 1)
    values = pixels.permute(1, 2, 0).flatten()
    if task == "rgb":
        values = (values - values.mean()) / (values.var() + 1e-6).sqrt()
    return [float((guess - values).square().mean())]


def slow(task: str, number: int, settings: Config, rows: Batch, model: Recorder) -> tuple[float, float]:
    """(sum, count) of a task."""
    modality, inputs = task.removeprefix("raw_"), settings.modalities.inputs
    total, count = 0.0, 0.0
    for row in range(ROWS):
        losses: list[float] = []
        for place in range(GRID**2):
            token = inputs.index(modality) * GRID**2 + place if modality in inputs else -1
            if token not in rows["visible"][row].tolist():
                losses += element_losses(task, model.predictions[number][row, place], rows, row, place)
        if settings.objective.reduction == "element":
            total, count = total + sum(losses), count + len(losses)
        elif losses:
            total, count = total + sum(losses) / len(losses), count + 1
    return total, count


@pytest.mark.parametrize("reduction", ["sample", "element"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_sums_and_counts(case: dict[str, Any], reduction: Any) -> None:
    """The last row is absent."""
    settings = config(**case)
    settings.objective.reduction = reduction
    there = torch.tensor([1.0, 1.0, 0.0])
    rows = rows_for(settings, row_weights=there)
    for name, nothing in (("depth", NOT_MEASURED), ("semseg", VOID), ("depth_counts", 0), ("semseg_counts", 0)):
        rows[name][2] = nothing
    objective, model = MultimodalReconstruction(settings), Recorder(settings)
    losses = objective(model, rows)
    expected = [slow(task, number, settings, rows, model) for number, task in enumerate(objective.tasks)]
    assert losses.sums.tolist() == pytest.approx([total for total, _ in expected], rel=1e-6)
    assert losses.counts.tolist() == [count for _, count in expected] and losses.counts.dtype == torch.float64
    assert min(losses.counts.tolist()) > 0 and losses.sums.dtype == torch.float64
    needed = {name: rows[name] for name in ("visible", "depth_counts", "semseg_counts", "row_weights")}
    assert objective.count(Batch(fields=needed, keys=rows.keys, start=0)).tolist() == losses.counts.tolist()
    assert model.extras == {} and losses.shared_inputs is None and set(model.patches) == set(objective.inputs)


def test_tasks_and_their_kinds() -> None:
    objective = MultimodalReconstruction(config(outputs=("semseg", "depth", "raw_rgb")))
    assert objective.tasks == ("semseg", "depth", "raw_rgb")
    assert (objective.balanced, objective.regression) == ((0, 1, 2), (1, 2))
    assert objective.outside_weights(torch.ones(3)).tolist() == [0, 0, 0]


def test_logits_are_compared_in_single_precision() -> None:
    """bf16 has 8 bits: a loss in bf16 would be off by up to half a percent."""
    settings = config(outputs=("semseg",))
    rows, model = rows_for(settings), Recorder(settings)
    model.predictions = (model.predictions[0].bfloat16(),)
    found = MultimodalReconstruction(settings)(model, rows).sums.item()
    assert found == pytest.approx(slow("semseg", 0, settings, rows, model)[0], rel=1e-6)


@pytest.mark.parametrize("reduction", ["sample", "element"])
def test_a_task_without_elements_is_absent_and_still_in_the_graph(reduction: Any) -> None:
    """With void labels and unmeasured depth, the sum and all gradients are exactly 0."""
    settings = config(outputs=EVERY_TASK)
    settings.objective.reduction = reduction
    model = small_model(settings, dtype=torch.float32)
    rows = batch(range(2), absent=("depth", "semseg"))
    losses = MultimodalReconstruction(settings)(model, rows)
    for task in (1, 2):
        assert losses.sums[task] == losses.counts[task] == 0
        gradients = torch.autograd.grad(losses.sums[task], own_path(model, ALL[task]), retain_graph=True)
        assert not any(gradient.any() for gradient in gradients)
    losses.sums.sum().backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in model.parameters())


def own_path(model: torch.nn.Module, task: str) -> list[Tensor]:
    """Return the parameters between the inputs and a task's prediction."""
    others = tuple(f"decoders.{name}." for name in EVERY_TASK if name != task)
    return [each for name, each in model.named_parameters() if not name.startswith(others)]


def test_pixel_shift_changes_the_input_and_not_the_target() -> None:
    settings = config(outputs=EVERY_TASK)
    rows, model = rows_for(settings), Recorder(settings)
    objective = MultimodalReconstruction(settings)
    clean = objective(model, rows).sums.tolist()
    seen = model.patches
    rows.extras = {"pixel_shift": torch.full((ROWS, 3, SIDE, SIDE), 0.5)}
    assert objective(model, rows).sums.tolist() == clean
    expected = 0.5 / torch.tensor(CHANNEL_DEVIATION)
    moved = (model.patches["rgb"] - seen["rgb"]).view(-1, 3)
    assert torch.allclose(moved, expected.expand_as(moved), atol=1e-5)
    assert torch.equal(model.patches["depth"], seen["depth"]) and torch.equal(model.patches["semseg"], seen["semseg"])


WEIGHTS = torch.tensor([0.2, 0.5, 1.5, 0.7], dtype=torch.float64)


def tapped(objective: MultimodalReconstruction, rows: Batch, at: TapPlace) -> tuple[Batch, torch.Tensor]:
    name, shape = objective.tap(rows, at)
    tap = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    return replace(rows, extras={name: tap}), tap


@pytest.mark.parametrize("reduction", ["sample", "element"])
def test_each_task_s_gradient_of_the_last_shared_weights(reduction: Any) -> None:
    """Compare with one backward pass per task."""
    settings = config(outputs=EVERY_TASK)
    settings.objective.reduction = reduction
    objective, model, rows = MultimodalReconstruction(settings), small_model(settings), batch(range(3))
    shared = model.blocks[-1].mlp.fc2.weight
    plain = objective(model, rows)
    expected = [
        torch.autograd.grad(weight * loss / count, shared, retain_graph=True)[0]
        for weight, loss, count in zip(WEIGHTS, plain.sums, plain.counts, strict=True)
    ]
    batch_with_tap, tap = tapped(objective, rows, "weights")
    losses = objective(model, batch_with_tap)
    torch.testing.assert_close(losses.sums, plain.sums, rtol=1e-13, atol=0)
    (WEIGHTS * losses.sums / losses.counts).sum().backward()
    assert tap.grad is not None and losses.shared_inputs is not None and not losses.shared_inputs.requires_grad
    parts = objective.task_gradients(rows, "weights", tap.grad)
    assert set(parts) == set(objective.tapped_tasks("weights")) == {0, 1, 2, 3}
    for task, one in enumerate(expected):
        torch.testing.assert_close(parts[task].T @ losses.shared_inputs, one, rtol=0, atol=1e-10)
        assert one.norm() > 1e-3
    torch.testing.assert_close(sum(expected), shared.grad, rtol=0, atol=1e-10)


def test_each_task_s_gradient_of_the_shared_representation() -> None:
    settings = config(outputs=("semseg", "rgb"))
    objective, model, rows = MultimodalReconstruction(settings), small_model(settings), batch(range(2))
    kept: list[torch.Tensor] = []
    handle = model.blocks[-1].register_forward_hook(lambda module, inputs, output: kept.append(output))
    sums = objective(model, rows).sums
    handle.remove()
    expected = [torch.autograd.grad(one, kept[0], retain_graph=True)[0].flatten(0, 1) for one in sums]
    batch_with_tap, tap = tapped(objective, rows, "representation")
    objective(model, batch_with_tap).sums.sum().backward()
    parts = objective.task_gradients(rows, "representation", tap.grad)
    for task in objective.tapped_tasks("representation"):
        torch.testing.assert_close(parts[task], expected[task], rtol=0, atol=1e-10)
    assert not torch.allclose(parts[0], parts[1])
