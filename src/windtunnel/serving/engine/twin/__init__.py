"""The engine on a cluster that is not there: its scheduler on a virtual clock, with times from a step model.

`world.serve` takes requests through it, `models.step_time` and `models.kv_tokens` say what a published model
takes on a cluster, `figures` what its users see.
"""

from __future__ import annotations

from windtunnel.serving.branching import policy as branching
from windtunnel.serving.engine import policy as admission

__all__ = ["cost"]


def cost(observation: object, decision: object) -> dict[str, float]:
    """Of `engine.policy`: ``seconds`` of the step's prefill by the step model, and the requests that are
    ``admitted`` and ``refused``; ``waiting``: seconds until the prompts of all that stay could be read. Of
    `branching.policy`: ``seconds`` of the step, and the ``tokens`` that it decodes. {} of others.
    """
    match observation, decision:
        case admission.Observation(), admission.Decision():
            time, prefilled = observation.time, sum(tokens for _, _, tokens in decision.prefill)
            left = observation.backlog + sum(
                waiting.left for waiting in observation.waiting if waiting.request not in decision.refuse
            )
            return {
                "seconds": time.token * prefilled + time.chunk * len(decision.prefill),
                "admitted": float(len(decision.admit)),
                "refused": float(len(decision.refuse)),
                "waiting": admission.fill_time(time, observation.rows, left, observation.chunk),
            }
        case branching.Observation(), branching.Decision():
            suffixes = {(entry.request, entry.unit): entry.suffix for entry in observation.candidates}
            rows = observation.rows + len(decision.admitted)
            read = observation.read + sum(suffixes[unit] for unit in decision.admitted)
            return {"seconds": observation.time.of(rows, read, observation.prefill), "tokens": float(rows)}
    return {}
