"""Everything that wants a GPU, in parts of four minutes: sections in the order of what is asked now.

    python benchmarks/gpu.py --output gpu.json [--sections captured ranks] [--items checks] [--seconds 240] [--small]

Prints a line for each item and writes all of them to --output after every one, so that a run that is cut off keeps
what it has. What cannot be measured (no GPU, no deepspeed, no time left) is null or left out with the reason.
Exit status: 0, or 1 when an item that should have been measured failed or is not as expected.

What does not fit into --seconds is left out, last items first; --named measures it in a part of its own. Checks may run
side by side, timings run alone:

    python benchmarks/gpu.py --sections captured --items timings --output timings.json
    for each in captured waits; do
        python benchmarks/gpu.py --items checks --sections $each --output "$each.json" &
    done; wait
    for each in collectives pos_bert_tiny adpe_tiny mlo_mae_tiny mm_mae_tiny; do
        python benchmarks/gpu.py --sections ranks --named $each --nccl libnccl.so.2 --output "$each.json" &
    done; wait

Make the data of `ranks` beforehand if the machine with the GPU lacks NLTK: run one of its items with --small. `curves`
trains whole runs of about four minutes an item, on data in --data that it does not make (it prints the commands):

    trp-scale shard-text --inputs books/train.jsonl --length 128 --output build/gpu_data/books
    trp-scale shard-images --inputs cifar10/train-*.tar --output build/gpu_data/cifar10
    python benchmarks/gpu.py --sections curves --seconds 500 --output curves.json
    python benchmarks/pictures.py --curves curves.json

Figures of 2026-11-26 and 2026-11-27 are in docs/experiments.md.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import tyro

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once; checks of equal steps need it
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu_captured import captured_steps
from benchmarks.gpu_curves import curves
from benchmarks.gpu_modern import modern
from benchmarks.gpu_ranks import ranks
from benchmarks.gpu_setting import Item, Outcome, Setting, measured
from benchmarks.gpu_waits import waits
from trp_scale.distributed.environment import Environment
from trp_scale.storage.files import write_json

Section = Literal["captured", "ranks", "waits", "modern", "curves"]
SECTIONS: dict[Section, Callable[[Setting], Iterator[Item]]] = {
    "captured": captured_steps,
    "ranks": ranks,
    "waits": waits,
    "modern": modern,
    "curves": curves,
}
"""In the order they are measured. A new section is a function that yields items, its name above, and one entry here."""
LIBRARIES = ("torch", "transformers", "deepspeed", "triton", "tokenizers", "timm")


@dataclass(kw_only=True)
class Options:
    """What to measure."""

    sections: tuple[Section, ...] = get_args(Section)
    """Sections to measure."""
    items: Literal["all", "checks", "timings"] = "all"
    """Of these sections: checks (agreement, waits) may run as several processes at once, timings run alone."""
    named: tuple[str, ...] = ()
    """Only items with one of these texts in their names; default: all."""
    seconds: float = 240.0
    """Time for all of it; an item that does not fit into what is left is skipped, and says so."""
    small: bool = False
    """Tiny models, few repetitions: to try the script itself, on a CPU too."""
    data: Path = Setting.data
    """Directory of the data of sections `ranks`, which makes missing ones, `modern` and `curves`, which do not."""
    steps: int = Setting.steps
    """Steps of a run of section `curves`."""
    ranks: Literal[1, 2] = 2
    """Processes of a run of section `ranks`."""
    nccl: Path | None = None
    """Library to preload for two ranks, libnccl.so.2 of version 2.30 or newer; default: torch's."""
    output: Path | None = None
    """JSON file with all figures."""


def wanted(item: Item, options: Options) -> bool:
    """Whether it is among the `--items`, and those `--named`."""
    named = not options.named or any(text in item.name for text in options.named)
    return named and (options.items == "all" or item.timed == (options.items == "timings"))


def version_of(library: str) -> str | None:
    """As installed; None where it is not."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe(setting: Setting) -> dict[str, Any]:
    """The machine and the libraries."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": setting.device_name,
        "device_memory_mb": torch.cuda.get_device_properties(setting.device).total_memory / 2**20
        if setting.on_gpu
        else None,
        "cuda": torch.version.cuda if setting.on_gpu else None,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in LIBRARIES},
        "small": setting.small,
    }


def main(options: Options) -> int:
    """Measure; returns the exit status."""
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    outcomes: list[Outcome] = []
    with Environment() as environment:
        given = {name: getattr(options, name) for name in ("small", "data", "steps", "ranks", "nccl")}
        setting = Setting(environment=environment, **given)
        document = describe(setting)
        print(", ".join(f"{name}: {value}" for name, value in document.items()), flush=True)
        for name in (name for name in SECTIONS if name in options.sections):
            items = (item for item in SECTIONS[name](setting) if wanted(item, options))
            for item in items:
                outcome = measured(name, item, options.seconds - (time.perf_counter() - began))
                outcomes.append(outcome)
                print(outcome.line(), flush=True)
                document["seconds"] = time.perf_counter() - began
                if options.output:
                    write_json(options.output, document | {"items": [asdict(one) for one in outcomes]})
    failed = [f"{one.section}: {one.name}" for one in outcomes if one.failed]
    unmeasured = sum(1 for one in outcomes if one.reason)
    print(
        f"{len(outcomes)} items in {time.perf_counter() - began:.0f} s, {unmeasured} not measured, {len(failed)} failed"
    )
    for item_name in failed:
        print(f"failed: {item_name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
