"""The machine will be taken: what runs is saved in the order that saves most."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from windtunnel.agents.sandbox.box import Box
from windtunnel.agents.sandbox.context import Context
from windtunnel.agents.sandbox.costs import load_costs
from windtunnel.agents.sandbox.model import Saved, TurnClass
from windtunnel.agents.sandbox.policy import Endangered, Notice, Save


def save_all(context: Context, boxes: Mapping[str, Box], seconds: float) -> dict[str, Saved]:
    """Save ``boxes``, which run, within ``seconds``; of each, what was kept or why it was not."""
    begin = time.monotonic()
    costs = load_costs().costs
    of: dict[str, Endangered] = {}
    for name, box in boxes.items():
        memory, processes = box.machine().cgroup.usage()[1], len(box.machine().cgroup.pids())
        times = costs.estimate_files(), costs.estimate_full(memory, processes)
        # what it needs is seen when its turn comes: to look now would hold the first ones up
        of[name] = Endangered(name, TurnClass.FULL, *times)
    outcome = {name: Saved(box.tip, fault="no time is left") for name, box in boxes.items()}
    saved: list[str] = []

    def save(planned: Save) -> None:
        box = boxes[planned.name]
        saved.append(planned.name)
        before = box.tip
        late = Notice(seconds - (time.monotonic() - begin), 1, (of[planned.name],))
        if not (found := log.decide(late, write=False)).saves:  # that there is time is no news
            log.decided(late, found)
            return
        try:
            made = box.save(planned.most)
            whole = before if made.lacks and made.id != before else ""
            outcome[box.name] = Saved(made.id, made.lacks, box.refuses(made), whole)
        except Exception as error:
            outcome[box.name] = Saved(box.tip, fault=str(error))

    workers = context.engine.workers
    log = context.log("")
    order = log.decide(Notice(float(seconds), workers, tuple(of.values())))
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(save, order.saves))
    log.did(saved=saved)
    return outcome
