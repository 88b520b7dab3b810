"""The command: what is listed exists, and a mistake of the user's is one message and status 2."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trp_scale
from tests.grids import always
from trp_scale.cli import main as cli
from trp_scale.cli.main import run
from trp_scale.config import RefusedError
from trp_scale.config.flags import read
from trp_scale.config.loader import dump, load_recipe
from trp_scale.config.schema import CREDENTIALS, find_credentials
from trp_scale.console import EscapedStream
from trp_scale.errors import ExitStatus, exit_status_and_message

ROOT = Path(__file__).parents[3]


COMMANDS = {name: command for group in cli.COMMANDS.values() for name, command in group.items()}

HEAVY = ("torch", "timm", "transformers", "nltk", "textblob", "deepspeed", "torchvision", "scipy", "sklearn")


def launched(script: str, *argv: str, directory: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """A script as a process of its own, somewhere else than in the checkout."""
    command = [sys.executable, str(ROOT / script), *argv]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=directory, env=environ, capture_output=True, text=True, timeout=240, check=False)


def test_no_command_and_help_list_commands_and_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert cli.main(["--help"]) == 0
    listed = capsys.readouterr().out
    for name, (_, line) in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(line)}$", listed, flags=re.MULTILINE)
    assert max(map(len, listed.splitlines())) <= 100
    for status in ExitStatus:
        assert re.search(rf"^  {status.value} +{re.escape(status.meaning)}$", listed, flags=re.MULTILINE)
    assert cli.main(["pretrian"]) == 2
    said = capsys.readouterr().err
    assert "'pretrian' is not a command of trp-scale; did you mean pretrain?; allowed: shard-text, shard-images" in said


def test_the_document_lists_every_exit_status() -> None:
    table = (ROOT / "docs/reliability.md").read_text().partition("## Exit status")[2].partition("\n## ")[0]
    assert [int(value) for value in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)] == [*ExitStatus]


def raiser(error: BaseException) -> Callable[[], int]:
    def fails() -> int:
        raise error

    return fails


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (RefusedError("--steps is 0"), 2, "error: --steps is 0\n"),
        (KeyboardInterrupt(), 130, "error: interrupted by Ctrl-C\n"),
        (
            RuntimeError("rank 3: OSError: [Errno 28] No space left on device: '/a'"),
            5,
            "No space left on device: '/a'; make",
        ),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "/a"), 5, "Disk quota exceeded: '/a'; make room there"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), 5, "left on device; make room where the command writes"),
        (PermissionError(errno.EACCES, "Permission denied", "/a"), 5, "error: /a: Permission denied; give another"),
    ],
)
def test_how_an_error_ends_a_command(
    error: BaseException, status: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(raiser(error)) == status
    assert line in capsys.readouterr().err


@pytest.mark.parametrize("error", [PermissionError(errno.EPERM, "no"), FileNotFoundError(errno.ENOENT, "no", "/a")])
def test_an_error_that_no_path_explains_keeps_its_traceback(error: OSError) -> None:
    with pytest.raises(OSError, match=error.strerror):
        run(raiser(error))


@pytest.mark.parametrize("command", always(["shard-text", "inspect"], "shard-text"))
def test_a_reader_that_goes_ends_nothing_that_is_made(command: str, text_dataset: Path, tmp_path: Path) -> None:
    """As of `trp-scale shard-text ... | head -1`; the end of what is only printed is no error."""
    source = tmp_path / "a.txt"
    source.write_text("The cat sat. It purred. " * 20)
    made = ["--inputs", str(source), "--output", str(tmp_path / "out"), "--tagger", "textblob", "--length", "32"]
    argv = [*made, "--processes", "1"] if command == "shard-text" else [str(text_dataset), "--rows", "500"]
    process = subprocess.Popen(
        [sys.executable, "-m", "trp_scale", command, *argv], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    said = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(timeout=240) == ExitStatus.DONE
    assert "Traceback" not in said
    assert command == "inspect" or (tmp_path / "out" / "dataset.json").is_file()


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"trp-scale {trp_scale.__version__}\n"
    assert re.fullmatch(r"\d+\.\d+\.\d+", trp_scale.__version__)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_its_flags(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    screens = []
    for asked in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as caught:
            cli.main([command, asked])
        assert caught.value.code == 0
        screens.append(capsys.readouterr().out)
        assert f"usage: trp-scale {command}" in screens[-1]
    first, every = ({*re.findall(r"^. (--[a-z_.]+)", screen, re.MULTILINE)} for screen in screens)
    assert first <= every
    assert (f"trp-scale {command} --help-all explains every flag." in screens[0]) == (first < every)


@dataclass(kw_only=True)
class Sharper:
    """A section of another type than its annotation says."""

    alpha: float = 1.0
    """Told on two lines
    (of which the second begins with a bracket)."""


@dataclass(kw_only=True)
class Inherited:
    rows: int = 0
    """Told by the
    class below."""


@dataclass(kw_only=True)
class Told(Inherited):
    """A command."""

    steps: int = 0
    """Told on
    two lines."""
    balancer: Any = field(default_factory=Sharper)


@pytest.mark.parametrize("asked", ["--help", "--help-all"])
def test_what_a_flag_does_is_running_text(
    asked: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However its docstring is wrapped: tyro takes each indented line for a paragraph."""
    monkeypatch.setenv("COLUMNS", "130")
    with pytest.raises(SystemExit):
        read(Told, [asked], prog="told", default=Told())
    said = capsys.readouterr().out
    assert "Told on two lines. (default: 0)" in said and "Told by the class below. (default: 0)" in said
    assert "Told on two lines (of which the second begins with a bracket). (default: 1.0)" in said


@pytest.mark.parametrize("command", sorted({*COMMANDS} - {"doctor"}))
def test_a_command_without_a_word_behind_it_says_what_it_needs(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But `recipes`, which lists them, and `doctor`, which needs nothing."""
    monkeypatch.chdir(tmp_path)
    try:
        status = cli.main([command])
    except SystemExit as left:
        status = int(str(left.code))
    said = capsys.readouterr()
    assert status == (0 if command == "recipes" else 2)
    assert ("pos_bert_tiny" in said.out) if command == "recipes" else said.err
    assert not [*tmp_path.iterdir()]


def test_the_first_screen_names_the_sections_and_leaves_their_flags_to_help_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["finetune", "--help"])
    first = capsys.readouterr().out
    assert re.search(r"^  optimizer +\S", first, flags=re.MULTILINE) and "--optimizer.lr" not in first
    assert re.search(r"^  downstream +\S", first, flags=re.MULTILINE) and "--from " in first
    assert re.search(r"^  balancer +minimax: .* Kinds: uniform, .*gradnorm", first, flags=re.MULTILINE)
    assert len(first.splitlines()) <= 80
    with pytest.raises(SystemExit):
        cli.main(["finetune", "--recipe", "glue", "--help-all"])
    every = " ".join(re.sub("[│|]", " ", capsys.readouterr().out).split())
    assert re.search(r"--optimizer.lr FLOAT .*?\(default: 2e-05\)", every)


def test_the_first_screen_lists_what_a_run_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["pretrain", "--recipe", "mm_mae_tiny", "--help"])
    first = capsys.readouterr().out
    assert "--upstream mm_mae; known: mae, mm_mae, pos_bert" in first
    assert re.search(r"^--hooks \(none\); known, .*\n  gradient_noise_scale +Estimate the", first, flags=re.MULTILINE)
    assert re.search(r"^  semseg +\S", first, flags=re.MULTILINE)  # no kind chooses it


def test_nothing_heavy_is_imported_for_help() -> None:
    """--help and --help-all of every command, in one fresh interpreter. `time trp-scale COMMAND --help` shows why."""
    code = (
        "import contextlib, io, sys\n"
        "from trp_scale.cli import main as cli\n"
        f"for name in {list(COMMANDS)!r}:\n"
        "    for asked in ('--help', '--help-all'):\n"
        "        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "            cli.main([name, asked])\n"
        f"        print(name, *(heavy for heavy in {HEAVY!r} if heavy in sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [name for name in COMMANDS for _ in range(2)]


def test_report_without_a_run_is_of_the_one_that_got_on_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report"]) == 2
    assert f"{tmp_path}/runs" in capsys.readouterr().err
    for name, written, loss in (("a", 200, 4.5), ("b", 100, 3.5)):
        task = {"loss": loss, "weight": 1.0, "count": 3}
        line = {"step": 1, "loss": loss, "applied": True, "peak_memory_bytes": 1, "tasks": {"verb": task}}
        path = tmp_path / "runs" / name / "metrics.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(line) + "\n", encoding="utf-8")
        os.utime(path, (written, written))
    assert cli.main(["report"]) == 0
    assert "4.5000" in (printed := capsys.readouterr().out) and "3.5000" not in printed
    assert (tmp_path / "runs" / "a" / "report.html").is_file()


def test_a_refusal_is_one_message_without_a_traceback(tmp_path: Path) -> None:
    done = launched("launch/pretrain.py", "--recipe", "pos_bert_tiny", "--model.heads", "7", directory=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: 1 setting(s) cannot be used:\n  --model.heads is 7")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("script", "command"),
    [
        *((f"launch/{name}.py", name) for name in ("pretrain", "finetune", "evaluate", "probe", "doctor")),
        *((f"data_tools/{name}.py", name.replace("_", "-")) for name in ("shard_text", "shard_images", "pseudo_label")),
        ("data_tools/inspect_shards.py", "inspect"),
        ("data_tools/verify.py", "verify"),
    ],
)
def test_a_script_is_its_command(script: str, command: str) -> None:
    assert f'console("{command}")' in (ROOT / script).read_text(encoding="utf-8")


def test_who_stops_reading_sees_no_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "trp_scale", "recipes", "adpe_vit_b"]
    done = subprocess.run(command, env=environ, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_pipe_of_ours_that_breaks_is_not_hidden() -> None:
    with pytest.raises(BrokenPipeError, match="to a worker"):
        cli.run(raiser(BrokenPipeError("to a worker")))


def test_rank_0_speaks_and_the_others_wait_for_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)

    for variables, waits in (({"RANK": "0"}, 0), ({"RANK": "1"}, 1), ({"SLURM_PROCID": "3"}, 1), ({}, 0)):
        for name in ("RANK", "SLURM_PROCID"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        waited.clear()
        assert cli.run(raiser(RefusedError("no such thing"))) == 2
        assert len(waited) == waits
        assert capsys.readouterr().err == "error: no such thing\n"


@pytest.mark.parametrize("command", ["pretrain", "finetune"])
def test_printed_settings_are_a_recipe_of_the_very_run(
    command: str, image_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = {"pretrain": ["mae_vit_b"], "finetune": ["classification_tiny", "--from", "scratch"]}[command]
    recipe += ["--data.path", str(image_dataset)]
    words = ["--recipe", *recipe, "--optimizer.lr", "0.00123", "--run_dir", str(tmp_path / "run")]
    assert cli.main([command, *words, "--print_config"]) == 0
    printed = capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    (tmp_path / "printed.yaml").write_text(printed)
    assert dump(load_recipe(str(tmp_path / "printed.yaml"))) == printed
    assert "\n  lr: 0.00123\n" in printed


@pytest.mark.parametrize("flag", ["--size", "--count", "--seed"])
def test_what_is_for_rendered_scenes_is_refused_with_images(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["shard-images", "--inputs", str(tmp_path), "--output", str(tmp_path / "out"), flag, "32"]
    assert cli.main(argv) == 2
    assert f"{flag} 32 applies to --embedded scenes" in capsys.readouterr().err


@pytest.mark.parametrize("closed", always(["<&-", ">&-", "2>&-", "<&- >&- 2>&-"], "<&- >&- 2>&-"))
def test_a_command_needs_no_open_stream(closed: str, tmp_path: Path) -> None:
    made = tmp_path / "settings"
    command = f"{sys.executable} -m trp_scale recipes pos_bert_tiny {closed}; echo $? > {made}"
    subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=dict(os.environ), timeout=240, check=True, capture_output=True
    )
    assert made.read_text() == "0\n"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_control_characters_of_files_do_not_reach_the_terminal(is_terminal: bool) -> None:
    stream = io.StringIO()
    stream.isatty = lambda: is_terminal  # type: ignore[method-assign]
    escaped = EscapedStream(stream)
    print("a\x1b]0;title\x07b \x1b]52;c;cm0=\x07 \x1b[2J\x9b1m tab\tend", file=escaped)
    assert stream.getvalue() == "a\\x1b]0;title\\x07b \\x1b]52;c;cm0=\\x07 \\x1b[2J\\x9b1m tab\tend\n"


def test_all_that_a_command_prints_is_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "stop.json").write_text(json.dumps({"why": "\x1b]0;title\x07", "status": 1, "step": 3, "again": False}))
    for argv in (["doctor", str(tmp_path)], ["report", "--run", f"{tmp_path}/\x1b]0;title\x07"]):
        cli.main(argv)
        printed = capsys.readouterr()
        assert "title" in printed.out + printed.err and "\x1b" not in printed.out + printed.err


def test_the_home_directory_is_expanded_and_credentials_leave_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(CREDENTIALS, "{}")
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("extends: pos_bert_tiny\ncheckpoint: {mirror: 's3://key:secret@bucket/run'}\n")
    path = "a:1=~/books,b:2=https://alice:p%40ss@host:8443/data"
    assert cli.main(["pretrain", "--recipe=~/mine.yaml", f"--data.path={path}", "--print_config"]) == 0
    printed = capsys.readouterr().out
    assert f"path: a:1={tmp_path}/books,b:2=https://host:8443/data\n" in printed
    assert "mirror: s3://bucket/run" in printed
    assert find_credentials("https://host:8443/data/shards") == "alice:p%40ss" and not find_credentials(
        "https://other/a"
    )
    assert find_credentials("s3://bucket/run") == "key:secret"


@pytest.mark.parametrize("place", ["/etc/passwd", "../passwd", "passwd.txt"])
def test_a_recipe_shows_nothing_of_other_files(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path / "passwd", tmp_path / "below" / "passwd.txt"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("a secret of another file")
    recipe = tmp_path / "below" / "mine.yaml"
    recipe.write_text(f"extends: {place}\n")
    assert cli.main(["recipes", str(recipe)]) == ExitStatus.REFUSED
    assert "secret" not in capsys.readouterr().err


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = os.statvfs(tmp_path)
    small = SimpleNamespace(f_frsize=1024, f_bavail=3)
    monkeypatch.setattr(os, "statvfs", lambda path: small if str(path) == str(tmp_path) else real)
    monkeypatch.setattr(sys, "argv", ["trp-scale", "shard-text", f"--output={tmp_path}/data"])
    status, line = exit_status_and_message(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert status == ExitStatus.STORAGE and f"{tmp_path}: 3 KiB" in line
