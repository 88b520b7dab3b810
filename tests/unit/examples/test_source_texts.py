"""The sources of examples/source_texts.py, from small files in the layouts that it reads."""

from __future__ import annotations

import gzip
import json
import runpy
import zipfile
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "examples" / "source_texts.py"


def write_corpora(data: Path) -> None:
    corpora = data / "nltk_data" / "corpora"
    for directory in (corpora, data / "text/books", data / "text/wikitext-2", data / "glue/SST-2"):
        directory.mkdir(parents=True)
    (data / "text/books/train.jsonl").write_text(json.dumps({"text": "A book."}) + "\n", encoding="utf-8")
    (data / "text/wikitext-2/valid.txt").write_text(" = Title = \n\n words \n", encoding="utf-8")
    (data / "glue/SST-2/train.tsv").write_text("sentence\tlabel\n" + "fine film " * 7 + "\t1\nshort\t0\n", "utf-8")
    for name, files in {
        "brown": {"brown/ca01": "The/at jury/nn said/vbd ,/, well/rb", "brown/ck01": "He/pps ran/vbd"},
        "masc_tagged": {"masc_tagged/spoken/a.txt": "yes_UH right_RB"},
        "treebank": {"treebank/tagged/wsj_1.pos": "[ Shares/NNS ] ===== fell/VBD"},
    }.items():
        with zipfile.ZipFile(corpora / f"{name}.zip", "w") as corpus:
            for path, text in files.items():
                corpus.writestr(path, text)


def test_each_source_gives_its_words_without_tags(tmp_path: Path) -> None:
    """Manual pages are those of the machine, so they are left out here."""
    write_corpora(tmp_path / "data")
    dictionary = tmp_path / "gcide.dict.dz"
    dictionary.write_bytes(gzip.compress(b"Abacus, a table."))
    sources = runpy.run_path(str(SCRIPT))["sources"](tmp_path / "data", dictionary)
    assert sources.pop("manual") and next(sources.pop("python"))
    assert {name: [text.strip() for text in texts if text.strip()] for name, texts in sources.items()} == {
        "books": ["A book."],
        "wikitext": ["= Title = \n\n words"],
        "brown": ["The jury said, well"],
        "fiction": ["He ran"],
        "spoken": ["yes right"],
        "wall_street": ["Shares fell"],
        "reviews": [("fine film " * 7).strip()],
        "dictionary": ["Abacus, a table."],
    }
