"""Faults of the world have status 1, and mistakes of the user 2."""

from __future__ import annotations

import errno
import os

import pytest

from trp_scale.distributed.groups import Group, run_on_all_ranks
from trp_scale.errors import DataError, RefusedError, UnreadableError, exit_status_and_message
from trp_scale.storage.transfer import RemoteError, RemoteSetupError


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RemoteError("s3://bucket/a.tar: not read within 300 s"), 1),
        (RemoteSetupError("s3://bucket/a.tar: no permission"), 2),
        (UnreadableError("11 blocks could not be read"), 1),
        (DataError("dataset.json: not found"), 2),
        (DataError("a.tar: cannot be read"), 2),
    ],
)
@pytest.mark.parametrize("through_ranks", [False, True])
def test_faults_of_the_world_have_status_1_and_mistakes_of_the_user_2(
    error: RefusedError, status: int, through_ranks: bool
) -> None:
    def action() -> None:
        raise error

    with pytest.raises(RefusedError) as caught:
        run_on_all_ranks(Group("world"), "looking", action) if through_ranks else action()
    assert exit_status_and_message(caught.value)[0] == status


@pytest.mark.parametrize(("number", "status"), [(errno.EIO, 1), (errno.ESTALE, 1), (errno.ENOENT, 2)])
def test_data_that_failing_storage_hides_is_no_mistake_of_the_user(number: int, status: int) -> None:
    error = DataError("a.tar: cannot be read")
    error.__cause__ = OSError(number, os.strerror(number), "a.tar")
    assert exit_status_and_message(error)[0] == status
