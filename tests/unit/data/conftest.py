"""A cache of its own for each test, and little patience."""

from tests.unit.storage.conftest import cache

__all__ = ["cache"]
