"""The bench's sections yield the rows that its targets are judged by."""

from __future__ import annotations

from benchmarks.training.gradsync.live import CODECS, FUSED, HOOK, rows_of
from windtunnel.training.gradsync.model import NONE


def test_a_plan_is_judged_by_the_slowest_rank_against_the_best_choice() -> None:
    names = ("plan", NONE, *CODECS, HOOK, f"{FUSED} by layers", f"{FUSED} in its best groups")

    def arm(place: int, slower: float, name: str) -> dict[str, object]:
        predicted = 2.0 if name == "plan" else 1.0 + place
        seconds = [predicted, predicted, 2.2 if name == "plan" else predicted]
        return {
            "seconds": [slower * one for one in seconds], "nbytes": 2**20 * slower, "groups": 1,
            "used": [name], "predicted": predicted,
        }  # fmt: skip

    told = [
        {
            "error": 0.1,
            "handing": 1e-3,
            "arms": {name: arm(place, slower, name) for place, name in enumerate(names)},
        }
        for slower in (0.5, 1.0)
    ]
    rows = {row.name.removeprefix("there: "): row for row in rows_of("there", told)}
    assert rows["plan"].measured == rows["plan"].emulated == 2000
    assert "2000 to 2200 ms, 1.00 MiB" in rows["plan"].note
    assert rows["plan / best single choice (none)"].met is True
    assert rows["plan / none"].measured == 1
    assert rows["mean error of predictions"].measured == 0
    assert rows["Spearman, predicted and measured"].met is True
    told[1]["arms"]["plan"]["seconds"] = [2.1] * 3  # type: ignore[index]
    rows = {row.name.removeprefix("there: "): row for row in rows_of("there", told)}
    assert rows["plan / best single choice (none)"].met is False
    assert rows["plan / none"].met is False
    assert 0 < rows["mean error of predictions"].measured < 1  # type: ignore[operator]
