"""A tokenizer directory that brings Python code: nothing of it runs, whatever is typed."""

from __future__ import annotations

import ast
import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runs import ROOT
from trp_scale.config import RefusedError
from trp_scale.data.text.tokenizer import copy_tokenizer_directory
from trp_scale.finetuning.glue.batch import load_tokenizer

CODE = """
from pathlib import Path

from transformers import BertConfig, PreTrainedTokenizerFast

Path({ran!r}).touch()


class OwnTokenizer(PreTrainedTokenizerFast):
    pass


class OwnConfig(BertConfig):
    model_type = "own"
"""

BROUGHT_BY = {
    "tokenizer_config.json": {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", "own.OwnTokenizer"]},
    },
    "config.json": {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoTokenizer": ["own.OwnTokenizer", "own.OwnTokenizer"]},
    },
}

DOORS: dict[str, Callable[[Path, Path], object]] = {
    "shard_text --tokenizer": copy_tokenizer_directory,
    "downstream.tokenizer": lambda source, _: load_tokenizer(source, length=32),
}


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
@pytest.mark.parametrize("file", BROUGHT_BY)
def test_code_of_a_tokenizer_does_not_run_and_one_that_needs_it_is_refused(
    text_dataset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    door: Callable[[Path, Path], object],
    file: str,
) -> None:
    source = shutil.copytree(text_dataset / "tokenizer", tmp_path / "theirs")
    settings = {}
    if file == "config.json":  # nothing but this file says what the tokenizer is
        (source / "tokenizer_config.json").unlink()
    else:
        settings = json.loads((source / file).read_text())
    (source / file).write_text(json.dumps({**settings, **BROUGHT_BY[file]}))
    (source / "own.py").write_text(CODE.format(ran=str(tmp_path / "ran")))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    refusal = ""
    try:
        door(source, tmp_path / "ours")
    except RefusedError as error:
        refusal = str(error)
    assert not (tmp_path / "ran").exists(), "its code ran"
    assert "[y/N]" not in capsys.readouterr().out, "somebody was asked"
    if file == "tokenizer_config.json":  # else there is a tokenizer.json, which needs no code
        assert re.search(r"theirs: .*code.*--\S*tokenizer", refusal)
        assert not (tmp_path / "ours").exists()


def test_no_class_that_could_run_code_is_asked_for_without_saying_no() -> None:
    """transformers' Auto classes, by any name; a class that is named itself (BertModel) runs its own code only."""
    calls = 0
    for path in [*ROOT.glob("trp_scale/**/*.py"), *ROOT.glob("benchmarks/**/*.py")]:
        text = path.read_text(encoding="utf-8")
        for call in ast.walk(ast.parse(text if "from_pretrained" in text else "")):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            if call.func.attr == "from_pretrained" and "auto" in ast.unparse(call.func.value).lower():
                calls += 1
                said = {word.arg: ast.unparse(word.value) for word in call.keywords}
                assert said.get("trust_remote_code") == "False", f"{path}:{call.lineno}"
    assert calls >= 4
