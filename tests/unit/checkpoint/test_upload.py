"""Checkpoints copied to a bucket of a real S3 server on this machine, which fails on purpose now and then."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faulty_server import Faults
from tests.unit.checkpoint.fake_engine import save_step
from tests.unit.data.stores.test_s3 import s3, signed
from trp_scale.checkpoint import upload as mirror_module
from trp_scale.checkpoint.keeper import Keeper
from trp_scale.checkpoint.run_directory import Kept

__all__ = ["s3", "signed"]


def test_a_checkpoint_in_a_bucket_is_the_local_one(
    signed: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import boto3

    monkeypatch.setattr(mirror_module, "FIRST_PAUSE", 0.01)
    client = boto3.client("s3")
    client.create_bucket(Bucket="mirror")
    signed.of = {"hooks.safetensors": ["500"], "checkpoint.json": ["503"]}
    keeper, path = Keeper(tmp_path, "s3://mirror/runs/one"), save_step(tmp_path, 3)
    keeper.written(path, Kept(newest=2))
    keeper.finish(lambda: None)
    assert keeper.messages() == ["step_00000003 was copied to s3://mirror/runs/one"]
    assert not any(signed.of.values()), "every failure was met"
    for file in path.iterdir():
        stored = client.get_object(Bucket="mirror", Key=f"runs/one/step_00000003/{file.name}")
        assert stored["Body"].read() == file.read_bytes()


def test_a_bucket_that_is_not_there_stops_nothing(
    signed: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_module, "FIRST_PAUSE", 0.01)
    keeper = Keeper(tmp_path, "s3://nowhere/runs/one")
    keeper.written(save_step(tmp_path, 3), Kept(newest=2))
    keeper.finish(lambda: None)
    (message,) = keeper.messages()
    assert message.startswith(
        "--checkpoint.mirror s3://nowhere/runs/one: step_00000003 was not copied, tried 5 times ("
    )
