"""The commands of the README and of the pages that go on from it, run in their order in one directory, with less text,
smaller models and fewer steps.

A command keeps its words; what makes it small is appended, and of two equal flags the last one counts. The first line
under torchrun is started as processes of its own (10 s); the other lines under torchrun and deepspeed run on the two
ranks that tests share (tests/faults/test_hangs.py starts deepspeed), and all others in this process, through the
function that the script or the console command calls.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from PIL import Image

from tests.commands import PRETRAIN, ROOT, Command, script_place
from tests.documents.pages import COMMANDS, read
from tests.ranks import Ranks, free_port
from tests.runs import environment, lines
from tests.small_commands import LONGER, STEPS, made_small, run_here, write_inputs

Results = dict[Command, tuple[int, str]]
"""Exit status and output of each command."""
PATCHED = {"TRP_SCALE_PROGRESS": "plain", "COLUMNS": "400", "WANDB_SILENT": "true"}
"""Plain lines, no path broken across them."""


def why_not_run(command: Command) -> str | None:
    """Why a command is only looked at here; None for those that are run. tests/unit/test_readme.py parses them all."""
    reasons = {
        "sbatch": "under a real SLURM: tests/cluster/test_slurm.py",
        "git": "there is no public repository",
        "source": "activates the environment that the tests already run in",
    }
    if command.words[:2] == ("trp-scale", "watch"):
        return "serves until it is interrupted: tests/unit/reporting/test_watch.py"
    if command.words[:2] == ("trp-scale", "study"):
        return "many runs, each a process: tests/distributed/test_study.py runs a small one"
    if "--hostfile" in command.words:
        return "on two hosts: tests/cluster/test_hosts.py"
    return reasons.get(command.words[0])


RUN = [command for command in COMMANDS if why_not_run(command) is None]
PRETRAIN_HERE = ["trp-scale", "pretrain", "--recipe", "pos_bert_tiny"]
"""In place of `make pretrain`, which would install 6 GB; make is asked what it would do."""


def started_as_a_process(words: list[str]) -> tuple[int, str]:
    """torchrun on two ranks, with a port that is free."""
    launcher, *rest = words
    place = script_place(rest)
    own = rest[:place]
    own[own.index("--nproc_per_node") + 1] = "2"
    command = [launcher, *own, "--master_port", str(free_port()), *rest[place:]]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600, check=False)
    return done.returncode, done.stdout + done.stderr


def run_on_rank(directory: str, variables: dict[str, str], words: list[str]) -> tuple[int, str]:
    """`run_here`, from a directory and with variables, on a rank that tests share."""
    with mock.patch.dict(os.environ, variables), contextlib.chdir(directory):
        return run_here(words)


def is_launched(command: Command) -> bool:
    """Whether the command is started as it stands; one is enough."""
    return command == next(one for one in RUN if one.words[0] == "torchrun")


def run(command: Command, books: Path, two_ranks: Ranks) -> tuple[int, str]:
    typed = PRETRAIN_HERE if command.words == ("make", "pretrain") else command.words
    words = made_small([word.replace("/data/", f"{books.parent}/") for word in typed])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in command.variables:
            patch.setenv(name, value)
        if is_launched(command):
            return started_as_a_process(words)
        if words[0] in ("torchrun", "deepspeed"):
            variables = {name: os.environ[name] for name in (*PATCHED, *(name for name, _ in command.variables))}
            script = ["python", *words[script_place(words) :]]
            answers = two_ranks(run_on_rank, str(Path.cwd()), variables, script)
            return max(status for status, _ in answers), answers[0][1]
        return run_here(words)


@pytest.fixture(scope="module")
def place(text_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkout to stand in: the scripts, the built-in corpus (a small one), and what a reader has."""
    directory = write_inputs(tmp_path_factory.mktemp("readme"))
    (directory / "data").mkdir()
    (directory / "data" / "embedded").symlink_to(text_dataset)
    (directory / "books").symlink_to("my_texts")
    (directory / "imagenet").mkdir()
    for name, split in (("val", "test"), ("train", "train")):
        (directory / "imagenet" / name).symlink_to(directory / "my_images" / split)
    with contextlib.chdir(directory):
        yield directory


@pytest.fixture(scope="module")
def results(place: Path, two_ranks: Ranks) -> Results:
    """(exit status, output) of each command, run in the README's order: later ones use what earlier ones make."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in PATCHED.items():
            patch.setenv(name, value)
        return {command: run(command, place / "books", two_ranks) for command in RUN}


@pytest.mark.parametrize("command", RUN, ids=str)
def test_it_runs(command: Command, results: Results) -> None:
    status, output = results[command]
    assert status == 0, output[-4000:]


def test_most_commands_are_run_and_two_launchers_among_them() -> None:
    words = {command.words[0] for command in COMMANDS if why_not_run(command)}
    assert words <= {"git", "source", "sbatch", "deepspeed", "trp-scale"}
    assert {"torchrun", "deepspeed"} <= {command.words[0] for command in RUN}
    assert len(RUN) >= 18


def the_run(results: Results, part: str) -> Path:
    """Run directory that the one command with `part` in it printed at its end."""
    (output,) = [output for command, (_, output) in results.items() if part in str(command)]
    return Path(output.rpartition("run directory: ")[2].split()[0])


def test_launchers_give_two_ranks_and_the_engine_that_was_asked_for(results: Results, place: Path) -> None:
    runs = (
        "torchrun --nproc_per_node 8 launch/pretrain.py --recipe pos_bert_base",
        "zero2.json --recipe pos_bert_base --data.path data/books",
    )
    first, found = (json.loads((the_run(results, part) / "environment.json").read_text()) for part in runs)
    assert (first["engine"], first["world_size"], first["launcher"]) == ("ddp", 2, "torchrun")
    assert (found["engine"], found["zero_stage"], found["world_size"]) == ("deepspeed", 2, 2)


def test_the_same_run_directory_goes_on(results: Results, place: Path) -> None:
    assert [line["step"] for line in lines(place / "runs" / "tiny")] == list(range(1, STEPS + LONGER + 1))
    status, reported = run_here(["trp-scale", "report", "--run", str(place / "runs" / "tiny")])
    assert status == 0 and f"steps {STEPS + LONGER} (finished)" in reported


def test_balancers_and_loggers_are_those_of_the_command(results: Results, place: Path) -> None:
    assert lines(the_run(results, "kind uniform"))[-1]["balancer"]["kind"] == "uniform"
    balancer = lines(the_run(results, "alpha 4"))[-1]["balancer"]
    assert (balancer["alpha"], balancer["estimate"]) == (4.0, "lagged")
    logged = the_run(results, "--logging.wandb")
    assert list(logged.glob("wandb/offline-run-*")) and list(logged.glob("tensorboard/events*"))


def test_the_sharded_books_are_shown_and_whole(results: Results, place: Path) -> None:
    books = str(place / "data" / "books")
    assert "are intact" in run_here(["trp-scale", "verify", books])[1]
    assert "text-000000-00000 row 0" in run_here(["trp-scale", "inspect", books])[1]
    assert json.loads((place / "data" / "books" / "dataset.json").read_text(encoding="utf-8"))["length"] == 64


def test_transformers_loads_what_is_exported(results: Results, place: Path) -> None:
    import torch
    from transformers import AutoTokenizer, BertForPreTraining

    run_dir, exported = str(place / "runs" / "tiny"), str(place / "exported")
    assert run_here(["trp-scale", "export", "--run", run_dir, "--to", "hf", "--output", exported])[0] == 0
    model = BertForPreTraining.from_pretrained(place / "exported")
    words = AutoTokenizer.from_pretrained(place / "exported")("the language reference", return_tensors="pt")
    with torch.no_grad():
        logits = model(**words).prediction_logits
    assert logits.shape[-1] == model.config.vocab_size <= 1000
    assert bool(logits.isfinite().all())


def test_timm_loads_what_was_exported(results: Results, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the call that the page shows, which without `pretrained=True` would give random weights."""
    import timm
    import torch
    from safetensors.torch import load_file

    call = re.search(r"`(timm\.create_model\([^`]*)`", read("commands.md"))
    assert call is not None
    monkeypatch.chdir(place)
    model = eval(call[1], {"timm": timm}).eval()
    stored = load_file("exported_timm/model.safetensors")
    assert all(torch.equal(tensor, stored[name]) for name, tensor in model.state_dict().items())
    with torch.no_grad():
        features = model(torch.zeros(1, 3, 56, 56))
    assert features.shape == (1, 32)
    assert bool(features.isfinite().all())


def test_the_adversary_is_in_the_log_and_in_the_pictures(results: Results, place: Path) -> None:
    assert lines(place / "runs" / "adpe")[-1]["adversary"]["kind"] == "relative_coordinate"
    assert "adversary" not in lines(the_run(results, "--adversary.kind none"))[-1]
    for name in ("reconstructions.png", "positions.png"):
        with Image.open(place / "pictures" / "adpe" / name) as picture:
            assert picture.format == "PNG"
            assert len(picture.convert("RGB").getcolors(1 << 24)) > 10


def test_masks_are_learned_and_drawn_and_a_test_set_is_marked(results: Results, place: Path) -> None:
    for name in ("masks", "continued", "all"):
        assert lines(place / "runs" / name)[-1]["multilevel"]["lessons"] == 1, name
    with Image.open(place / "pictures" / "masks" / "masks.png") as picture:
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 10
    marked = json.loads((place / "data" / "imagenet_test" / "dataset.json").read_text(encoding="utf-8"))
    assert marked["settings"]["split"] == "test"


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.words[0] == "make"], ids=str)
def test_make_would_do_it(command: Command) -> None:
    done = subprocess.run(["make", "-n", *command.words[1:]], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"{PRETRAIN} --ds_config ds_configs/zero2.json" in done.stdout
