"""Points of a sweep as tasks of a control plane: workers on any host emulate them, the sweep collects.

A task is the command ``python -m windtunnel.tasks SPEC ID POINT REPORT``; the last line of its output is what
came of the point. A point has a key for each try, so that a sweep that is started again finds the tasks that
it has: it waits for those that are not over, takes what was done, and tries once more what failed. The id is
a hash of all that decides the results: where script, profiles or windtunnel differ, a worker refuses.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from windtunnel.base.errors import UserError, WindtunnelError
from windtunnel.control.database import Control, open_control
from windtunnel.control.database.handlers import GROUP
from windtunnel.fabrics import alternatives
from windtunnel.training.emulate.emulation import Progress
from windtunnel.training.emulate.sweep import Point, Sweep, load_sweep
from windtunnel.training.emulate.sweep.execute import CAPTURE_JOBS, emulate_group, head
from windtunnel.training.emulate.sweep.result import Row

COMMAND = (sys.executable, "-m", "windtunnel.tasks")
LOOK, LONGEST = 0.5, 500
"""Seconds between two looks at the tasks; characters of a reason: a task keeps the end of its output only."""


def emulate_on_control(
    url: str,
    spec: Path,
    sweep: Sweep,
    resume: bool,
    report: bool,
    points: Sequence[Point],
    progress: Progress,
) -> Iterator[Row]:
    """What comes of ``points``, each as its task ends. Without ``resume`` every one is a new task.

    Raises:
        UserError: there is no control plane at ``url``.
        DatabaseError: it cannot be used any more; the tasks go on.
    """
    control = open_control(url, option="--on")
    try:
        waiting = _submitted(control, spec, sweep, points, resume, report)
        while waiting:
            ended = control.query(_TASKS.format("id", sweep.id, "AND state IN ('done', 'failed')"))[1]
            for number in [number for (number,) in ended if number in waiting]:
                state, error, output = control.query(
                    f"SELECT state, error, output FROM task WHERE id = {number}"
                )[1][0]
                yield head(waiting.pop(number)) | _outcome(state, error, output)
            why = control.query(_WHY.format(sweep.id))[1]
            progress("; ".join(f"{count} wait: {words}" for words, count in why), 0.0)
            time.sleep(LOOK * bool(waiting))
    finally:
        control.engine.dispose()


_TASKS = "SELECT {} FROM task WHERE key LIKE 'sweep-{}-%' {} ORDER BY id"
_WHY = "SELECT why, count(*) FROM waiting WHERE key LIKE 'sweep-{}-%' GROUP BY why ORDER BY why"


def _submitted(
    control: Control, spec: Path, sweep: Sweep, points: Sequence[Point], resume: bool, report: bool
) -> dict[int, Point]:
    """The points by the tasks that have them."""
    task_ids = dict[str, int]()
    tries = dict[int, tuple[int, bool]]()  # the last of each point; whether it failed
    statement = _TASKS.format("id, key, state, error, output", sweep.id, "")
    for task, key, state, error, output in control.query(statement)[1]:
        index, number = map(int, key.split("-")[2:])
        over = state in ("done", "failed")
        tries[index] = number, over and _outcome(state, error, output)["status"] == "failed"
        task_ids[key] = task
    keys, new = list[str](), list[dict[str, Any]]()
    for point in points:
        number, failed = tries.get(point.index, (0, False))
        number += failed or (not resume and point.index in tries)
        keys.append(f"sweep-{sweep.id}-{point.index}-{number}")
        words = [*COMMAND, str(spec.absolute()), sweep.id, str(point.index), str(int(report))]
        new += [{"command": words, "key": keys[-1]}] * (keys[-1] not in task_ids)
    for at in range(0, len(new), GROUP):
        part = new[at : at + GROUP]
        task_ids.update(
            zip([task_spec["key"] for task_spec in part], control.run("submit", tasks=part), strict=True)
        )
    return {task_ids[key]: point for key, point in zip(keys, points, strict=True)}


def _outcome(state: str, error: str | None, output: str | None) -> Row:
    lines = (output or "").strip().splitlines() or ["it wrote nothing"]
    for line in reversed(lines if state == "done" else []):
        if line.startswith('{"status": '):
            row: Row = json.loads(line)
            return row
    return {"status": "failed", "error": f"the task failed ({error or 'no outcome'}): {lines[-1]}"[:LONGEST]}


def main(words: Sequence[str]) -> None:
    """What a worker runs: one point, whose outcome is printed.

    Raises:
        UserError: the sweep here is another one than that which was submitted.
    """
    spec, sweep_id, index, report = words
    sweep = load_sweep(Path(spec))
    if sweep.id != sweep_id:
        raise UserError(
            f"{spec}: on this host it is sweep {sweep.id}, submitted is {sweep_id}; accepted are the same "
            "file, script, device profiles and version of windtunnel"
        )
    point = sweep.points[int(index)]
    (row,) = emulate_group([point], CAPTURE_JOBS, bool(int(report)), fabrics=alternatives)
    outcome = {name: value for name, value in row.items() if name not in head(point)}
    if "error" in outcome:
        outcome["error"] = outcome["error"][:LONGEST]
    sys.stderr.flush()
    print(f"\n{json.dumps(outcome)}", flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except WindtunnelError as error:
        raise SystemExit(f"windtunnel: {error}") from None
