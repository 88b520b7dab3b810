"""GLUE tasks made of real English with made-up labels, and the command lines of small runs on them."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.runs import to_flags
from trp_scale.sharding.text.corpus import embedded_documents

SMALL = {
    "model.layers": 2,
    "model.hidden_size": 32,
    "model.heads": 2,
    "model.intermediate_size": 64,
    "model.max_positions": 64,
    "batch.global_size": 8,
    "batch.micro_size": 4,
    "downstream.max_length": 64,
    "logging.every": 1,
}


def sentences(count: int) -> list[str]:
    """Different sentences of four to thirty words."""
    found: dict[str, None] = {}
    for _, text in embedded_documents():
        for sentence in re.split(r"(?<=[.!?])\s+", " ".join(text.split())):
            if 4 <= len(sentence.split()) <= 30:
                found.setdefault(sentence)
        if len(found) >= count:
            return list(found)[:count]
    raise LookupError(f"{len(found)} sentences found, {count} wanted")


def write_cola(root: Path, train: int, dev: int) -> Path:
    """CoLA's format; label 1 on two of three sentences, whatever they say. With `dev` = 0
    the training sentences are measured."""
    texts = sentences(train + dev)
    lines = [f"x\t{int(number % 3 > 0)}\t\t{text}\n" for number, text in enumerate(texts)]
    (root / "CoLA").mkdir(parents=True)
    (root / "CoLA" / "train.tsv").write_text("".join(lines[:train]), encoding="utf-8")
    (root / "CoLA" / "dev.tsv").write_text("".join(lines[train:] if dev else lines), encoding="utf-8")
    return root


def write_stsb(root: Path, train: int, dev: int) -> Path:
    """STS-B's columns that are read; a sentence beside the next one, scores from 0 to 5."""
    texts = sentences(train + dev + 1)
    lines = [f"{a}\t{b}\t{number % 11 / 2}\n" for number, (a, b) in enumerate(pairwise(texts))]
    (root / "STS-B").mkdir(parents=True)
    for name, part in (("train", lines[:train]), ("dev", lines[train : train + dev])):
        (root / "STS-B" / f"{name}.tsv").write_text("sentence1\tsentence2\tscore\n" + "".join(part), encoding="utf-8")
    return root


def glue_flags(root: Path, run_dir: Path, tasks: str, source: str, **changes: Any) -> list[str]:
    """Command line of a small run; `changes` are flags with "__" for the dot."""
    values = {**SMALL, "data.path": root, "run_dir": run_dir, "task": tasks, "from": source}
    return ["--recipe", "glue_tiny", *to_flags(values, **changes)]


def finetune_here(arguments: list[str]) -> int:
    """Run in this process; on shared ranks the process group is already there."""
    from trp_scale.cli.main import show
    from trp_scale.finetuning.arguments import parse_finetune
    from trp_scale.finetuning.finetune import finetune

    return show(finetune(parse_finetune(arguments)))


MNLI_COLUMNS = (
    "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\tsentence2_parse"
    "\tsentence1\tsentence2"
)


def _mnli(count: int, labels: str, extra: str) -> str:
    lines = [f"{MNLI_COLUMNS}\t{labels}"]
    names = ("neutral", "entailment", "contradiction")
    for row in range(count):
        lines.append(
            f"{row}\t1p\t1pe\tfiction\t( a )\t( b )\t(ROOT)\t(ROOT)\tpremise {row}\thypothesis {row}\t" + extra
        )
        lines[-1] = lines[-1].replace("GOLD", names[row % 3])
    return "\n".join(lines) + "\n"


FILES: dict[str, str] = {
    # No header, and quotation marks that nothing closes.
    "CoLA/train.tsv": "gj04\t1\t\tOur friends won't buy this.\ngj04\t0\t*\tHe said \"go.\nclc95\t1\t\tThe cat sat.\n",
    "CoLA/dev.tsv": "gj04\t0\t*\tThe the.\ngj04\t1\t\tIt ran.\n",
    "CoLA/test.tsv": "index\tsentence\n0\tBill whistled past.\n1\tIt.\n",
    "SST-2/train.tsv": "sentence\tlabel\nhide new secretions \t0\n` deadly ' \t1\na smile \t1\ndull \t0\n",
    "SST-2/dev.tsv": "sentence\tlabel\na charming journey . \t1\nbleak \t0\n",
    "SST-2/test.tsv": "index\tsentence\n0\tuneasy mishmash\n",
    # A byte-order mark and CR LF.
    "MRPC/train.tsv": "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n"
    '1\t702876\t702977\tAmrozi accused " the witness " .\tReferring to him .\r\n'
    "0\t2108705\t2108831\tYucaipa owned Dominick 's .\t\" Yucaipa bought .\r\n",
    "MRPC/dev.tsv": "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n1\t1\t2\tHe said .\tHis wife said .\r\n",
    "STS-B/train.tsv": "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
    "0\tmain-captions\tMSRvid\t2012test\t0001\tnone\tnone\tA plane is taking off.\tAn air plane takes off.\t5.000\n"
    "1\tmain-captions\tMSRvid\t2012test\t0004\tnone\tnone\tA man plays.\tA man is playing a flute.\t3.800\n",
    "STS-B/dev.tsv": "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
    "0\tmain-captions\tMSRvid\t2012test\t0000\tnone\tnone\tA man dances.\tA man is dancing.\t0.000\n",
    "QQP/train.tsv": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n133273\t213221\t213222\tHow is it?\tHow?\t0\n"
    "402555\t536040\t536041\tHow do I control it?\tHow do you control it?\t1\n",
    "QQP/dev.tsv": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n201359\t303345\t303346\tWhy are we?\tWhy?\t0\n",
    "MNLI/train.tsv": _mnli(4, "label1\tgold_label", "neutral\tGOLD"),
    "MNLI/dev_matched.tsv": _mnli(3, "label1\tlabel2\tlabel3\tlabel4\tlabel5\tgold_label", "a\tb\tc\td\te\tGOLD"),
    "MNLI/dev_mismatched.tsv": _mnli(2, "label1\tlabel2\tlabel3\tlabel4\tlabel5\tgold_label", "a\tb\tc\td\te\tGOLD"),
    "QNLI/train.tsv": "index\tquestion\tsentence\tlabel\n0\tWhen?\tIn 1990.\tentailment\n"
    "1\tWho?\tNone\tnot_entailment\n",
    "QNLI/dev.tsv": "index\tquestion\tsentence\tlabel\n0\tWhat came?\tAs of that day.\tnot_entailment\n",
    "RTE/train.tsv": "index\tsentence1\tsentence2\tlabel\n0\tNo weapons.\tWeapons found.\tnot_entailment\n"
    "1\tA place of sorrow.\tPope dies.\tentailment\n",
    "RTE/dev.tsv": "index\tsentence1\tsentence2\tlabel\n0\tDana, the widow.\tReeve had an accident.\tentailment\n",
    "WNLI/train.tsv": "index\tsentence1\tsentence2\tlabel\n0\tI stuck a pin.\tThe carrot had a hole.\t1\n",
    "WNLI/dev.tsv": "index\tsentence1\tsentence2\tlabel\n0\tThe drain is clogged.\tThe hair must go.\t0\n",
}
"""Contents by path. What is printed of the real files: their columns, their marks, their line ends."""


def write_glue(root: Path, files: dict[str, str] = FILES) -> Path:
    """Write `files` below `root`, byte for byte; returns `root`."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content.encode("utf-8"))
    return root
