"""The README's Python, with less text and fewer steps."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from tests.documents.pages import README
from trp_scale.sharding.text.corpus import embedded_documents

SMALLER = {
    "vocab_size=8192": 'vocab_size=1000, tagger="textblob", processes=1',
    "rows_per_block=64": "rows_per_block=4",
    'plan("pos_modern_base"': 'plan("pos_modern_base", model={"layers": 3}',
    'data={"path": data})': 'data={"path": data, "workers": 0, "validation_fraction": 0.1}, '
    'training={"steps": 3}, optimizer={"warmup_steps": 1, "decay_steps": 1})',
}


def test_the_python_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for long, short in SMALLER.items():
        assert text.count(long) == 1, long
        text = text.replace(long, short)
    monkeypatch.chdir(tmp_path)
    Path("my_texts").mkdir()
    for number, (_, document) in zip(range(24), embedded_documents(), strict=False):
        (Path("my_texts") / f"{number}.txt").write_text(document[:2000], encoding="utf-8")
    printed, names = io.StringIO(), dict[str, object]()
    with contextlib.redirect_stdout(printed):
        exec(compile(text, str(README), "exec"), names)
    assert isinstance(worst := names["worst"], list) and len(worst) == 3
    assert "Pre-training report" in printed.getvalue() and "best: " in printed.getvalue()
    assert (tmp_path / "exported" / "model.safetensors").is_file()
