"""Weights, gradients and moments in host memory: the same run. On a CPU that shows only that nothing changes."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.ops.op_builder import CPUAdamBuilder

from tests.distributed.test_checkpoint_engines import walk
from tests.grids import always
from tests.parity import test_learned_masks
from tests.parity.compare import too_far
from tests.parity.test_hybrid_sharding import RUNS, reference
from tests.ranks import Ranks
from tests.synthetic import Layout, hybrid, refusal, run, small_engine
from tests.synthetic_masks import run_masks
from trp_scale.core.engine import EngineError
from trp_scale.engines.fsdp import zeros_on_disk
from trp_scale.models.initialise import allocate

OFFLOADED = Layout(engine="fsdp", settings={"fsdp": {"offload": True}})
NAMES = ("minimax, clipped", "LAMB", "adversary")


@pytest.mark.parametrize(
    ("name", "where"),
    always(product(NAMES, ["memory", "disk"]), ("adversary", "memory"), ("LAMB", "disk")),
)
def test_two_ranks_give_the_weights_of_one(two_ranks: Ranks, name: str, where: str, tmp_path: Path) -> None:
    function, changes = RUNS[name]
    theirs = reference(name)
    assert theirs.moved
    layout = OFFLOADED if where == "memory" else on_disk(tmp_path)
    assert too_far(two_ranks(function, layout, changes)[0], theirs) == []


def on_disk(directory: Path) -> Layout:
    return Layout(engine="fsdp", settings={"fsdp": {"offload": True, "offload_directory": str(directory)}})


def mapped_bytes(layout: Layout) -> tuple[int, int]:
    """Bytes of this process's maps of files without a name, after a step; and of weights and moments that it holds."""
    engine = small_engine(layout)
    held = sum(tensor.nbytes for piece in engine.pieces() for tensor in piece.tensors.values() if tensor.numel() > 1)
    found = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, _, _, _, _, *name = line.split(maxsplit=5)
        if name and layout.settings["fsdp"]["offload_directory"] in name[0] and name[0].endswith("(deleted)"):
            first, last = (int(each, 16) for each in place.split("-"))
            found += last - first
    engine.close()
    return found, held


def test_weights_and_moments_lie_in_files_that_nobody_has_to_remove(two_ranks: Ranks, tmp_path: Path) -> None:
    for mapped, held in two_ranks(mapped_bytes, on_disk(tmp_path)):
        assert held > 0 and mapped >= held
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_on_disk_goes_on(two_ranks: Ranks, tmp_path: Path) -> None:
    walk([Layout(engine="fsdp"), on_disk(tmp_path)], tmp_path, two_ranks)


def test_a_directory_that_cannot_be_used_is_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    for said in two_ranks(refusal, on_disk(tmp_path / "nowhere")):
        assert re.search(r"offload_directory .*nowhere: no file of .*\(No such file or directory\)", said)
    with pytest.raises(EngineError, match=r"no file of .* GB can be made \(.*(No space left|File too large)"):
        zeros_on_disk([1 << 50], torch.float32, tmp_path)


@pytest.mark.exhaustive
def test_three_levels_are_the_same(two_ranks: Ranks) -> None:
    test_learned_masks.agree(two_ranks(run_masks, OFFLOADED, test_learned_masks.changes("patchwise"))[0], "patchwise")


def where(layout: Layout) -> tuple[set[bool], bool]:
    """Whether FSDP2 keeps each parameter in host memory, and whether the loop waits for what is decided on the device,
    which the host's optimizer cannot read."""
    engine = small_engine(layout)
    kept = {parameter.offload_to_cpu for parameter in engine._parameters()}  # type: ignore[attr-defined]
    engine.close()
    return kept, engine.decides_on_host


@pytest.mark.parametrize(("layout", "expected"), [(OFFLOADED, True), (hybrid(1), False)])
def test_all_parameters_lie_on_the_host_where_asked(two_ranks: Ranks, layout: Layout, expected: bool) -> None:
    assert two_ranks(where, layout) == [({expected}, expected)] * 2


def test_shapes_get_memory_on_the_host_and_buffers_on_the_device() -> None:
    module = torch.nn.BatchNorm1d(3, device="meta")
    module.running_mean = torch.zeros(3)
    found = allocate(module, torch.device("meta"), torch.device("cpu"))
    assert (found.weight.device.type, found.running_mean.device.type) == ("cpu", "meta")


def host_adam(stage: int, **layout: Any) -> Layout:
    """ZeRO with DeepSpeed's C++ Adam on the host."""
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}, "stage3_param_persistence_threshold": 0}
    document = {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": True}
    return Layout(engine="deepspeed", stage=stage, document=document, **layout)


DECAYED = {"optimizer": {"lr": 1e-2, "weight_decay": 0.1, "clipping": 0.5}}


@pytest.fixture(scope="module")
def built() -> None:
    """DeepSpeed's C++ Adam, compiled where it is not yet: two minutes."""
    try:
        CPUAdamBuilder().load(verbose=False)
    except Exception as error:  # whatever a compiler may say
        pytest.skip(f"DeepSpeed's C++ Adam does not build here: {error}: {error.__cause__}")


def optimizer_of(layout: Layout) -> str:
    engine = small_engine(layout)
    name = type(engine.layout.torch_optimizer).__name__  # type: ignore[attr-defined]
    engine.close()
    return name


@pytest.mark.exhaustive
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_host_s_own_adam_is_adamw(two_ranks: Ranks, stage: int) -> None:
    """Decay apart from the gradient, of matrices only, and the moments' bias corrected."""
    theirs = run(Layout(), DECAYED)
    assert theirs.moved
    assert two_ranks(optimizer_of, host_adam(stage)) == ["DeepSpeedCPUAdam"] * 2
    assert too_far(two_ranks(run, host_adam(stage), DECAYED)[0], theirs) == []


@pytest.mark.exhaustive
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_of_the_host_s_own_adam_goes_on(two_ranks: Ranks, stage: int, tmp_path: Path) -> None:
    walk([Layout(engine="fsdp"), host_adam(stage), host_adam(stage)], tmp_path, two_ranks)
