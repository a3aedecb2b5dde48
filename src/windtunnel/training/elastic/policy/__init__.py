"""What the supervisor of a job decides (`rules`), and the state that it decides from (`core`)."""

from windtunnel.training.elastic.policy.rules import POLICIES, Decision, Observation, decide

__all__ = ["POLICIES", "Decision", "Observation", "decide"]
