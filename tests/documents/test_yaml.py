"""Every YAML block of docs/ is a recipe or a study that loads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.documents.pages import Block, blocks, pages, read
from tests.extending import FILE, forgetting
from trp_scale.cli import main as cli
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
def test_a_block_loads(block: Block, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "shown.yaml"
    path.write_text(block.text, encoding="utf-8")
    if "variants:" in block.text:
        study = load_study(str(path))
        assert study.baseline in study.variants
    elif module := module_of(block):
        (tmp_path / module[0]).write_text(module[1], encoding="utf-8")
        with forgetting():
            assert cli.main(["recipes", str(path), "--module", str(tmp_path / module[0])]) == 0
        assert re.search(rf"kind: {module[0].removesuffix('.py')}\b", capsys.readouterr().out)
    else:
        assert isinstance(load_recipe(path), PretrainConfig)
