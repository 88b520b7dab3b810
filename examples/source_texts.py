"""Collect the texts of the study `worst_source`: JSON lines with "text" and "source", of nine sources.

    python examples/source_texts.py DATA OUTPUT.jsonl [--dictionary gcide.dict.dz]

DATA has text/books/train.jsonl ("text" a line), text/wikitext-2/valid.txt, glue/SST-2/train.tsv and
nltk_data/corpora/{brown,masc_tagged,treebank}.zip. Manual pages are those of this machine (Debian: manpages-dev; man),
the dictionary is that of dict-gcide. CPython's documentation is the embedded text of `shard-text`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

from trp_scale.sharding.text.corpus import embedded_documents

MOST_CHARACTERS = 4_000_000
"""Largest source."""
PAGE = 4000
"""Characters of a document that is cut out of a longer text."""


def join_words(words: list[str]) -> str:
    text = re.sub(r" ([,.;:?!)%]|'s|n't)", r"\1", " ".join(words)).replace("( ", "(")
    return text.replace("`` ", '"').replace(" ''", '"')


def tagged(path: Path, names: str, separator: str) -> Iterator[str]:
    """Yield the words of the files of a tagged corpus, without tags."""
    with zipfile.ZipFile(path) as corpus:
        for name in sorted(corpus.namelist()):
            if re.search(names, name):
                words = re.findall(rf"(\S+){separator}\S+", corpus.read(name).decode("utf-8", "replace"))
                yield join_words([word for word in words if not re.fullmatch(r"[=\[\]]+", word)])


def cut(text: str) -> Iterator[str]:
    """Yield a long text in documents that end at an empty line."""
    document = ""
    for paragraph in re.split(r"\n\s*\n", text):
        document += paragraph + "\n\n"
        if len(document) > PAGE:
            yield document
            document = ""
    yield document


def manual_pages() -> Iterator[str]:
    pages = sorted(Path("/usr/share/man").glob("man[23]/*.gz"))
    for page in pages:
        shown = subprocess.run(
            ["man", "--encoding=utf-8", "-P", "cat", str(page)],
            capture_output=True,
            text=True,
            check=False,
            env={"MANWIDTH": "1000"},
        )
        yield re.sub(".\b", "", re.sub(r"\x1b\[[0-9;]*m", "", shown.stdout))


def sources(data: Path, dictionary: Path | None) -> dict[str, Iterator[str]]:
    corpora = data / "nltk_data" / "corpora"
    books = (json.loads(line)["text"] for line in (data / "text/books/train.jsonl").open(encoding="utf-8"))
    reviews = [line.split("\t")[0] for line in (data / "glue/SST-2/train.tsv").open(encoding="utf-8")][1:]
    long_reviews = [review for review in reviews if len(review) > 60]
    texts = {
        "books": books,
        "wikitext": cut((data / "text/wikitext-2/valid.txt").read_text(encoding="utf-8").replace("\n = ", "\n\n = ")),
        "brown": tagged(corpora / "brown.zip", r"brown/c[a-j]\d\d$", "/"),
        "fiction": tagged(corpora / "brown.zip", r"brown/c[k-r]\d\d$", "/"),
        "spoken": tagged(corpora / "masc_tagged.zip", r"spoken/.*\.txt$", "_"),
        "wall_street": tagged(corpora / "treebank.zip", r"tagged/.*\.pos$", "/"),
        "reviews": ("\n".join(long_reviews[first : first + 30]) for first in range(0, len(long_reviews), 30)),
        "python": (text for _, text in embedded_documents()),
        "manual": manual_pages(),
    }
    if dictionary is not None:
        texts["dictionary"] = cut(gzip.decompress(dictionary.read_bytes()).decode("utf-8", "replace"))
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--dictionary", type=Path)
    arguments = parser.parse_args()
    with arguments.output.open("w", encoding="utf-8") as output:
        for name, texts in sources(arguments.data, arguments.dictionary).items():
            size = documents = 0
            for text in texts:
                if text.strip() and size < MOST_CHARACTERS:
                    output.write(json.dumps({"text": text, "source": name}) + "\n")
                    size, documents = size + len(text), documents + 1
            print(f"{name}: {documents} documents, {size:,} characters")


if __name__ == "__main__":
    main()
