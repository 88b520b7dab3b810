"""The report says what got better and worse, and where the balancer's weights explain it."""

from __future__ import annotations

from trp_scale.training.metrics import RunHistory, TaskHistory
from trp_scale.training.report import changes_in_words


def history(*tasks: tuple[str, float, float, float, int], outside: set[str] | None = None) -> RunHistory:
    """Of (name, start, end, weight, elements)."""
    found = RunHistory(outside_tasks=outside or set())
    found.tasks = {
        name: TaskHistory(start=start, end=end, weight=weight, count=count) for name, start, end, weight, count in tasks
    }
    return found


def test_better_and_worse_by_the_size_of_the_change() -> None:
    found = history(("a", 9.0, 8.0, 0.7, 100), ("b", 5.0, 7.0, 0.0, 100), ("c", 5.0, 4.5, 0.3, 100))
    assert changes_in_words(found) == [
        "better: 2 of 3 tasks: a -1.0000, c -0.5000",
        "worse: 1: b +2.0000; it has less than an even share of the weight",
    ]


def test_a_heavy_task_that_got_worse_is_not_explained_away() -> None:
    found = history(("a", 9.0, 9.5, 0.7, 100), ("b", 5.0, 4.0, 0.3, 100))
    assert changes_in_words(found)[1] == "worse: 1: a +0.5000"
    found = history(*((name, 5.0, 6.0, weight, 50) for name, weight in (("a", 0.8), ("b", 0.1), ("c", 0.1))))
    assert changes_in_words(found)[1].endswith("; 2 of them have less than an even share of the weight")


def test_few_elements_outside_tasks_and_single_ones_are_no_news() -> None:
    few = ("b", 5.0, 7.0, 0.0, 3)
    assert changes_in_words(history(("a", 9.0, 8.0, 1.0, 100), few)) == []
    found = history(
        ("a", 9.0, 8.0, 0.5, 100), ("c", 2.0, 1.0, 0.5, 100), ("other", 3.0, 4.0, 0.2, 100), outside={"other"}
    )
    assert changes_in_words(found) == ["better: 2 of 2 tasks: a -1.0000, c -1.0000"]
    rare = history(("a", 9.0, 8.0, 0.5, 100), ("c", 2.0, 1.0, 0.5, 100), few)
    assert changes_in_words(rare) == ["better: 2 of 2 tasks with 30 elements or more: a -1.0000, c -1.0000"]
    many = history(*((name, 2.0, 1.0, 0.2, 50) for name in "abcde"))
    assert changes_in_words(many) == ["better: 5 of 5 tasks: a -1.0000, b -1.0000, c -1.0000, ..."]


def test_equal_weights_are_not_called_less_than_even() -> None:
    """Also where a rare task, which is not put into words, has its share too."""
    rare = ("rare", 5.0, 7.0, 1 / 3, 3)
    found = history(("a", 9.0, 9.5, 1 / 3, 100), ("b", 5.0, 4.0, 1 / 3 + 1e-12, 100), rare)
    assert changes_in_words(found)[1] == "worse: 1: a +0.5000"
    scaled = history(("a", 9.0, 9.5, 1.2, 100), ("b", 5.0, 4.0, 0.8, 100))  # weights of Uncertainty do not add up to 1
    assert changes_in_words(scaled)[1] == "worse: 1: a +0.5000"
