"""The tables of docs/scaling.md: for every recipe of pre-training the best layout on 8, 64, 256 and 1,024 GPUs.

    python benchmarks/plan_tables.py [--recipes pos_bert_base mae_vit_l] [--gpu h100] [--write]

`trp-scale plan --recipe R --gpu h100 --predict 8,64,256,1024` prints the same of one recipe. --write puts them into the
document.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from trp_scale.config import PretrainConfig
from trp_scale.config.loader import known_recipes, load_recipe
from trp_scale.planning.clusters import GPUS
from trp_scale.planning.command import best_on
from trp_scale.planning.counting import Counted
from trp_scale.planning.tables import curve
from trp_scale.pretraining.base import DataFacts

DOCUMENT = Path(__file__).resolve().parent.parent / "docs/scaling.md"
BEGIN, END = "<!-- python benchmarks/plan_tables.py --write -->", "<!-- end of the tables -->"
WORLDS = (8, 64, 256, 1024)


@dataclass(kw_only=True)
class Options:
    """What to plan."""

    recipes: list[str] = field(default_factory=list)
    """Which; all of pre-training but the tiny ones where none is named."""
    gpu: str = "h100"
    """As of trp-scale plan."""
    write: bool = False
    """Put the tables into docs/scaling.md."""


def recipes() -> list[str]:
    """Those of pre-training, but the tiny ones."""
    return [name for name in known_recipes(PretrainConfig) if not name.endswith("_tiny")]


def section(name: str, gpu: str) -> list[str]:
    """A recipe's heading and table."""
    config = load_recipe(name)
    config.data.path = "(none)"
    counted = Counted(config, DataFacts())
    rows = f"{config.batch.global_size:,} rows of {counted.outline.positions:,} positions"
    return [
        f"### {name}",
        f"{counted.parameters / 1e6:,.0f} M parameters, {rows} a step.",
        "",
        *curve(best_on(counted, GPUS[gpu], WORLDS)),
        "",
    ]


def main(options: Options) -> None:
    """Print the tables, or put them into the document."""
    lines = []
    for name in options.recipes or recipes():
        lines += section(name, options.gpu)
        print("\n".join(lines[-len(WORLDS) - 6 :]), flush=True)
    if options.write:
        before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        text = "\n".join([BEGIN, "", *lines]) + END
        DOCUMENT.write_text(before + text + after, encoding="utf-8")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__, use_underscores=True))
