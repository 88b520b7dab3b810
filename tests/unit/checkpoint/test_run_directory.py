"""A run directory always holds whole checkpoints, whenever the process dies."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.unit.checkpoint.fake_engine import FakeEngine, on_ranks, random_split, renew_digest, save_step, whole_state
from trp_scale.checkpoint import document, keeper, manager, run_directory, writer
from trp_scale.checkpoint.document import CheckpointDocument
from trp_scale.checkpoint.format import read_full_state
from trp_scale.checkpoint.run_directory import (
    MAY_CHANGE,
    adopt_unrecorded,
    check_settings,
    checkpoints,
    copy_tokenizer,
    cut_metrics,
    newest_complete,
    remove_leftovers,
    select,
    set_aside_later,
    take_back,
)
from trp_scale.config import RefusedError
from trp_scale.config.loader import to_dict
from trp_scale.config.registry import make_settings, registered_components
from trp_scale.distributed.groups import ALONE, Group, RankError, check_shared_directory, on_rank_zero, run_on_all_ranks
from trp_scale.errors import CheckpointError
from trp_scale.pretraining.pos_bert.settings import PosBertConfig
from trp_scale.training.sinks import list_pictures

ROOT = Path(__file__).parents[3]


class Killed(BaseException):
    """Stands for the end of the process: nothing is cleaned up."""


def visible(run_dir: Path) -> list[int]:
    return [step for step, _ in checkpoints(run_dir)]


def weights_are_of(path: Path | None, seed: int) -> bool:
    assert path is not None
    return all(tensor.equal(whole_state(seed)["weight"][name]) for name, tensor in read_full_state(path).items())


def test_kill_9_while_tensors_are_written(tmp_path: Path) -> None:
    run_dir, signal = tmp_path / "run", tmp_path / "signal"
    save_step(run_dir, 1, seed=1)
    command = [sys.executable, "-m", "tests.unit.checkpoint.stalled_writer", str(run_dir), str(signal)]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        for _ in range(600):
            if signal.exists() or process.poll() is not None:
                break
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()
    assert signal.exists(), "the process ended before it came to the middle"
    assert (run_dir / "checkpoints" / ".step_00000002.tmp" / "rank-00000.safetensors").exists()
    assert visible(run_dir) == [1]
    assert weights_are_of(newest_complete(run_dir).path, 1)
    save_step(run_dir, 2, seed=2)
    assert weights_are_of(newest_complete(run_dir).path, 2)
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["step_00000001", "step_00000002"]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (writer, "make_room"),
        (manager, "write_pieces"),
        (document.os, "fsync"),
        (manager, "write_tensor_file"),
        (CheckpointDocument, "write"),
        (writer, "publish"),
        (run_directory, "sync_directory"),
        (keeper, "retain"),
        (run_directory.shutil, "rmtree"),
    ],
)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", [2, 3])
def test_death_at_any_point_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, when: str, step: int
) -> None:
    """step 2 replaces a checkpoint of the same step, step 3 adds one; two are kept."""
    save_step(tmp_path, 1, seed=1)
    save_step(tmp_path, 2, seed=2)
    original = getattr(owner, name)

    def dies(*arguments: Any, **named: Any) -> None:
        if when == "after":
            original(*arguments, **named)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, dies)
        try:
            save_step(tmp_path, step, seed=3, keep=2)
        except Killed:
            pass
        else:  # nothing to remove when a checkpoint is added to one that stays
            assert name == "rmtree"
    remove_leftovers(tmp_path)
    found = newest_complete(tmp_path)
    assert found.notices == ()
    assert found.path is not None
    seed = 2 if found.path.name == "step_00000002" else 3
    assert weights_are_of(found.path, seed) or (step == 2 and weights_are_of(found.path, 3))
    assert all(path.name.startswith("step_") for path in (tmp_path / "checkpoints").iterdir())
    save_step(tmp_path, step, seed=4, keep=2)
    assert weights_are_of(newest_complete(tmp_path).path, 4)
    assert visible(tmp_path) == [step - 1, step]


def test_death_between_the_two_renames_of_a_replacement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_step(tmp_path, 2, seed=2)
    original = Path.rename

    def dies(self: Path, target: Path) -> Path:
        if self.name.endswith(".tmp"):
            raise Killed
        return original(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", dies)
        with pytest.raises(Killed):
            save_step(tmp_path, 2, seed=3)
    assert visible(tmp_path) == []
    remove_leftovers(tmp_path)
    assert weights_are_of(newest_complete(tmp_path).path, 2)


def reshape(path: Path, **fields: Any) -> None:
    """Change fields of the first tensor, with the digest of the new content."""
    content = json.loads(path.read_text())
    next(iter(content["tensors"].values())).update(fields)
    path.write_text(json.dumps(content))
    renew_digest(path)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path: (path / "checkpoint.json").unlink(), "checkpoint.json: missing"),
        (lambda path: (path / "checkpoint.json").write_text('{"format": 1'), "checkpoint.json: not JSON"),
        (lambda path: (path / "checkpoint.json").write_text("{}"), "format None"),
        (lambda path: reshape(path / "checkpoint.json", states=[1]), r"tensors.matrix.states is \[1\]"),
        (lambda path: (path / "hooks.safetensors").unlink(), "hooks.safetensors: missing"),
        (
            lambda path: (path / "rank-00000.safetensors").open("ab").write(b"x"),
            "rank-00000.safetensors: [0-9]+ bytes found",
        ),
    ],
)
def test_an_incomplete_newer_one_is_passed_over_by_name(tmp_path: Path, spoil: Any, said: str) -> None:
    older, newer = save_step(tmp_path, 1), save_step(tmp_path, 2)
    spoil(newer)
    found = newest_complete(tmp_path)
    assert found.path == older
    assert len(found.notices) == 1
    assert str(newer) in found.notices[0]
    assert re.search(said, found.notices[0])


def test_going_back_sets_later_ones_aside(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_step(tmp_path, step, seed=step)
    assert [path.name for path in set_aside_later(tmp_path / "checkpoints", 1)] == [
        "set_aside_step_00000002",
        "set_aside_step_00000003",
    ]
    assert visible(tmp_path) == [1]
    save_step(tmp_path, 2, seed=5, keep=2)
    assert [path.name for path in set_aside_later(tmp_path / "checkpoints", 1)] == ["set_aside_step_00000002_2"]
    assert weights_are_of(tmp_path / "checkpoints" / "set_aside_step_00000002", 2)


def test_ranks_that_do_not_share_the_run_directory_are_named(tmp_path: Path) -> None:
    def check(group: Group) -> None:
        own = tmp_path / ("elsewhere" if group.rank == 2 else "shared")
        own.mkdir(exist_ok=True)
        check_shared_directory(own, group)

    for error in on_ranks(3, check):
        assert isinstance(error, CheckpointError)
        assert r"ranks [2] do not see the file" in str(error)
    assert on_ranks(3, lambda group: check_shared_directory(tmp_path / "shared", group)) == [None] * 3
    assert list((tmp_path / "shared").iterdir()) == []


def test_a_directory_that_cannot_be_made_fails_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    for error in on_ranks(2, lambda group: check_shared_directory(tmp_path / "file" / "run", group)):
        assert isinstance(error, CheckpointError)
        assert "rank 0: NotADirectoryError" in str(error)


def test_what_is_refused_keeps_its_words_and_what_is_not_keeps_its_kind() -> None:
    def refuse() -> None:
        raise RefusedError("--resume never, but ...")

    def break_down() -> None:
        raise KeyError("x")

    def either(group: Group) -> None:
        run_on_all_ranks(group, "a try", refuse if group.rank else break_down)

    for error in on_ranks(2, lambda group: on_rank_zero(group, "a try", refuse)):
        assert (type(error), str(error)) == (CheckpointError, "--resume never, but ...")
    for error in on_ranks(2, lambda group: on_rank_zero(group, "a try", break_down)):
        assert (type(error), str(error)) == (RankError, "a try failed on 1 of 2 ranks: rank 0: KeyError: 'x'")
    for error in on_ranks(2, either):
        assert type(error) is RankError
        assert str(error).endswith("rank 0: KeyError: 'x'; rank 1: --resume never, but ...")


def test_the_tokenizer_is_copied_once_and_whole(tmp_path: Path) -> None:
    source, run_dir = tmp_path / "tokenizer", tmp_path / "run"
    source.mkdir()
    run_dir.mkdir()
    (source / "tokenizer.json").write_text("{}", encoding="utf-8")
    (run_dir / ".tokenizer.tmp").mkdir()  # left by a killed run
    (run_dir / ".tokenizer.tmp" / "half").touch()
    for _ in range(2):
        copy_tokenizer(run_dir, source, ALONE)
    assert [path.name for path in (run_dir / "tokenizer").iterdir()] == ["tokenizer.json"]
    assert not (run_dir / ".tokenizer.tmp").exists()


PRESENT = to_dict(PosBertConfig())
ALLOWED = {
    *("model.weights_names", "batch.micro_size", "adversary.check_every"),
    *(f"data.{name}" for name in ("workers", "prefetch", "verify", "max_corrupt_blocks")),
    *(f"training.{name}" for name in ("steps", "epochs", "max_hours", "max_skipped_steps", "compile", "capture")),
    *("training.deterministic", "training.activation_checkpointing"),
}
ALLOWED_SECTIONS = {"fsdp", "megatron", "validation", "checkpoint", "reliability", "logging"}


def all_fields() -> list[str]:
    sections = {section: values for section, values in PRESENT.items() if isinstance(values, dict)}
    return ["upstream", *(f"{section}.{field}" for section, values in sections.items() for field in values)]


def changed(*names: str) -> dict[str, Any]:
    """The default settings with other values in these fields."""
    settings = to_dict(PosBertConfig())
    for name in names:
        *section, field = name.split(".")
        (settings[section[0]] if section else settings)[field] = "another value"
    return settings


@pytest.mark.parametrize("field", all_fields())
def test_exactly_the_listed_settings_may_change(field: str) -> None:
    stored = changed(field)
    if field in ALLOWED or field.partition(".")[0] in ALLOWED_SECTIONS:
        (notice,) = check_settings(stored, PRESENT)
        assert notice.startswith(f"{field}: checkpoint another value, now ")
        return
    with pytest.raises(RefusedError) as caught:
        check_settings(stored, PRESENT)
    assert f"{field}: checkpoint another value, now " in str(caught.value)


def test_every_rule_names_a_setting_that_exists() -> None:
    of_kinds = {f"{role}.{field.name}" for role, _, settings in registered_components() for field in fields(settings)}
    hook_figures = {f"{name}.*" for role, name, _ in registered_components() if role == "hook"}
    sections = {f"{section.name}.*" for section in fields(PosBertConfig())}
    assert set(MAY_CHANGE) <= {*all_fields(), *hook_figures, *sections, *of_kinds, "modules"}


def test_all_refused_settings_are_listed_with_both_values_and_what_may_change() -> None:
    stored = to_dict(PosBertConfig())
    stored["optimizer"]["lr"] = 0.5
    stored["batch"] = {"global_size": 8, "micro_size": 4}
    stored["training"]["seed"] = 3
    with pytest.raises(RefusedError) as caught:
        check_settings(stored, PRESENT)
    message = str(caught.value)
    assert "optimizer.lr: checkpoint 0.5, now 0.0002" in message
    assert "batch.global_size: checkpoint 8, now 256" in message
    assert "training.seed: checkpoint 3, now 0" in message
    assert "micro_size: checkpoint" not in message
    assert all(rule in message for rule in MAY_CHANGE)


def test_a_setting_newer_than_the_checkpoint_had_its_default() -> None:
    stored = to_dict(PosBertConfig())
    del stored["masking"]["unit"]
    assert check_settings(stored, PRESENT) == []
    present = to_dict(PosBertConfig())
    present["masking"]["unit"] = "word"
    with pytest.raises(RefusedError, match=r"masking\.unit"):
        check_settings(stored, present)


def test_a_setting_that_no_longer_exists_is_refused() -> None:
    stored = to_dict(PosBertConfig())
    stored["masking"]["gone"] = 3
    with pytest.raises(RefusedError, match=r"masking\.gone: checkpoint 3, now absent"):
        check_settings(stored, PRESENT)


def test_another_length_is_allowed_and_its_consequence_told() -> None:
    stored = to_dict(PosBertConfig())
    stored["training"]["steps"] = 10
    (notice,) = check_settings(stored, PRESENT)
    change = "training.steps: checkpoint 10, now 1000000"
    assert notice == f"{change} (the linear learning-rate schedule now ends there)"
    constant = to_dict(PosBertConfig())
    constant["optimizer"]["schedule"] = stored["optimizer"]["schedule"] = "constant"
    assert check_settings(stored, constant) == [change]


def test_data_may_move_but_not_change() -> None:
    moved = changed("data.path")
    assert len(check_settings(moved, PRESENT, stored_digest="a", present_digest="a")) == 1
    with pytest.raises(RefusedError, match="content of the data set: checkpoint a, now b"):
        check_settings(PRESENT, PRESENT, stored_digest="a", present_digest="b")
    with pytest.raises(RefusedError, match=r"data\.path"):
        check_settings(moved, PRESENT, stored_digest=None, present_digest=None)
    with pytest.raises(RefusedError, match="content of the data set: checkpoint unknown, now b"):
        check_settings(PRESENT, PRESENT, stored_digest=None, present_digest="b")


def test_settings_are_compared_as_json_gives_them_back() -> None:
    stored = json.loads(json.dumps(PRESENT))
    stored["balancer"]["reference"] = {"verb": 1.0}
    assert check_settings(stored, PRESENT | {"balancer": PRESENT["balancer"] | {"reference": {"verb": 1}}}) == []


def test_never_refuses_a_directory_that_is_not_empty(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert select(run_dir, "never", ALONE).path is None
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / ".hidden").touch()
    (run_dir / "lease.json").touch()  # of the start that looks
    assert select(run_dir, "never", ALONE).path is None
    (run_dir / "config.yaml").touch()
    with pytest.raises(RefusedError, match=r"not empty \(it contains config.yaml\)"):
        select(run_dir, "never", ALONE)
    for number in range(10):
        (run_dir / f"file{number}").touch()
    with pytest.raises(RefusedError, match="file6 and 3 more"):
        select(run_dir, "never", ALONE)


def test_auto_takes_the_newest_complete_one_or_starts_fresh(tmp_path: Path) -> None:
    fresh = select(tmp_path, "auto", ALONE)
    assert fresh.path is None
    assert "starting from step 0" in fresh.notices[-1]
    older, newer = save_step(tmp_path, 1), save_step(tmp_path, 2)
    assert select(tmp_path, "auto", ALONE).path == newer
    (newer / "hooks.safetensors").unlink()
    (tmp_path / "checkpoints" / ".step_00000003.tmp").mkdir()
    selection = select(tmp_path, "auto", ALONE)
    assert selection.path == older
    assert str(newer) in selection.notices[0]
    assert str(older) in selection.notices[1]
    assert not (tmp_path / "checkpoints" / ".step_00000003.tmp").exists()


def flip(file: Path) -> None:
    """Change one bit in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)


@pytest.mark.parametrize("file", ["rank-00000.safetensors", "rank-00001.safetensors", "hooks.safetensors"])
def test_auto_passes_over_what_is_damaged_and_a_path_does_not(tmp_path: Path, file: str) -> None:
    """On every rank, also where only the other one has read the damaged file."""
    split = random_split(3, 2)

    def saved(group: Group, step: int) -> Path:
        return save_step(tmp_path, step, engine=FakeEngine(group.rank, split, whole_state(step)), group=group)

    (first, _), (second, _), (third, _) = (on_ranks(2, lambda group, n=n: saved(group, n)) for n in (1, 2, 3))
    flip(third / file)
    flip(second / file)
    for selection in on_ranks(2, lambda group: select(tmp_path, "auto", group)):
        assert selection.path == first
        assert len(selection.notices) == 3
        for notice, path in zip(selection.notices, (third, second), strict=False):
            assert notice.startswith(f"{path} is damaged and skipped: ")
            assert f"{path / file}: bytes 0:" in notice
        assert selection.notices[-1] == f"resuming from {first}"
    for error in on_ranks(2, lambda group: select(tmp_path, str(third), group)):
        assert isinstance(error, RefusedError)
        assert str(error).startswith(f"--resume {third}: the checkpoint is damaged: ")
        assert f"{third / file}: bytes 0:" in str(error)
    flip(first / file)
    for error in on_ranks(2, lambda group: select(tmp_path, "auto", group)):
        assert isinstance(error, RefusedError)
        assert str(error).startswith(f"--resume auto: {third} is damaged") and "none is left" in str(error)


def test_a_checkpoint_of_version_0_1_is_refused_in_one_line_that_says_so(tmp_path: Path) -> None:
    document = save_step(tmp_path, 1) / "checkpoint.json"
    content = json.loads(document.read_text(encoding="utf-8"))
    document.write_text(json.dumps(content | {"format": 1}), encoding="utf-8")
    for resume in ("auto", str(tmp_path), str(document.parent)):
        with pytest.raises(RefusedError, match=r"format 1.*format 2") as caught:
            select(tmp_path, resume, ALONE)
        assert "\n" not in str(caught.value)


def test_a_path_is_a_checkpoint_or_a_run(tmp_path: Path) -> None:
    other, run_dir = tmp_path / "other", tmp_path / "run"
    older, newer = save_step(other, 1), save_step(other, 2)
    (other / "checkpoints" / ".step_00000003.tmp").mkdir()
    assert select(run_dir, str(other), ALONE).path == newer
    assert select(run_dir, str(older), ALONE).path == older
    assert (other / "checkpoints" / ".step_00000003.tmp").exists(), "another run may be writing there now"
    (newer / "rank-00000.safetensors").unlink()
    with pytest.raises(RefusedError, match=r"damaged: .*rank-00000\.safetensors: missing"):
        select(run_dir, str(newer), ALONE)
    with pytest.raises(RefusedError, match="no such directory"):
        select(run_dir, str(tmp_path / "nowhere"), ALONE)
    (tmp_path / "empty").mkdir()
    with pytest.raises(RefusedError, match="it contains no checkpoint"):
        select(run_dir, str(tmp_path / "empty"), ALONE)


def test_metrics_are_cut_back_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert cut_metrics(path, 5) == [] and not path.exists()
    lines = [f'{{"step": {step},   "loss": 0.{step}}}\n'.encode() for step in (1, 2, 3, 4)]
    path.write_bytes(b"".join(lines) + b'{"step": 5, "lo')
    assert [notice[-2:] for notice in cut_metrics(path, 2)] == [" 2", " 1"]
    assert path.read_bytes() == lines[0] + lines[1]
    assert cut_metrics(path, 2) == []
    assert [notice[-2:] for notice in cut_metrics(path, 0)] == [" 2"]
    assert path.read_bytes() == b""
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    "torn", [b'{"step": 2}', b"\x00\x00\x00\n", b'{"loss": 1}\n', b"[2]\n", b"\xff\xfe\n", b'{"step": "2"}\n']
)
def test_a_record_that_is_not_whole_is_dropped(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + torn)
    assert [notice[-2:] for notice in cut_metrics(path, 9)] == [" 1"]
    assert path.read_bytes() == b'{"step": 1}\n'


def test_a_run_taken_back_never_returns_to_what_it_left(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_step(tmp_path, step)
    (tmp_path / "checkpoints" / "step_00000003" / "checkpoint.json").unlink()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    drawn = [tmp_path / "pictures" / f"step_0000000{step}" / "masks.png" for step in (1, 2)]
    for picture in drawn:
        picture.parent.mkdir(parents=True)
        picture.touch()
    assert list_pictures(tmp_path / "pictures") == drawn
    notices = take_back(tmp_path, 1)
    assert list_pictures(tmp_path / "pictures") == drawn[:1]
    assert (tmp_path / "pictures" / "set_aside_step_00000002" / "masks.png").exists()
    assert len(notices) == 4
    assert "set_aside_step_00000002" in notices[0]
    assert "set_aside_step_00000003" in notices[1]
    assert notices[2:] == [
        "metrics.jsonl: records after step 1 removed: 2",
        "metrics.jsonl: records torn and dropped: 1",
    ]
    selection = select(tmp_path, "auto", ALONE)
    assert selection.path == tmp_path / "checkpoints" / "step_00000001"
    assert len(selection.notices) == 1
    assert take_back(tmp_path, 1) == []


def test_another_run_s_checkpoint_does_not_continue_this_run_s_metrics(tmp_path: Path) -> None:
    other = save_step(tmp_path / "other", 2)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    assert select(run_dir, str(other), ALONE).path == other
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n', encoding="utf-8")
    with pytest.raises(RefusedError, match=r"metrics\.jsonl"):
        select(run_dir, str(other), ALONE)
    own = save_step(run_dir, 3)
    assert select(run_dir, str(own), ALONE).path == own


@pytest.mark.parametrize("section", ["optimizer", "balancer"])
def test_a_number_as_a_section_is_refused(section: str) -> None:
    config = PosBertConfig()
    config.balancer = make_settings("balancer", "group_dro")
    with pytest.raises(CheckpointError, match=section):
        adopt_unrecorded(config, {section: 5})
