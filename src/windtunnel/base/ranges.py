"""Many whole numbers in few words: ``0-503,510`` are 0 to 503, and 510."""

from __future__ import annotations

from collections.abc import Iterable


def spans(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """The stretches without a gap, ascending, each as its first and its last number."""
    pairs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if pairs and number <= pairs[-1][1] + 1:
            pairs[-1] = (pairs[-1][0], number)
        else:
            pairs.append((number, number))
    return pairs


def words(numbers: Iterable[int]) -> list[str]:
    """One word for each stretch: ``0-503``, or ``510`` for a number that stands alone."""
    return [str(first) if first == last else f"{first}-{last}" for first, last in spans(numbers)]


def write(numbers: Iterable[int]) -> str:
    """``0-503,510``; nothing for no numbers."""
    return ",".join(words(numbers))


def read(text: str) -> tuple[int, ...]:
    """The numbers that `write` wrote, ascending.

    Raises:
        ValueError: a part is neither a number nor a range of them.
    """
    numbers: list[int] = []
    for part in text.split(",") if text else ():
        first, dash, last = part.partition("-")
        numbers.extend(range(int(first), int(last if dash else first) + 1))
    return tuple(numbers)
