"""The shared ranks of the distributed tests: one that ends fails the test that asked it, and no other."""

import os

import pytest

from tests.ranks import RankError, Ranks, free_port


def test_a_process_that_ended_is_told_and_replaced():
    """Its pipe gives three different errors, by when it ended: they were of tests that had done nothing."""
    ranks = Ranks(1)
    try:
        with pytest.raises(RankError, match="rank 0: its process ended with 3"):
            ranks(os._exit, 3)
        assert ranks(os.getpid) == [ranks._processes[0].pid]
        ranks._processes[0].kill()  # between two calls
        ranks._processes[0].join()
        with pytest.raises(RankError, match="rank 0: its process ended with -9"):
            ranks(os.getpid)
        assert ranks(sum, [1, 2]) == [3]
    finally:
        ranks.close()


def test_a_port_for_a_launcher_is_none_that_a_connection_is_given():
    assert {20_000 <= free_port() < 32_768 for _ in range(20)} == {True}
