"""Convert the training sentences of the GLUE tasks to JSON lines for shard_text.py, without labels.

python data_tools/glue_text.py data/glue glue.jsonl
"""

import argparse
import json
from pathlib import Path

from trp_scale.errors import DataError, RefusedError
from trp_scale.finetuning.glue.folders import FORMATS, find_folder, read_glue

SENTENCES = 20
"""Sentences per document; a row with a single sentence would be mostly padding."""

BAD_LINES = 10
"""Maximum skipped lines of a file, as in the recipe glue."""


def write_sentences(root: Path, output: Path) -> int:
    """Write the training sentences of all tasks in `root`, in file order; return their number.

    Raises:
        DataError: no task exists, or a file cannot be read.
    """
    sentences: list[str] = []
    for task in FORMATS:
        try:
            find_folder(root, task)
        except DataError:
            continue
        train = read_glue(root, task, split="dev", max_bad_lines=BAD_LINES).train
        sentences += [text for pair in zip(*train.sentences, strict=True) for text in pair]
    if not sentences:
        raise DataError(f"{root}: no GLUE task found; folders such as CoLA and SST-2 expected")
    with output.open("w", encoding="utf-8") as file:
        for first in range(0, len(sentences), SENTENCES):
            file.write(json.dumps({"text": " ".join(sentences[first : first + SENTENCES])}) + "\n")
    return len(sentences)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("glue", type=Path)
    parser.add_argument("output", type=Path)
    given = parser.parse_args()
    try:
        count = write_sentences(given.glue, given.output)
    except RefusedError as error:
        parser.exit(2, f"{error}\n")
    print(f"{count:,} sentences: {given.output}")
