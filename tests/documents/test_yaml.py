"""Every YAML block of docs/ is a recipe or a study that loads."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents.pages import Block, blocks, pages, read
from tests.extending import FILE
from trp_scale.config import PretrainConfig
from trp_scale.config.loader import load_recipe
from trp_scale.studies.study import load_study

BLOCKS = [block for page in pages() for block in blocks(page) if block.language == "yaml"]


def module_of(block: Block) -> tuple[str, str] | None:
    """Name and text of the page's last Python file above the block, if it registers what the block names."""
    above = "\n".join(read(block.page).splitlines()[: block.line])
    kinds = re.findall(r"kind: (\w+)", block.text)
    files = [found.groups() for found in FILE.finditer(above)]
    return files[-1] if files and any(f'"{kind}"' in files[-1][1] for kind in kinds) else None


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_loads(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "shown.yaml"
    path.write_text(block.text, encoding="utf-8")
    if "variants:" in block.text:
        study = load_study(str(path))
        assert study.baseline in study.variants
    elif module := module_of(block):  # in a process of its own: what it registers would stay
        (tmp_path / module[0]).write_text(module[1], encoding="utf-8")
        command = [sys.executable, "-m", "trp_scale", "recipes", str(path), "--module", str(tmp_path / module[0])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert re.search(rf"kind: {module[0].removesuffix('.py')}\b", done.stdout)
    else:
        assert isinstance(load_recipe(path), PretrainConfig)
