"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Generator, Iterator, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRP_SCALE_CACHE_GB", "1")  # by default it depends on how full the disk is
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the shared ranks are gloo ranks on the CPU, with or without a GPU beside them

import hypothesis
import pytest

from tests.fixtures import small_image_dataset, small_text_dataset
from tests.ranks import Ranks
from tests.runs import Refused
from tests.shortcuts import set_old_objects_aside, take_shortcuts
from trp_scale.cli import main as cli
from trp_scale.distributed import stop

# No example may fail for being slow: the machine decides that, not the code.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

take_shortcuts()

BUILDERS = ("pretraining.mm_mae", "pretraining.pos_bert", "finetuning.detection")
preload = forkserver.set_forkserver_preload


def preload_all(modules: Sequence[str]) -> None:
    """Preload the batch builders of all modalities in the server of loader workers, which is started once for many
    tests: a worker of images that is forked from a server for text imports torchvision for 2 s."""
    preload([*modules, *(f"trp_scale.{name}.batch" for name in BUILDERS)])


forkserver.set_forkserver_preload = preload_all


RANKS = {"two_ranks": Ranks(2), "four_ranks": Ranks(4)}
"""By the fixture's name."""


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two gloo ranks, started at the first use."""
    yield RANKS["two_ranks"]
    RANKS["two_ranks"].close()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """Four of them, which take some seconds to start."""
    yield RANKS["four_ranks"]
    RANKS["four_ranks"].close()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without collecting garbage, which would scan millions of objects in half of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_unconfigure() -> None:
    """Let the interpreter free the excluded objects at its end."""
    gc.unfreeze()


def pytest_runtest_teardown(item: pytest.Function, nextitem: pytest.Function | None) -> None:
    """Ranks end before a file that does not ask for them: idle ones would take a part of a core from it."""
    if nextitem is not None and nextitem.path != item.path:
        for name, ranks in RANKS.items():
            if name not in nextitem.fixturenames:
                ranks.close()


@pytest.fixture(autouse=True, scope="module")
def old_objects_aside() -> None:
    """Repeat for each file, to include what earlier files have imported."""
    set_old_objects_aside()


@pytest.fixture(autouse=True)
def no_signal_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that another test sent to this process is none to this test."""
    monkeypatch.setattr(stop, "_first_at", None)
    monkeypatch.setattr(stop, "_early", [])


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """A function that runs `trp-scale WORDS`, checks that it is refused, and returns the message."""

    def run(*words: object) -> str:
        capsys.readouterr()
        assert cli.main([str(word) for word in words]) == 2
        return capsys.readouterr().err

    return run


@pytest.fixture(scope="session")
def text_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few hundred rows of real English, sharded."""
    return small_text_dataset(tmp_path_factory.mktemp("data") / "text")


@pytest.fixture(scope="session")
def packed_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text of `text_dataset` in packed rows."""
    return small_text_dataset(tmp_path_factory.mktemp("data") / "packed", pack=True)


@pytest.fixture(scope="session")
def image_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hundred rendered scenes with depth and segmentation, sharded."""
    return small_image_dataset(tmp_path_factory.mktemp("data") / "scenes")


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium. Of a module: its event loop would disturb other tests."""
    if BROWSER is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on PATH")
    api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield opened
        opened.close()
