"""Invariant 3: a run that is interrupted and resumed is the run that was not."""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.checkpoints import stored_state, unequal
from tests.distributed.engine_layouts import ENGINE_FLAGS
from tests.distributed.launched import kill_all, launch, wait_for_steps
from tests.grids import always
from tests.ranks import Ranks
from tests.runs import essence, flags, image_flags, lines, pretrain_here, start
from trp_scale.checkpoint.run_directory import checkpoint_path, checkpoints, newest_complete
from trp_scale.errors import RefusedError, UnreadableError

LAYOUTS = {name: ENGINE_FLAGS[name] for name in ("ddp", "fsdp", "zero0", "zero1", "zero2", "zero3")}


def same_run(ours: Path, reference: Path) -> None:
    """All that metrics.jsonl says of the training, bit for bit."""
    assert [essence(line) for line in lines(ours)] == [essence(line) for line in lines(reference)]


RUNS: dict[str, Callable[..., list[str]]] = {"pos_bert_tiny": flags, "adpe_tiny": partial(image_flags, "adpe_tiny")}


@pytest.mark.exhaustive  # tests/faults/test_kills.py kills one of two ranks each time
@pytest.mark.parametrize("recipe", ["pos_bert_tiny", "adpe_tiny"])
def test_kill_9_at_a_random_step_and_resume(request: pytest.FixtureRequest, tmp_path: Path, recipe: str) -> None:
    dataset: Path = request.getfixturevalue("text_dataset" if recipe == "pos_bert_tiny" else "image_dataset")
    changes = {"training__steps": 14, "checkpoint__every": 3, "data__workers": 1}
    changes |= {"model__dropout": 0.1} if recipe == "pos_bert_tiny" else {}
    assert pretrain_here(RUNS[recipe](dataset, tmp_path / "whole", **changes)) == 0
    kill_at = random.SystemRandom().randint(4, 12)
    victim = start(RUNS[recipe](dataset, tmp_path / "killed", **changes))
    metrics = tmp_path / "killed" / "metrics.jsonl"
    deadline = time.monotonic() + 600
    while not newest_complete(tmp_path / "killed").path or metrics.read_bytes().count(b"\n") < kill_at:
        assert victim.poll() is None and time.monotonic() < deadline, f"no step {kill_at}"
        time.sleep(0.005)
    os.kill(victim.pid, signal.SIGKILL)
    victim.communicate()
    assert victim.returncode == -signal.SIGKILL
    assert newest_complete(tmp_path / "killed").path is not None
    assert pretrain_here(RUNS[recipe](dataset, tmp_path / "killed", **changes)) == 0
    assert lines(tmp_path / "killed")[-1]["step"] == 14
    same_run(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.exhaustive
def test_kill_9_of_a_whole_deepspeed_run_at_a_random_step_and_start_it_again(
    two_ranks: Ranks, text_dataset: Path, tmp_path: Path
) -> None:
    changes = {"training__steps": 14, "checkpoint__every": 3, "model__dropout": 0.1, **LAYOUTS["zero3"]}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    two_ranks(pretrain_here, flags(text_dataset, whole, **changes))
    victim = launch("deepspeed", flags(text_dataset, killed, data__workers=1, **changes))
    wait_for_steps(victim, killed, random.SystemRandom().randint(4, 11))
    while newest_complete(killed).path is None:  # it is written behind the steps
        assert victim.poll() is None
        time.sleep(0.005)
    kill_all(victim)
    assert victim.returncode == -signal.SIGKILL
    assert len(lines(killed)) < 14, "it was over before it was killed"
    taken = newest_complete(killed).path
    assert taken is not None
    kept = lines(killed)[: int(taken.name.rpartition("_")[2])]
    assert set(two_ranks(pretrain_here, flags(text_dataset, killed, resume="auto", **changes))) == {0}
    assert lines(killed)[: len(kept)] == kept, "times and all: it did not start over"
    same_run(killed, whole)
    assert unequal(*(stored_state(checkpoint_path(run_dir, 14)) for run_dir in (killed, whole))) == []


def run_and_listen(arguments: list[str]) -> tuple[int, str]:
    """Exit status and what this rank printed; of a refusal 2, of unreadable data 1, and its message."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            return pretrain_here(arguments), printed.getvalue()
        except RefusedError as error:
            return 1 if isinstance(error, UnreadableError) else 2, str(error)


def test_a_run_goes_on_from_before_a_damaged_checkpoint(two_ranks: Ranks, text_dataset: Path, tmp_path: Path) -> None:
    """One flipped bit in what the other rank wrote and reads."""
    changes = {"training__steps": 8, "checkpoint__every": 2, "checkpoint__keep": 3, **LAYOUTS["fsdp"]}
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    two_ranks(pretrain_here, flags(text_dataset, whole, **changes))
    shutil.copytree(whole, run_dir)
    newest, taken = checkpoint_path(run_dir, 8), checkpoint_path(run_dir, 6)
    content = bytearray((newest / "rank-00001.safetensors").read_bytes())
    content[len(content) // 2] ^= 16
    (newest / "rank-00001.safetensors").write_bytes(content)
    refused = two_ranks(run_and_listen, flags(text_dataset, run_dir, resume=newest, **changes))
    assert refused[0] == refused[1] and refused[0][0] == 2
    assert f"--resume {newest}: " in refused[0][1]
    (status, printed), other = two_ranks(run_and_listen, flags(text_dataset, run_dir, resume="auto", **changes))
    assert (status, *other) == (0, 0, "")
    assert str(newest) in printed and "rank-00001.safetensors: bytes 0:" in printed
    assert f"resuming from {taken}" in printed
    same_run(run_dir, whole)
    assert [step for step, _ in checkpoints(run_dir)] == [4, 6, 8]


@pytest.mark.parametrize(
    ("layout", "estimate"),
    always(
        [*((name, "exact") for name in LAYOUTS), ("fsdp", "lagged"), ("zero2", "lagged")],
        ("zero3", "exact"),
        ("fsdp", "lagged"),
    ),
)
def test_two_halves_are_the_whole_with_dropout(
    two_ranks: Ranks, text_dataset: Path, tmp_path: Path, layout: str, estimate: str
) -> None:
    changes = {
        "model__dropout": 0.1,
        "optimizer__schedule": "constant",
        "balancer__estimate": estimate,
        **LAYOUTS[layout],
    }
    two_ranks(pretrain_here, flags(text_dataset, tmp_path / "whole", training__steps=4, **changes))
    two_ranks(pretrain_here, flags(text_dataset, tmp_path / "halves", training__steps=2, **changes))
    two_ranks(pretrain_here, flags(text_dataset, tmp_path / "halves", training__steps=4, **changes))
    same_run(tmp_path / "halves", tmp_path / "whole")


def test_what_may_not_change_is_refused_field_by_field(text_dataset: Path, tmp_path: Path) -> None:
    pretrain_here(flags(text_dataset, tmp_path, training__steps=2))
    with pytest.raises(Exception, match=r"(?s)batch\.global_size.*8.*16.*optimizer\.lr") as refusal:
        pretrain_here(flags(text_dataset, tmp_path, training__steps=4, batch__global_size=16, optimizer__lr=3e-3))
    assert "training.steps" not in str(refusal.value).split("may change")[0]
