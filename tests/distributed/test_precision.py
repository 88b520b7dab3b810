"""bf16 on every engine follows plain bf16; fp16 is refused on a CPU."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest
import torch

from tests.distributed.engine_layouts import ENGINE_FLAGS, LAYOUTS, on_each_rank
from tests.grids import always
from tests.parity.compare import distances
from tests.ranks import Ranks
from tests.runs import flags, pretrain_here
from tests.synthetic import Layout, Result, refusal, run
from trp_scale.config import RefusedError

BF16 = {"training": {"precision": "bf16"}}
LOSSES = 5e-4
"""Largest relative difference of a step's loss from plain bf16's. Seen: 4e-5 on ZeRO 1-3 (torch_autocast reduces their
gradients in bf16), 0 on FSDP2 and ZeRO 0; plain bf16 from fp32: 7e-5."""
TRAVELLED = 0.05
"""Largest distance between the weights over the distance travelled. Seen: 0.007 on ZeRO 1-3, 6e-8 on FSDP2 and ZeRO 0;
plain bf16 from fp32: 0.018."""


@lru_cache
def plain(precision: str) -> Result:
    return run(Layout(), {"training": {"precision": precision}})


def apart(ours: Result, theirs: Result) -> tuple[float, float]:
    """Largest relative difference of losses, and distance of the weights over the distance travelled."""
    losses = max(abs(a.loss - b.loss) / b.loss for a, b in zip(ours.steps, theirs.steps, strict=True))
    return losses, distances(ours, theirs, skip_key_biases=True)["all"][1]


def test_bf16_is_another_arithmetic_than_fp32() -> None:
    losses, weights = apart(plain("bf16"), plain("fp32"))
    assert losses > 1e-6 and weights > 1e-3
    assert all(tensor.dtype == torch.float32 for tensor in plain("bf16").weights.values())


@pytest.mark.parametrize("name", always([name for name in LAYOUTS if name != "plain"], "zero3"))
def test_bf16_on_each_engine_follows_plain_bf16(two_ranks: Ranks, name: str) -> None:
    ours = two_ranks(run, LAYOUTS[name], BF16)[0]
    losses, weights = apart(ours, plain("bf16"))
    assert losses < LOSSES
    assert weights < TRAVELLED
    assert apart(ours, plain("fp32"))[0] > 1e-6, "this was fp32"


@pytest.mark.parametrize("name", always(LAYOUTS, "plain", "ddp", "fsdp", "zero2"))
def test_fp16_on_a_cpu_is_refused_by_each_engine(two_ranks: Ranks, name: str) -> None:
    for message in on_each_rank(two_ranks, name, refusal, training={"precision": "fp16"}):
        assert "--training.precision fp16" in message and "GPU" in message and "bf16" in message


@pytest.mark.parametrize("name", ENGINE_FLAGS)
def test_a_run_in_fp16_on_a_cpu_is_refused_before_it_begins(
    name: str, text_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(RefusedError, match=r"--training\.precision fp16 .*bf16, fp32"):
        pretrain_here(flags(text_dataset, tmp_path / "run", training__precision="fp16", **ENGINE_FLAGS[name]))
    assert not (tmp_path / "run").exists()


def test_tf32_is_set_as_asked_and_stated(
    text_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for asked, kind in ((True, "high"), (False, "highest")):
        pretrain_here(flags(text_dataset, tmp_path / kind, training__steps=1, training__tf32=asked))
        assert torch.get_float32_matmul_precision() == kind
        assert torch.backends.cudnn.allow_tf32 == asked
        assert ("TF32" in capsys.readouterr().out) == asked
