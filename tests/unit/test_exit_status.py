"""Exit statuses: what schedulers read."""

from __future__ import annotations

from trp_scale.exit_status import ExitStatus


def test_numbers_stay_and_each_says_what_to_do() -> None:
    numbers = {status.name: int(status) for status in ExitStatus}
    assert numbers == {
        "DONE": 0,
        "FAILED": 1,
        "REFUSED": 2,
        "DIVERGED": 3,
        "HUNG": 4,
        "STORAGE": 5,
        "INTERRUPTED": 130,
    }
    assert all(status.meaning and status.advice and str(status) == str(int(status)) for status in ExitStatus)


def test_another_start_may_help_after_a_fault_alone() -> None:
    assert {status for status in ExitStatus if status.is_fault} == {ExitStatus.FAILED, ExitStatus.HUNG}
