"""Tables of docs/recipes.md and docs/scaling.md, as the planner predicts.

    python benchmarks/document_tables.py recipes|scaling [--gpu h100] [--write]

recipes: every recipe, its model and data, and the cost of a run on 8 GPUs. scaling: for every recipe of pre-training
the days on 8, 64, 256 and 1,024 GPUs, and in a folded table the best layout on each. `trp-scale plan` prints the same
of a single recipe with all assumptions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from trp_scale.config import PretrainConfig
from trp_scale.config.finetuning import FinetuneConfig
from trp_scale.config.loader import data, known_recipes, load_recipe, summary
from trp_scale.console import GIB, Cell, Table
from trp_scale.errors import RefusedError
from trp_scale.planning.clusters import GPUS
from trp_scale.planning.command import best_on, curve
from trp_scale.planning.counting import Counted
from trp_scale.planning.plan import ClusterPlan
from trp_scale.pretraining.base import DataFacts

DOCS = Path(__file__).resolve().parent.parent / "docs"
END = "<!-- end of the tables -->"
RANKS = 8
WORLDS = (8, 64, 256, 1024)
LENGTHS = {
    "pos_bert_large_32k": 128,
    **dict.fromkeys(("pos_modern_base", "pos_modern_base_decay", "pos_modern_large"), 1024),
}
"""Pieces of a sequence where the recipe's data have fewer than its model has positions for."""
HEAD = ("recipe", "what it is", "data", "parameters", "rows x positions", "steps", "layout", "GiB a GPU", "hours")
SCALING = ("recipe", "parameters", "rows x positions", *(f"days on {gpus:,}" for gpus in WORLDS))
LAYOUTS = (
    "The fastest layout of each recipe. Peak: model FLOPs over the GPU's bf16 peak. A click on a name shows its table."
)
FINE_TUNING = ("recipe", "what it is", "data", "rows", "length")
KINDS: dict[str, Callable[[Any], bool]] = {
    "PoS-BERT and BERT: text": lambda config: config.upstream == "pos_bert",
    "MAE, MAE+ and AdPE: images": lambda config: config.upstream == "mae" and not learns_masks(config),
    "MLO-MAE and U-MAE: images with classes": lambda config: config.upstream == "mae" and learns_masks(config),
    "MM-MAE: images, depth and segmentation": lambda config: config.upstream == "mm_mae",
}


Document = Literal["recipes", "scaling"]
Row = list[str | Cell]


@dataclass(kw_only=True)
class Options:
    """Document and machine."""

    document: tyro.conf.Positional[Document]
    """Its tables are printed."""
    gpu: str = "h100"
    """As of trp-scale plan."""
    write: bool = False
    """Put the tables into the document."""


def begin(document: Document) -> str:
    return f"<!-- python benchmarks/document_tables.py {document} --write -->"


def written_tables(document: Document) -> str:
    """Return the tables that the document has."""
    text = (DOCS / f"{document}.md").read_text(encoding="utf-8")
    return text.partition(begin(document))[2].partition(END)[0]


def learns_masks(config: Any) -> bool:
    return bool(config.multilevel.kind != "none" or config.objective.uniformity > 0)


def first_cells(name: str) -> Row:
    return [Cell(text=name, code=True), summary(name), data(name)]


def planned_row(name: str, gpu: str) -> Row:
    """A recipe of pre-training with the fastest layout that fits."""
    config = load_recipe(name)
    config.data.path = "(none)"
    counted = Counted(config, DataFacts(length=LENGTHS.get(name, 0)))
    plan = best_on(counted, GPUS[gpu], (RANKS,))[RANKS]
    size = f"{config.batch.global_size:,} x {counted.outline.positions:,}"
    row = [*first_cells(name), f"{counted.parameters / 1e6:,.0f} M", size, f"{config.training.steps:,}"]
    if isinstance(plan, RefusedError):
        return [*row, str(plan).partition(":")[0], "", ""]
    hours = plan.gpu_hours / RANKS
    return [*row, plan.layout.name, f"{plan.memory.device / GIB:.1f}", f"{hours:,.{0 if hours >= 10 else 1}f}"]


def fine_tuning_row(name: str) -> Row:
    """A recipe of fine-tuning; its encoder is given by --from, so that it is not planned."""
    config = load_recipe(name)
    assert isinstance(config, FinetuneConfig), "not of pre-training"
    length = f"{epochs:g} epochs" if (epochs := config.downstream.epochs) else f"{config.training.steps:,} steps"
    return [*first_cells(name), f"{config.batch.global_size:,}", length]


def table(head: Sequence[str], rows: Sequence[Row]) -> str:
    """Return a Markdown table."""
    return Table(head=head, rows=rows, words=len(head)).to_markdown()


def recipe_tables(gpu: str) -> Iterator[str]:
    """Yield the lines of docs/recipes.md."""
    pre_training = known_recipes(PretrainConfig)
    for heading, belongs in KINDS.items():
        rows = [planned_row(name, gpu) for name in planned_recipes() if belongs(load_recipe(name))]
        yield from (f"### {heading}", "", table(HEAD, rows), "")
    tuned = [name for name in known_recipes() if name not in pre_training]
    yield from ("### Fine-tuning", "", table(FINE_TUNING, [fine_tuning_row(name) for name in tuned]), "")
    tiny = [first_cells(name) for name in pre_training if name.endswith("_tiny")]
    yield from ("### For trying things out", "", table(("recipe", "what it is", "data"), tiny), "")


def planned_recipes() -> list[str]:
    return [name for name in known_recipes(PretrainConfig) if not name.endswith("_tiny")]


def days(plan: ClusterPlan | RefusedError, first: ClusterPlan | RefusedError) -> str:
    """Return the days of a plan and its efficiency, the rows per second and GPU relative to the first plan."""
    if isinstance(plan, RefusedError):
        return "-"
    if plan is first or isinstance(first, RefusedError):
        return f"{plan.days:,.2f}"
    rate, base = (item.rows_a_second / item.cluster.gpus for item in (plan, first))
    return f"{plan.days:,.2f} ({rate / base:.0%})"


def scaling_section(name: str, gpu: str) -> tuple[Row, str]:
    """Return a recipe's row in the first table of docs/scaling.md, and its folded table."""
    config = load_recipe(name)
    config.data.path = "(none)"
    counted = Counted(config, DataFacts())
    plans = best_on(counted, GPUS[gpu], WORLDS)
    size = [f"{counted.parameters / 1e6:,.0f} M", f"{config.batch.global_size:,} x {counted.outline.positions:,}"]
    row: Row = [Cell(text=name, code=True), *size, *(days(plan, plans[WORLDS[0]]) for plan in plans.values())]
    folded = f'<details id="{name}" markdown>\n<summary>{name}</summary>\n\n{curve(plans).to_markdown()}\n\n</details>'
    return row, folded


def scaling_tables(gpu: str) -> Iterator[str]:
    """Yield the lines of docs/scaling.md."""
    sections = [scaling_section(name, gpu) for name in planned_recipes()]
    yield from (table(SCALING, [row for row, _ in sections]), "", "### Layouts", "", LAYOUTS, "")
    for _, folded in sections:
        yield from (folded, "")


def main(options: Options) -> None:
    """Print the tables, or put them into the document."""
    tables = "\n".join((recipe_tables if options.document == "recipes" else scaling_tables)(options.gpu))
    print(tables)
    if options.write:
        path, first = DOCS / f"{options.document}.md", begin(options.document)
        before, _, rest = path.read_text(encoding="utf-8").partition(first)
        path.write_text(before + "\n".join([first, "", tables]) + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__, use_underscores=True))
