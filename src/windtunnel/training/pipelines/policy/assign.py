"""The assignment problem: each row to one column, with the greatest sum (Kuhn, 1955; Munkres, 1957)."""

from __future__ import annotations

from collections.abc import Sequence

_INFINITE = float("inf")


def assign(gain: Sequence[Sequence[float]]) -> list[int]:
    """The column of each row of a square table that makes the sum of ``gain[row][column]`` greatest.

    Shortest augmenting paths with potentials, O(n^3).
    """
    n = len(gain)
    row_price = [0.0] * (n + 1)
    column_price = [0.0] * (n + 1)
    row_of = [0] * (n + 1)  # Rows and columns are counted from 1 here; 0 is none.
    for row in range(1, n + 1):
        row_of[0] = row
        column = 0
        least = [_INFINITE] * (n + 1)
        came_from = [0] * (n + 1)
        used = [False] * (n + 1)
        while row_of[column]:
            used[column] = True
            here, step, nearest = row_of[column], _INFINITE, 0
            for c in range(1, n + 1):
                if used[c]:
                    continue
                cost = -gain[here - 1][c - 1] - row_price[here] - column_price[c]
                if cost < least[c]:
                    least[c], came_from[c] = cost, column
                if least[c] < step:
                    step, nearest = least[c], c
            for c in range(n + 1):
                if used[c]:
                    row_price[row_of[c]] += step
                    column_price[c] -= step
                else:
                    least[c] -= step
            column = nearest
        while column:
            row_of[column] = row_of[came_from[column]]
            column = came_from[column]
    found = [0] * n
    for column in range(1, n + 1):
        found[row_of[column] - 1] = column - 1
    return found
