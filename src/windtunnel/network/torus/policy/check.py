"""Whether a plan is one: every rule of an all-to-all without conflicts, checked by counting.

It shares no code with what made the plan but the numbering of links and which of them failed.
"""

from __future__ import annotations

import numpy as np

from windtunnel.network.torus.policy import Decision, Observation, name, standing
from windtunnel.network.torus.policy.shape import heads, nodes_of


def faults(observation: Observation, decision: Decision) -> list[str]:
    """What is wrong with a plan, a sentence each; empty for a good one.

    No (directed link, wavelength) is used twice; every ordered pair of nodes that stand is there once; each
    route leads from its source to its destination over links that stand.
    """
    sides, nodes, ends = observation.sides, nodes_of(observation.sides), heads(observation.sides)
    routes, wrongs = decision.routes, []
    lengths, last = routes.lengths, decision.routes.starts[1:] - 1
    if lengths.min(initial=1) < 1:
        return [f"{_pair(observation, decision, int(np.argmin(lengths)))} has no route"]
    stand = np.ones(nodes, dtype=np.bool_)
    stand[list(observation.failed_nodes)] = False
    pairs = np.outer(stand, stand) & ~np.eye(nodes, dtype=np.bool_)
    times = np.bincount(
        routes.sources.astype(np.int64) * nodes + routes.destinations, minlength=nodes * nodes
    )
    wrong = np.flatnonzero(times.reshape(nodes, nodes) != pairs)
    if len(wrong):
        source, destination = divmod(int(wrong[0]), nodes)
        wrongs.append(
            f"pair {name(source, sides)} to {name(destination, sides)} is there {times[wrong[0]]} times, and "
            f"{len(wrong) - 1} more pairs are there too often or not at all"
        )
    tails = np.arange(len(ends)) // (2 * len(sides))
    pair = routes.pair_of_hop()
    followed = np.ones(len(routes.links), dtype=np.bool_)
    followed[last] = False
    at = np.flatnonzero(followed)
    broken = np.zeros(len(lengths), dtype=np.bool_)
    broken[pair[at[ends[routes.links[at]] != tails[routes.links[at + 1]]]]] = True
    broken |= tails[routes.links[routes.starts[:-1]]] != routes.sources
    broken |= ends[routes.links[last]] != routes.destinations
    if broken.any():
        wrongs.append(
            f"the route of {_pair(observation, decision, int(np.argmax(broken)))} does not lead there"
        )
    dead = ~standing(observation, ends)[routes.links]
    if dead.any():
        wrongs.append(
            f"the route of {_pair(observation, decision, int(pair[np.argmax(dead)]))} takes a link"
            " that failed"
        )
    if decision.wavelengths.min(initial=0) < 0 or decision.wavelengths.max(initial=0) >= decision.count:
        wrongs.append(f"a wavelength is not one of 0 to {decision.count - 1}")
    else:
        slot = routes.links.astype(np.int64) * decision.count + decision.wavelengths[pair]
        used = np.bincount(slot, minlength=1)
        if used.max() > 1:
            link, wavelength = divmod(int(np.argmax(used)), decision.count)
            wrongs.append(
                f"wavelength {wavelength} is used {used.max()} times on the link from "
                f"{name(link // (2 * len(sides)), sides)} to {name(int(ends[link]), sides)}, and "
                f"{int((used > 1).sum()) - 1} more slots are used twice"
            )
    return wrongs


def _pair(observation: Observation, decision: Decision, pair: int) -> str:
    source, destination = int(decision.routes.sources[pair]), int(decision.routes.destinations[pair])
    return f"{name(source, observation.sides)} to {name(destination, observation.sides)}"
