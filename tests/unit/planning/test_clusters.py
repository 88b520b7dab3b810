"""GPUs and networks: rates, latencies, and how long a collective takes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trp_scale.errors import RefusedError
from trp_scale.planning.clusters import GPUS, Cluster, find_gpu
from trp_scale.planning.command import this_gpu
from trp_scale.training.observer import peak_flops

DEVICES = {
    "a100-80": "A100",
    "h100": "H100",
    "h200": "H200",
    "b200": "B200",
    "l40s": "L40S",
    "rtx4090": "GeForce RTX 4090",
}


@pytest.mark.parametrize(("name", "device"), DEVICES.items())
def test_peaks_are_those_that_a_run_reports_by(name: str, device: str) -> None:
    assert GPUS[name].peak == peak_flops(f"NVIDIA {device}", "bf16")


def test_within_a_node_a_ring_has_nvlink() -> None:
    """7/8 of 8 GB, twice, at 0.75 x 300 GB/s; 15 us for the call, and twice 7 hops of 1 us."""
    cluster = Cluster(gpu=GPUS["a100-80"], gpus=8)
    assert cluster.seconds("all-reduce", 8e9) == pytest.approx(15e-6 + 2 * (7e9 / 225e9 + 7e-6))


def test_between_nodes_a_ring_has_all_adapters_of_a_node() -> None:
    """8 x 25 GB/s are less than NVLink's 300; of 15 hops one is between nodes."""
    cluster = Cluster(gpu=GPUS["a100-40"], gpus=16)
    assert cluster.nodes == 2
    assert cluster.seconds("gather", 16e9) == pytest.approx(15e-6 + 15e9 / 150e9 + 14e-6 + 5e-6)


def test_groups_of_neighbours_stay_in_a_node_and_groups_across_have_an_adapter_a_rank() -> None:
    """On 4 nodes of 8: 8 neighbours have NVLink's 225 GB/s; 4 ranks, one of each node, have 0.75 x 25 GB/s and 3 hops.
    Of 8 ranks each 4th, two are in a node: two adapters, 3 hops between nodes and 4 within."""
    cluster = Cluster(gpu=GPUS["a100-80"], gpus=32)
    assert cluster.seconds("gather", 8e9, 8) == pytest.approx(15e-6 + 7e9 / 225e9 + 7e-6)
    assert cluster.seconds("all-reduce", 4e9, 4, 8) == pytest.approx(15e-6 + 2 * (3e9 / 18.75e9 + 3 * 5e-6))
    assert cluster.seconds("gather", 8e9, 8, 4) == pytest.approx(15e-6 + 7e9 / 37.5e9 + 3 * 5e-6 + 4e-6)


def test_gpus_without_nvlink_have_pcie() -> None:
    """32 GB/s in one direction, of which PCIe cards that copy through host memory have half."""
    assert (GPUS["l40s"].link, GPUS["rtx4090"].link) == (32e9, 16e9)
    fast, slow = (Cluster(gpu=GPUS[name], gpus=8).seconds("gather", 8e9) for name in ("b200", "l40s"))
    assert slow == pytest.approx(fast * 900 / 32, rel=0.01)


@pytest.mark.parametrize("name", DEVICES)
def test_the_gpu_of_a_machine_is_recognised(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: f"NVIDIA {DEVICES[name]}")
    memory = SimpleNamespace(total_memory=GPUS[name].memory)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: memory)
    assert this_gpu() == (GPUS[name], [])


def test_an_unknown_gpu_is_refused_with_the_known_ones() -> None:
    with pytest.raises(RefusedError, match=r"a100: its kinds"):
        find_gpu("a100")
    with pytest.raises(RefusedError, match=r"--gpu.*h10.*h100.*allowed.*a100-40.*a100-80.*h100"):
        find_gpu("h10")
