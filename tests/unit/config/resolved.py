"""What every recipe of the package resolves to, as resolved.json keeps it: each section once, and each recipe by the
numbers of its sections. `python -m tests.unit.config.resolved` writes the file anew; look at what changed in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trp_scale.config.loader import known_recipes, load_recipe, to_dict

FILE = Path(__file__).with_name("resolved.json")


def kept(name: str) -> dict[str, Any]:
    """The sections of a recipe as they are kept."""
    document = json.loads(FILE.read_text(encoding="utf-8"))
    return {section: document["sections"][section][n] for section, n in document["recipes"][name].items()}


def write() -> None:
    """Keep what the recipes resolve to now."""
    found: dict[str, list[Any]] = {}
    recipes: dict[str, dict[str, int]] = {}
    for name in known_recipes():
        numbers = recipes[name] = {}
        for section, values in to_dict(load_recipe(name)).items():
            different = found.setdefault(section, [])
            if values not in different:
                different.append(values)
            numbers[section] = different.index(values)
    lines = [
        f"  {json.dumps(section)}: [\n    " + ",\n    ".join(map(json.dumps, values)) + "\n  ]"
        for section, values in found.items()
    ]
    named = [f"  {json.dumps(name)}: {json.dumps(numbers)}" for name, numbers in recipes.items()]
    text = '{"sections": {\n' + ",\n".join(lines) + '\n},\n"recipes": {\n' + ",\n".join(named) + "\n}}\n"
    FILE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
