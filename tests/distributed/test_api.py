"""The functions of `import trp_scale` on several ranks."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

import trp_scale as trp
from tests.ranks import Ranks
from tests.runs import essence, flags, lines, pretrain_here, sections


def pretrain_by_function(dataset: Path, run_dir: Path) -> tuple[str, bool]:
    """On ranks whose process group is there already, which stays."""
    small = sections(dataset, training={"steps": 2})
    run = trp.pretrain("pos_bert_tiny", run_dir=run_dir, engine="fsdp", **small)
    return str(run.path), run.finished and dist.is_initialized()


def test_ranks_with_a_process_group_of_their_own_call_it_together(
    two_ranks: Ranks, text_dataset: Path, tmp_path: Path
) -> None:
    own, command = tmp_path / "own", tmp_path / "command"
    assert two_ranks(pretrain_by_function, text_dataset, own) == [(str(own), True)] * 2
    two_ranks(pretrain_here, flags(text_dataset, command, engine="fsdp", training__steps=2))
    assert [essence(line) for line in lines(own)] == [essence(line) for line in lines(command)]
