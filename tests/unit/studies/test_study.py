"""The studies of the package: each file is whole, and every command that it makes is one that is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.grids import always
from trp_scale.cli.main import COMMANDS
from trp_scale.cli.study import show
from trp_scale.config import Config, TextModelConfig
from trp_scale.config.finetuning import FinetuneConfig, ImageTaskConfig
from trp_scale.config.flags import read
from trp_scale.config.images import ImagePretrainConfig
from trp_scale.config.loader import check, load_recipe
from trp_scale.config.recipes import RECIPES
from trp_scale.config.run_flags import parse, parse_run
from trp_scale.evaluation.arguments import parse_evaluate, parse_probe
from trp_scale.finetuning.arguments import FinetuneArguments
from trp_scale.sharding.images.settings import ShardImagesConfig
from trp_scale.sharding.text.shard import ShardTextConfig
from trp_scale.studies.graph import TIME, Graph
from trp_scale.studies.plan import planned_hours, run_cost
from trp_scale.studies.study import Scale, Study, known_studies, load_study, needed_inputs

NAMES = known_studies()

ALWAYS = ("adpe_table_2", "mlo_mae_table_15", "trp_table_1")
"""Studies whose commands are always read: of images, of another judge's runs, of text."""

PAPERS = {"TRP": "2306.12070", "AdPE": "2303.07598", "MLO-MAE": "2402.18128"}


def graph_of(study: Study, scale: Scale, directory: Path) -> Graph:
    """With directories that are there in place of the inputs."""
    inputs = {}
    for name in needed_inputs(study, scale):
        (directory / name).mkdir(exist_ok=True)
        inputs[name] = str(directory / name)
    return Graph(study, scale, directory / "study", inputs)


def commands(graph: Graph) -> Iterator[tuple[str, list[str]]]:
    """Those that can be known before anything has run: of the first seed, and of judges on one variant."""
    scale, judged = graph.scale, set[str]()
    for node in graph.nodes:
        kind, *rest = node.split("/")
        if TIME in node or (kind == "runs" and (rest[1] != "seed_0" or scale.tuning is not None)):
            continue
        if kind == "judged":
            if rest[0] in judged:
                continue
            judged.add(rest[0])
        yield node, graph.command_arguments(node)


def as_the_run_has_it(config: FinetuneConfig, run: Config) -> None:
    """What --from sets: the encoder's sizes."""
    for name in ("layers", "hidden_size", "heads", "intermediate_size"):
        setattr(config.model, name, getattr(run.model, name))
    if isinstance(config.model, TextModelConfig) and isinstance(run.model, TextModelConfig):
        config.model.max_positions = run.model.max_positions
    if isinstance(config, ImageTaskConfig) and isinstance(run, ImagePretrainConfig):
        config.vision.patch_size = run.vision.patch_size


def read_command(graph: Graph, words: list[str], runs: dict[str, Config]) -> None:
    """As the command itself reads it, but for what is not there yet: the run, the weights, and the data.

    Raises:
        RefusedError, SystemExit: as the command.
    """
    command, flags = words[0], words[1:]
    if "--model.weights" in flags:
        flags[flags.index("--model.weights") + 1] = ""
    if command == "pretrain":
        runs[flags[flags.index("--run_dir") + 1]] = parse(flags).config
    elif command == "finetune":
        config = parse_run(flags, FinetuneArguments, FinetuneConfig, prog="trp-scale finetune").config
        as_the_run_has_it(config, next(iter(runs.values())))
        check(config)
        config.tasks(parse_task(flags))
    elif command == "probe":
        parse_probe(flags)
    elif command == "evaluate":
        Path(flags[flags.index("--finetuned") + 1]).mkdir(parents=True)
        parse_evaluate(flags)
    elif command == "shard-text":
        read(ShardTextConfig, flags, prog="trp-scale shard-text")
    else:
        read(ShardImagesConfig, flags, prog="trp-scale shard-images").check()


def parse_task(flags: list[str]) -> str:
    return flags[flags.index("--task") + 1] if "--task" in flags else ""


@pytest.mark.parametrize("name", NAMES)
def test_a_study_is_whole(name: str) -> None:
    study = load_study(name)
    assert study.source.arxiv == PAPERS[study.source.paper]
    assert study.question.endswith("?") and study.source.place
    assert "paper" in study.scales or study.source.note, "a question of ours has no published size"
    with_figures = [variant for variant in study.variants.values() if variant.paper]
    assert len(with_figures) >= 2 or study.source.note
    assert not study.axis or any(variant.at is not None for variant in study.variants.values())
    for scale_name, scale in study.scales.items():
        assert scale.note, f"{scale_name} says what differs from the paper"
        assert bool(scale.gpus) == (scale_name != "cpu")
        assert bool(scale.launcher) == (scale.gpus > 1)


@pytest.mark.parametrize("name", always(NAMES, *ALWAYS))
def test_every_command_is_one_that_is_there(name: str, tmp_path: Path) -> None:
    study = load_study(name)
    for scale_name, scale in study.scales.items():
        (tmp_path / scale_name).mkdir()
        graph, runs = graph_of(study, scale, tmp_path / scale_name), dict[str, Config]()
        for _, words in commands(graph):
            read_command(graph, words, runs)


def test_a_rate_that_is_chosen_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    show(["adpe_mae_plus"])
    assert "optimizer.lr of 0.0005, 0.001, 0.002, by fine_tuning" in capsys.readouterr().out


SCALES = [(name, scale) for name in NAMES for scale in load_study(name).scales]


@pytest.mark.parametrize(("name", "scale"), always(SCALES, ("mlo_mae_table_6", "cpu"), ("trp_table_1", "gpu")))
def test_hours_are_planned(name: str, scale: str) -> None:
    """Those that are always planned: from weights, and on a GPU."""
    study = load_study(name)
    lines = list(planned_hours(study, study.scale(scale), price=1.0))
    assert any(line.startswith("pre-training: ") for line in lines)


def test_hours_are_planned_whatever_lies_at_the_recipe_s_own_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = load_study("trp_table_1")
    monkeypatch.chdir(tmp_path)
    own = Path(load_recipe(study.scale("cpu").recipe).data.path)
    own.mkdir(parents=True)
    (own / "dataset.json").write_text("{}")  # of another shape, say
    _, seconds = run_cost(graph_of(study, study.scale("cpu"), tmp_path), study.baseline, speed=1e9)
    assert seconds > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name, scale in SCALES if scale == "gpu"])
def test_a_study_on_one_gpu_pre_trains_in_half_an_hour(name: str) -> None:
    study = load_study(name)
    scale = study.scale("gpu")
    assert (scale.gpu, scale.gpus) == ("h100", 1)
    said = next(line for line in planned_hours(study, scale, price=0.0) if line.startswith("pre-training: "))
    assert float(said.split()[1]) < 0.5


ROOT = Path(__file__).parents[3]
PRINTED = {"TRP's": (range(1, 8), range(1, 4)), "AdPE's": ((1, 2), (1, 2, 3)), "MLO-MAE's": (range(1, 19), range(1, 7))}
"""Numbers of each paper's tables and figures; AdPE's appendix has A.1 to A.3, and A.1 and A.2."""


def exists(name: str) -> bool:
    """Whether what the page of studies names in backticks is a study, a recipe, a command with its flags, or a file."""
    if name in NAMES or (RECIPES / f"{name}.yaml").is_file() or (ROOT / name).is_file():
        return True
    program, _, words = name.partition(" ")
    command, *flags = words.split(" ")
    modules = {command: module for group in COMMANDS.values() for command, (module, _) in group.items()}
    if program != "trp-scale" or command not in modules:
        return False
    known = (ROOT / "trp_scale" / "evaluation" / "arguments.py").read_text(encoding="utf-8")
    return all(f"    {flag.removeprefix('--')}: " in known for flag in flags if flag.startswith("--"))


def test_the_page_lists_every_study_and_every_table_and_figure_and_names_what_exists() -> None:
    page = (ROOT / "docs/studies.md").read_text(encoding="utf-8")
    section = page.split("## The papers' tables and figures\n")[1]
    papers = dict(part.split("\n", 1) for part in section.split("\n### ")[1:])
    listed = {name for paper in papers.values() for name in re.findall("`([^`]+)`", paper)}
    assert set(NAMES) - listed == set()
    settings = {name for name in listed if re.fullmatch(r"[a-z_]+\.[a-z_]+", name)}  # tests/unit/test_documents.py
    assert [name for name in listed - settings if not exists(name)] == []
    assert papers.keys() == PRINTED.keys()
    for paper, (tables, figures) in PRINTED.items():
        first = " ".join(line.split(" | ")[0] for line in papers[paper].splitlines() if line.startswith("| "))
        appendix = {"A.1", "A.2", "A.3"} if paper == "AdPE's" else set()
        for kind, numbers, others in (("Table", tables, appendix), ("Figure", figures, appendix - {"A.3"})):
            rows = re.findall(rf"{kind}s? ((?:A\.)?\d+)(?:, (\d+))?", first)
            assert {number for row in rows for number in row if number} == {*map(str, numbers), *others}, (paper, kind)
