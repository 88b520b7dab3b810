"""Data is prepared over the nodes of a Ray cluster, also when one of them is lost: the same bytes, nothing twice."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import small_text_dataset
from tests.runs import wait_until
from tests.unit.sharding.pseudo_labels.conftest import Models, files, label, nine_images
from tests.unit.sharding.pseudo_labels.tiny_models import depth_anything, mask2former
from tests.unit.sharding.test_parts import content, text_part
from trp_scale.errors import DataError
from trp_scale.sharding.workers import Advance, Portion, ProgressBar, run_portions

ray = pytest.importorskip("ray", reason="needs ray: pip install 'trp-scale[ray]'")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without CPUs, and two nodes of one CPU."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 80_000_000})
    for _ in range(2):
        made.add_node(num_cpus=1, object_store_memory=80_000_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", made.address)
        yield made
    made.shutdown()


class Squares:
    """Refuses seven."""

    def __init__(self, advance: Advance) -> None:
        self._advance = advance

    def __call__(self, portion: Portion[int]) -> int:
        if portion.number == 7:
            raise DataError("seven is refused")
        self._advance(portion.number)
        return portion.number**2


def over_ray(portions: range, gpus: int = 0) -> dict[int, int]:
    bar = ProgressBar(counters=("portions",), total=1, shown=False)
    numbered = [Portion(number, (), 1) for number in portions]
    return run_portions(numbered, Squares, (), processes=0, bar=bar, executor="ray", gpus=gpus)


@pytest.mark.exhaustive
def test_what_a_worker_refuses_is_refused_as_it_is(cluster: Any) -> None:
    with pytest.raises(DataError, match=r"^seven "):
        over_ray(range(6, 9))


def test_a_cluster_without_what_is_needed_is_refused(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"0 GPUs.*'GPU': 1"):
        over_ray(range(2), gpus=1)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(DataError, match=r"pip install 'trp-scale\[ray\]'"):
        over_ray(range(2))


def test_text_is_the_same_data_set_when_a_node_is_killed(cluster: Any, tmp_path: Path) -> None:
    made, output = small_text_dataset(tmp_path / "data"), tmp_path / "over_ray"
    running = threading.Thread(target=lambda: text_part(made, output, 0, 1, executor="ray", processes=0))
    running.start()
    wait_until(lambda: list(output.glob("shards/*.index.json")), "a shard", pause=0.01)
    assert running.is_alive()
    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    running.join(timeout=300)
    assert content(output) == content(made)
    cluster.add_node(num_cpus=1, object_store_memory=80_000_000)


@pytest.mark.exhaustive
def test_labels_are_the_same(cluster: Any, tmp_path: Path) -> None:
    models = Models(depth=depth_anything(tmp_path / "depth"), semseg=mask2former(tmp_path / "semseg"))
    for name, executor in (("here", "local"), ("over_ray", "ray")):
        assert label(nine_images(tmp_path / name), models, executor=executor)
    assert files(tmp_path / "over_ray") == files(tmp_path / "here")
