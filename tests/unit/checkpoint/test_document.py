"""Any flipped bit in any file of a checkpoint is found when a run goes on, and an older one is taken."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.grids import always
from tests.unit.checkpoint.fake_engine import renew_digest, save_step
from trp_scale.checkpoint.document import DOCUMENT_NAME, read_document
from trp_scale.checkpoint.run_directory import select
from trp_scale.distributed.groups import ALONE
from trp_scale.errors import CheckpointError


@pytest.mark.parametrize("first", always(range(8), 5))
def test_every_flipped_bit_of_the_document_is_found(tmp_path: Path, first: int) -> None:
    """One bit of each byte; all of them by the exhaustive ones. Bit 5 is what tells e from E in 1e-05."""
    path = save_step(tmp_path, 4, extra={"vocab_size": 30, "rate": 1e-05, "name": "données"}) / DOCUMENT_NAME
    content = path.read_bytes()
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << first
        path.write_bytes(flipped)
        with pytest.raises(CheckpointError):
            read_document(path.parent)


def test_a_flipped_bit_in_any_file_is_passed_over_with_the_steps_that_it_costs(tmp_path: Path) -> None:
    older, newer = save_step(tmp_path, 4), save_step(tmp_path, 7)
    whole = {file.name: file.read_bytes() for file in newer.iterdir()}
    assert len(whole) == 3
    for name, content in whole.items():
        for place in (*range(0, len(content), 41), len(content) - 1):
            flipped = bytearray(content)
            flipped[place] ^= 1 << place % 8
            (newer / name).write_bytes(flipped)
            selection = select(tmp_path, "auto", ALONE)
            assert selection.path == older, f"{name}, byte {place}"
            assert selection.notices[0].startswith(f"{newer} is damaged and skipped: ")
            assert selection.notices[0].endswith("; 3 steps are lost and repeated")
        (newer / name).write_bytes(content)
    assert select(tmp_path, "auto", ALONE).path == newer


def change(document: Path, **fields: Any) -> None:
    """Change fields in a document, with the digest of the new content."""
    document.write_text(json.dumps(json.loads(document.read_text()) | fields))
    renew_digest(document)


def test_a_document_without_a_digest_is_refused(tmp_path: Path) -> None:
    document = save_step(tmp_path, 4) / DOCUMENT_NAME
    content = json.loads(document.read_text())
    del content["digest"]
    document.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="digest"):
        read_document(document.parent)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"step": 44}, "step 44 found in a directory of step 40"),
        ({"config": {"batch": "all"}}, "config: batch: str found, fields by name expected"),
        ({"config": {"batch": {"global_size": "8"}}}, "config: batch: global_size is '8'"),
        (
            {"files": [{"name": "hooks.safetensors", "size": 5, "crc32": []}]},
            "0 checksums of hooks.safetensors found, 1 expected of 5 bytes",
        ),
        ({"files": [{"name": "../a", "size": 0, "crc32": []}]}, "'../a'"),
    ],
)
def test_what_must_agree_is_compared(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    path = save_step(tmp_path, 40, config={"batch": {"global_size": 8}})
    change(path / DOCUMENT_NAME)
    read_document(path)
    save_step(tmp_path, 40, config={"batch": {"global_size": 8}})
    change(path / DOCUMENT_NAME, **fields)
    with pytest.raises(CheckpointError, match=said):
        read_document(path)


def test_a_checkpoint_under_another_name_is_read(tmp_path: Path) -> None:
    path = save_step(tmp_path, 4)
    shutil.copytree(path, tmp_path / "mine")
    assert read_document(tmp_path / "mine") == read_document(path)
