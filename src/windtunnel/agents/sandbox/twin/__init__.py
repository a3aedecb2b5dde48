"""The twin: hosts full of sandboxes, emulated from the load of their turns and measured costs.

What turns need, the order of checkpoints and what is saved on a notice are decided by the very code that live
sandboxes use (``policy``); only the machine is a model. ``loads`` says what turns ask of a host; ``world`` is
the hosts and their sandboxes; ``questions`` is what is asked of them.
``cost`` prices a single decision.
"""

from __future__ import annotations

from functools import cache

from windtunnel.agents.sandbox.costs import SandboxCosts, load_costs
from windtunnel.agents.sandbox.model import TurnClass
from windtunnel.agents.sandbox.policy import (
    Admission,
    BringBack,
    Decision,
    Forget,
    Keep,
    Less,
    Look,
    Notice,
    Observation,
    Past,
    Pick,
    Queued,
    Restore,
    Room,
    SaveOrder,
    Settle,
)  # fmt: skip

PAGE = 4096


def cost(observation: Observation, decision: Decision) -> dict[str, float]:
    """What a decision costs on a host that has nothing else to do, by this machine's measured costs.

    ``seconds`` until it is carried out, and of a checkpoint ``frozen_seconds`` and the ``bytes`` written.
    Empty where it costs nothing by itself: what comes first, what is forgotten, what room there is.

    Raises:
        TypeError: the decision answers another question.
    """
    costs = _costs()
    match observation, decision:
        case Look(), Keep():
            return _checkpoint(costs, observation, decision)
        case Notice(), SaveOrder():
            return {"seconds": _saved(observation, decision)}
        case Restore(), BringBack():
            if not decision.processes:
                return {"seconds": costs.create}
            memory = max(0.0, observation.image_bytes - costs.image_bytes(0, observation.processes))
            return {"seconds": costs.bring_back(memory=memory, processes=observation.processes).seconds}
        case Less(), Settle():
            return {"seconds": decision.pause}
        case (Queued(), Pick()) | (Past(), Forget()) | (Room(), Admission()):
            return {}
    raise TypeError(f"{type(decision).__name__} is no answer to {type(observation).__name__}")


@cache
def _costs() -> SandboxCosts:
    return load_costs().costs


def _checkpoint(costs: SandboxCosts, look: Look, keep: Keep) -> dict[str, float]:
    effects = look.effects
    # where it is not known what changed, all may have
    known = (
        effects is not None and look.has_image and all(p.dirty_pages is not None for p in effects.processes)
    )
    dirty = PAGE * sum(p.dirty_pages or 0 for p in effects.processes) if effects and known else look.memory
    files = sum(change.size for change in effects.files) if effects else 0
    work = costs.checkpoint(keep.made, memory=look.memory, processes=look.processes, dirty=dirty, files=files)
    return {"seconds": work.seconds, "frozen_seconds": work.freeze, "bytes": work.written}


def _saved(notice: Notice, order: SaveOrder) -> float:
    endangered = {sandbox.name: sandbox for sandbox in notice.sandboxes}
    free = [0.0] * notice.workers
    for save in order.saves:
        sandbox = endangered[save.name]
        whole = save.most is TurnClass.FULL and sandbox.needs is TurnClass.FULL
        free[free.index(min(free))] += sandbox.full if whole else sandbox.files
    return max(free)
