"""Which part may import which, what is imported only when asked for, and that nothing unpickles."""

from __future__ import annotations

import ast
import functools
import graphlib
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "trp_scale"

LAYERS: tuple[tuple[str, ...], ...] = (
    ("console", "errors"),
    ("config",),
    ("distributed",),
    ("storage",),
    ("core",),
    ("data", "models"),
    ("engines",),
    ("checkpoint",),
    ("methods",),
    ("pretraining",),
    ("training",),
    ("reporting",),
    ("finetuning",),
    ("evaluation",),
    ("sharding", "planning", "diagnostics"),
    ("studies",),
    ("api",),
    ("cli",),
    ("__main__",),
)
"""The core, which knows no kind, then the rooms that hold one subject each. A room imports itself and rooms above it in
this list, nothing below and nothing beside it."""

ONLY_WHEN_ASKED = (
    *("wandb", "tensorboard", "datasets", "deepspeed", "megatron", "nltk", "textblob", "webdataset", "plotly"),
    "playwright",
)

parse = functools.cache(ast.parse)

PICKLING_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}


def allowed(importer: str, imported: str) -> bool:
    """Whether the part `importer` may import the part `imported`."""
    if importer == imported:
        return True
    level = {part: number for number, layer in enumerate(LAYERS) for part in layer}
    return level[imported] < level[importer]


def modules(tree: ast.Module, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """(line, full module name) of every import in a file, wherever it stands; relative ones are made absolute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            # `from trp_scale import engines` names a part in its list of names.
            yield from ((node.lineno, f"{base}.{alias.name}" if base == "trp_scale" else base) for alias in node.names)


def wrong_imports(source: str, path: Path) -> list[str]:
    """The imports of one file of the package (`path` relative to the root) that go against the direction."""
    parts = path.with_suffix("").parts
    if len(parts) < 2 or parts[1] == "__init__":
        return []
    found = []
    for line, module in modules(parse(source), parts[:-1]):
        names = module.split(".")
        if names[0] in ("launch", "data_tools", "benchmarks", "tests"):
            found.append(f"{path}:{line}: the package imports {module}")
        elif names[0] == "trp_scale" and len(names) > 1 and not allowed(parts[1], names[1]):
            found.append(f"{path}:{line}: {parts[1]} imports {names[1]}")
    return found


def imported_at_once(source: str, path: Path, known: set[str]) -> set[str]:
    """The modules of `known` that a file (`path` relative to the root) imports when it is imported itself: not within
    functions, nor for types alone."""

    def statements(nodes: Iterable[ast.AST]) -> Iterator[ast.Import | ast.ImportFrom]:
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield node
            elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not (
                isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            ):
                yield from statements(ast.iter_child_nodes(node))

    package, found = path.with_suffix("").parts[:-1], set[str]()
    for node in statements(parse(source).body):
        named = [name for _, name in modules(ast.Module(body=[node], type_ignores=[]), package)]
        # What is imported from a package may be a module in it.
        within = {f"{named[0]}.{alias.name}" for alias in node.names} if isinstance(node, ast.ImportFrom) else set()
        found |= (within & known) or ({*named} & known)
    return found


def circle(files: Iterable[tuple[str, Path]]) -> list[str]:
    """Modules of which each imports the next, the last being the first; empty where there are none."""
    named = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): (text, path) for text, path in files}
    graph = {name: imported_at_once(*file, {*named}) - {name} for name, file in named.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(reversed(error.args[1]))
    return []


def unpickling(source: str, path: Path) -> list[str]:
    """The places of one file that could run what a file on disk says: not torch.load with weights_only."""
    tree = parse(source)
    found = [
        f"{path}:{line}: imports {module}"
        for line, module in modules(tree, ())
        if module.split(".")[0] in PICKLING_MODULES
    ]
    of_tensors = {
        node.func
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in node.keywords)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("torch", "torch.serialization"):
            found += [f"{path}:{node.lineno}: torch.{a.name}" for a in node.names if a.name in ("load", "save")]
        named = ast.unparse(node) if isinstance(node, ast.Attribute) and node.attr in ("save", "load") else ""
        if named == "torch.save" or (named == "torch.load" and node not in of_tensors):
            found.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            found.append(f"{path}:{node.value.lineno}: allow_pickle={ast.unparse(node.value)}")
    return found


def sources(*folders: Path) -> list[tuple[str, Path]]:
    files = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return [(path.read_text(encoding="utf-8"), path.relative_to(ROOT)) for path in files]


def test_imports_go_one_way() -> None:
    found = [wrong for source, path in sources(PACKAGE) for wrong in wrong_imports(source, path)]
    assert not found, "\n".join(found)


def test_no_module_is_imported_by_what_it_imports() -> None:
    """Also within a part, where the layers say nothing."""
    assert not (found := circle(sources(PACKAGE))), " imports ".join(found)


def test_every_part_has_its_layer() -> None:
    parts = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert parts - {"__init__"} <= {part for layer in LAYERS for part in layer}


def test_nothing_unpickles() -> None:
    folders = (PACKAGE, ROOT / "launch", ROOT / "data_tools", ROOT / "benchmarks")
    found = [wrong for source, path in sources(*folders) for wrong in unpickling(source, path)]
    assert not found, "\n".join(found)


FRESH = """
import importlib, sys

for name in ("timm", "torchvision", *{only_when_asked!r}):
    sys.modules[name] = None
for name in (
    "sharding.text.shard training.pretrain pretraining.pos_bert.upstream pretraining.pos_bert.model "
    "finetuning.finetune finetuning.glue.task evaluation.probe.command evaluation.probe.online "
    "evaluation.probe.sentences evaluation.evaluate planning.command"
).split():
    importlib.import_module("trp_scale." + name)
from trp_scale.cli import main

for command, (package, _) in {commands!r}.items():
    print(main.main(command.split()), flush=True)
    print("END", file=sys.stderr, flush=True)
    del sys.modules[package]

sys.modules["deepspeed"] = None
for name in {modules!r}:
    importlib.import_module(name)
"""


def test_libraries_are_imported_only_when_asked_for_and_a_missing_one_is_named(
    text_dataset: Path, image_dataset: Path, tmp_path: Path
) -> None:
    """In one fresh interpreter, first without the libraries of images: what is for text is imported, and commands name
    what they miss. timm comes last, since what imports it imports torchvision first. Then every module but the engines
    of DeepSpeed and megatron-core, without extras (a library that takes one where it finds it, as timm does with wandb,
    goes on without)."""
    names = [
        ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        for _, path in sources(PACKAGE)
        if path.parts[-2:] not in (("engines", "deepspeed.py"), ("engines", "megatron.py"))
    ]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "embedded").symlink_to(text_dataset)
    (tmp_path / "pictures").symlink_to(image_dataset)
    commands = {
        f"pretrain --recipe pos_bert_tiny --ds_config {ROOT}/ds_configs/zero2.json": ("deepspeed", "deepspeed"),
        "shard-images --embedded --count 8 --processes 1 --output scenes": ("torchvision", "vision"),
        "pretrain --recipe adpe_tiny --data.path pictures": ("timm", "vision"),
    }
    done = subprocess.run(
        [sys.executable, "-c", FRESH.format(only_when_asked=ONLY_WHEN_ASKED, commands=commands, modules=names)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert [line for line in done.stdout.splitlines() if line.isdigit()] == ["2"] * 3
    for (package, extra), errors in zip(commands.values(), done.stderr.split("END\n"), strict=False):
        last = errors.splitlines()[-1]
        assert package in last and f"pip install 'trp-scale[{extra}]'" in last
