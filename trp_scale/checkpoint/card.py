"""Model card of an export: README.md with the front matter of the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

import trp_scale
from trp_scale.checkpoint.document import CheckpointDocument
from trp_scale.checkpoint.run_directory import SUMMARY_FILE, find_recipe, read_start
from trp_scale.config import Weights
from trp_scale.config.files import read_optional_object, write_yaml
from trp_scale.config.loader import flat
from trp_scale.config.schema import Fields
from trp_scale.console import Cell, Table, number_cell
from trp_scale.data.mixture import parse_members
from trp_scale.errors import CheckpointError

CARD_FILE = "README.md"


def model_card(checkpoint: Path, document: CheckpointDocument, call: str, weights: Weights) -> str:
    """Return the text of the card, with losses if the run ended at the checkpoint. `call`: expression that loads the
    model; `weights`: the exported ones."""
    run_dir, settings = checkpoint.resolve().parents[1], flat(document.config)
    library, upstream = call.partition(".")[0], str(settings.get("upstream"))
    members = parse_members(settings.get("data.path") or "unknown")
    front = {
        "library_name": {"torch": "pytorch"}.get(library, library),
        "tags": ["trp_scale", upstream],
        "datasets": [name or Path(location).name for name, _, location in members],
    }
    facts = {
        "recipe": find_recipe(read_start(run_dir)) or "unknown",
        "pre-training": f"{upstream}, balancer {settings.get('balancer.kind')}",
        "steps": f"{document.step:,} of {settings.get('training.steps', 0):,}",
        "rows of a step": str(settings.get("batch.global_size")),
        "weights": weights,
        "digest of the data": str(document.extra.get("data_digest", "unknown")),
        "trp_scale": trp_scale.__version__,
    }
    rows: list[list[str | Cell]] = [[name, Cell(text=text, code=True)] for name, text in facts.items()]
    return f"""---
{write_yaml(front)}---

# {run_dir.name}

Pre-trained with trp_scale. The weights are yours: choose a license, and add it to the lines above as `license: NAME`.

## Use

```python
import {library}

model = {call}
```

## Training

{Table(head=["setting", "value"], rows=rows, words=2).to_markdown()}

## Losses

{_list_losses(run_dir, document.step)}
"""


def _list_losses(run_dir: Path, step: int) -> str:
    summary = Fields(read_optional_object(run_dir / SUMMARY_FILE), f"{run_dir}: {SUMMARY_FILE}", CheckpointError)
    tasks, worst = summary.take("tasks", dict[str, dict[str, float | None]], {}), summary.text("worst_task", "")
    if not tasks or summary.whole("steps", default=0) != step:
        return "Not measured for this checkpoint."
    names = {name: f"{name} (worst)" if name == worst and len(tasks) > 1 else name for name in tasks}
    rows: list[list[str | Cell]] = [[names[name], number_cell(task.get("end"))] for name, task in tasks.items()]
    return Table(head=["task", "training loss, mean over the last tenth of the steps"], rows=rows).to_markdown()
