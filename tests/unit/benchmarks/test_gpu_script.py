"""benchmarks/gpu.py on a machine without a GPU: it runs, and what it cannot measure is null with a reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_ranks, gpu_waits
from benchmarks.gpu_setting import Figures, Item, Setting, measured
from benchmarks.steps import Workload
from trp_scale.distributed.environment import Environment

ROOT = Path(__file__).parents[3]
GPU_ONLY = {"waits", "captured"}
IN_THIS_PROCESS = ("captured", "waits", "modern")
"""Sections without data, or that leave out items on missing data."""


@pytest.fixture
def setting() -> Setting:
    return Setting(environment=Environment(use_gpu=False), small=True)


def fails() -> Figures:
    raise ValueError("wrong\nin two lines")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """The command's own output, and the JSON it wrote."""
    output = tmp_path_factory.mktemp("gpu") / "new" / "gpu.json"
    command = [sys.executable, "benchmarks/gpu.py", "--small", "--output", str(output)]
    command += ["--sections", *IN_THIS_PROCESS]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done, json.loads(output.read_text(encoding="utf-8"))


@pytest.mark.exhaustive
def test_every_section_is_measured_or_says_why_not(
    run: tuple[subprocess.CompletedProcess[str], dict[str, Any]],
) -> None:
    done, document = run
    assert document["device"] == "cpu"
    assert {item["section"] for item in document["items"]} == set(IN_THIS_PROCESS)
    assert set(gpu.SECTIONS) - set(IN_THIS_PROCESS) == {"ranks", "curves"}
    for item in document["items"]:
        assert not item["failed"], item
        assert bool(item["figures"]) != bool(item["reason"]), item
        assert f"{item['section']}: {item['name']}: " in done.stdout
    for item in document["items"]:
        if item["section"] in GPU_ONLY:
            assert "needs a GPU" in item["reason"], item


def test_key_biases_alone_are_left_out() -> None:
    weights = {"blocks.0.attn.qkv.bias": torch.arange(6.0), "blocks.0.attn.qkv.weight": torch.ones(6, 2)}
    found = gpu_ranks.without_key_biases(weights)
    assert {name: tensor.flatten().tolist() for name, tensor in found.items()} == {
        "blocks.0.attn.qkv.bias.queries": [0, 1],
        "blocks.0.attn.qkv.bias.values": [4, 5],
        "blocks.0.attn.qkv.weight": [1.0] * 12,
    }


def test_an_item_without_time_or_with_an_error_does_not_stop_the_others() -> None:
    late = measured("s", Item(name="late", measure=fails, seconds=20), seconds_left=19)
    assert not late.failed
    assert late.line() == "s: late: not measured: skipped: takes about 20 s, 19 s left of --seconds"
    broken = measured("s", Item(name="broken", measure=fails, seconds=1), seconds_left=19)
    assert broken.failed
    assert broken.reason == "ValueError: wrong"
    figures: Figures = {"a": 0.25, "b": float("nan"), "c": None}
    fine = measured("s", Item(name="fine", measure=lambda: figures, seconds=1), seconds_left=19)
    assert fine.line() == "s: fine: a 0.25, b null, c null"
    assert fine.figures == {"a": 0.25, "b": None, "c": None}
    unexpected = measured("s", Item(name="gap", measure=lambda: {"as_expected": False}, seconds=1), seconds_left=19)
    assert unexpected.failed and unexpected.figures == {"as_expected": False}


def test_checks_and_timings_are_told_apart_and_named_ones_are_found() -> None:
    items = [
        Item(name=f"{kind} {n}", measure=fails, seconds=1, timed=kind == "step")
        for kind in ("gap", "step")
        for n in "12"
    ]

    def found(**options: Any) -> list[str]:
        return [item.name for item in items if gpu.wanted(item, gpu.Options(**options))]

    assert found() == ["gap 1", "gap 2", "step 1", "step 2"]
    assert found(items="checks") == ["gap 1", "gap 2"]
    assert found(items="timings", named=("1", "gap")) == ["step 1"]


def test_waits_are_counted_where_they_happen(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def step() -> None:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    places = gpu_waits.waits_of(step)
    assert len(places) == 2
    assert all(place.startswith("test_gpu_script.py:") for place in places)
    assert modes == ["warn", "default"]


@pytest.mark.parametrize("checked", [gpu_waits.checked_text, gpu_waits.checked_images, gpu_waits.checked_modalities])
def test_a_step_of_every_model_is_watched_for_waits(
    setting: Setting, checked: Callable[..., Workload], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    found = gpu_waits.waited(setting, "plain", partial(checked, setting))
    assert found == {"waits": 0, "places": [], "expected": 0, "as_expected": True}
