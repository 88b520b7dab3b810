"""The sum of squares neither overflows in fp16 nor rounds in bf16; vectors over all parameters take few operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.synthetic import Layout
from tests.synthetic_images import image_config
from trp_scale.core import pieces
from trp_scale.core.pieces import Shards, foreach_chunks
from trp_scale.distributed.groups import ALONE
from trp_scale.engines.plain import PlainEngine
from trp_scale.engines.shards import MicroBatchSquares, sum_of_squares
from trp_scale.methods.learned_masks.second_levels import distance_between, move
from trp_scale.models.counting import RecordsOperations

CPU = torch.device("cpu")


def test_fp16_gradients_whose_norm_fp16_cannot_hold() -> None:
    gradient = torch.full((4096,), 60_000.0, dtype=torch.float16)  # norm 3.8e6
    assert float(sum_of_squares([gradient], CPU)) == pytest.approx(4096 * 60_000.0**2, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_against_float64(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(shape, generator=generator).to(dtype) for shape in ((100, 7), (3,), (1,))]
    expected = sum(float(gradient.double().square().sum()) for gradient in gradients)
    assert float(sum_of_squares(gradients, CPU)) == pytest.approx(expected, rel=1e-5)


def test_a_large_matrix_has_the_same_norm_however_it_is_sharded() -> None:
    """As large as the embedding of BERT-base: fp32 alone is 2.6e-3 off."""
    gradient = torch.randn(30528, 768, generator=torch.Generator().manual_seed(0))
    expected = float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) ** 2
    watched = MicroBatchSquares()
    watched._note(gradient)
    found = [sum_of_squares([gradient], CPU), sum_of_squares(gradient.chunk(2), CPU), watched.total(CPU)]
    assert [float(each) for each in found] == pytest.approx([expected] * 3, rel=2e-6)


def test_one_nan_is_seen() -> None:
    assert sum_of_squares([torch.ones(3), torch.tensor([1.0, torch.nan])], CPU).isnan()


def test_a_rank_without_gradients() -> None:
    assert float(sum_of_squares([], CPU)) == 0.0


def operations(what: Callable[[], object]) -> int:
    """Operations that launch work; one over a list of tensors is one."""
    with RecordsOperations() as recorder:
        what()
    return len(recorder.recorded)


def test_the_norm_takes_as_many_operations_whatever_the_parameters() -> None:
    lists = [[torch.ones(2) for _ in range(parameters)] for parameters in (3, 300)]
    few, many = (operations(partial(sum_of_squares, gradients, CPU)) for gradients in lists)
    assert few == many <= 6


def engine_of(parameters: int) -> PlainEngine:
    """Small vectors, after one step of AdamW."""
    module = nn.ParameterList([torch.full((2,), 1.0 + number) for number in range(parameters)])
    engine = PlainEngine(module, image_config(Layout()), device=CPU)
    for parameter in module:
        parameter.grad = torch.ones_like(parameter)
    engine.check_gradients()
    engine.step(1e-3)
    return engine


def moved(engine: PlainEngine, direction: Shards, base: Shards | None) -> None:
    with engine.perturb_weights(direction, torch.tensor(0.5, dtype=torch.float64), base=base):
        pass


def exchanged(engine: PlainEngine, other: Shards) -> None:
    with engine.exchange_weights(other):
        pass


VECTORS: dict[str, Callable[[PlainEngine, Shards], object]] = {
    "a copy": lambda engine, vector: engine.weights(),
    "a norm": lambda engine, vector: vector.norm(),
    "a sum": lambda engine, vector: vector.plus(vector, 2.0),
    "a product": lambda engine, vector: vector.times(torch.tensor(2.0)),
    "a shift": lambda engine, vector: vector.shift(2.0),
    "a move": lambda engine, vector: moved(engine, vector, None),
    "a move from a base": lambda engine, vector: moved(engine, vector, vector.times(1.0)),
    "an exchange": exchanged,
    "a response": lambda engine, vector: engine.step_response(vector, lr=1e-3, grad_norm=1.0),
    "a distance": lambda engine, vector: distance_between(engine, engine),
    "a step to another": lambda engine, vector: move(engine, vector, 0.5),
}


@pytest.mark.parametrize("name", VECTORS)
def test_arithmetic_takes_as_many_operations_whatever_the_parameters(name: str) -> None:
    found = []
    for parameters in (3, 300):
        engine = engine_of(parameters)
        found.append(operations(partial(VECTORS[name], engine, engine.weights())))
    assert 0 < found[0] == found[1] <= 17


def test_both_sides_of_a_difference_publish_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """There, across, and back: on ZeRO each is a gathering of all weights."""
    engine = engine_of(3)
    published: list[float] = []

    def first() -> float:
        return float(next(engine.leaves()).detach()[0])

    monkeypatch.setattr(engine, "publish_weights", lambda: published.append(first()))
    before, direction = first(), engine.weights().times(0.0).shift(1.0)
    with engine.perturb_weights(direction, 0.5) as move_to:
        move_to(-0.25)
    assert published == pytest.approx([before + 0.5, before - 0.25, before])


def test_a_forward_after_an_interrupted_shift_reads_what_was_put_back() -> None:
    module = nn.Linear(2, 1, bias=False)
    config = image_config(Layout(), training={"precision": "bf16", "weights": "bf16"})
    engine = PlainEngine(module, config, device=CPU)
    rows = torch.ones(1, 2, dtype=torch.bfloat16)
    before = engine(rows).clone()
    with pytest.raises(KeyError), engine.perturb_weights(engine.weights().times(0.0).shift(1.0), 3.0):
        assert not torch.equal(engine(rows), before)
        raise KeyError
    assert torch.equal(engine(rows), before)


def test_bunches_hold_as_much_as_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "foreach_chunk_bytes", lambda device: 24)
    first = [torch.zeros(size) for size in (2, 4, 1, 9, 3, 0, 3)]
    second = [torch.ones_like(part) for part in first]
    found = list(foreach_chunks(first, second))
    assert [[part.numel() for part in mine] for mine, _ in found] == [[2, 4], [1], [9], [3, 0, 3]]
    assert all(torch.equal(theirs, mine + 1) for pair in found for mine, theirs in zip(*pair, strict=True))
    assert [part for mine, _ in found for part in mine] == first
    assert list(foreach_chunks([], [])) == []
    with pytest.raises(ValueError, match="shorter"):
        list(foreach_chunks(first, second[:-1]))


@pytest.mark.parametrize("together", [8, 1 << 20])
@pytest.mark.parametrize("factor", [0.3, torch.tensor(0.3, dtype=torch.float64)])
def test_arithmetic_against_float64(monkeypatch: pytest.MonkeyPatch, together: int, factor: float | Tensor) -> None:
    monkeypatch.setattr(pieces, "foreach_chunk_bytes", lambda device: together)
    generator = torch.Generator().manual_seed(0)
    mine, theirs = ([torch.randn(size, generator=generator) for size in (5, 0, 1, 40)] for _ in range(2))
    owned = [True, True, False, True]
    one, other = (Shards(parts=parts, owned=owned, group=ALONE) for parts in (mine, theirs))
    results = {
        "plus": (one.plus(other, factor), [a.double() + 0.3 * b.double() for a, b in zip(mine, theirs, strict=True)]),
        "times": (one.times(factor), [0.3 * a.double() for a in mine]),
        "shifted": (one.shift(0.3), [a.double() + 0.3 for a in mine]),
    }
    for name, (found, expected) in results.items():
        for part, exact in zip(found.parts, expected, strict=True):
            torch.testing.assert_close(part.double(), exact, rtol=1e-7, atol=1e-7, msg=name)
    norm = torch.cat([part.double() for part, own in zip(mine, owned, strict=True) if own]).norm()
    torch.testing.assert_close(one.norm(), norm, rtol=1e-12, atol=0.0)
    assert float(Shards(parts=[], owned=[], group=ALONE).norm()) == 0.0
