"""Exit statuses, which schedulers read: faults of the world have status 1, and mistakes of the user 2."""

from __future__ import annotations

import errno
import os

import pytest

from trp_scale.distributed.groups import Group, run_on_all_ranks
from trp_scale.errors import DataError, ExitStatus, RefusedError, UnreadableError, exit_status_and_message
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


def test_numbers_stay_and_each_says_what_to_do() -> None:
    numbers = {status.name: int(status) for status in ExitStatus}
    assert numbers == {"DONE": 0, "FAILED": 1, "REFUSED": 2, "DIVERGED": 3, "HUNG": 4, "STORAGE": 5, "INTERRUPTED": 130}
    assert all(status.meaning and status.advice and str(status) == str(int(status)) for status in ExitStatus)


def test_another_start_may_help_after_a_fault_alone() -> None:
    assert {status for status in ExitStatus if status.is_fault} == {ExitStatus.FAILED, ExitStatus.HUNG}
