"""Templates for layers that cost alike, for whoever has no profile."""

from __future__ import annotations

from collections.abc import Sequence

from windtunnel.base.errors import UserError
from windtunnel.training.pipelines.live.layers import LayerSpec
from windtunnel.training.pipelines.model import LayerProfile, TemplateSet
from windtunnel.training.pipelines.policy.planner import plan
from windtunnel.training.pipelines.policy.templates import fingerprint


def even_templates(
    layers: Sequence[LayerSpec], *, n0: int = 1, failures: int = 1, largest: int | None = None
) -> TemplateSet:
    """Cuts of ``layers`` into stages of as equal length as can be, for ``n0`` .. ``largest`` hosts.

    ``n0``: fewest hosts whose memory holds the model, as the caller knows. ``failures``: hosts that
    may be lost at once. ``largest``: as many as there are layers unless given; at least ``2 n0 - 1`` is of
    use.

    Raises:
        UserError: there are fewer layers than hosts.
    """
    largest = len(layers) if largest is None else largest
    if not 1 <= n0 <= largest <= len(layers):
        raise UserError(f"templates for {n0} to {largest} hosts; accepted: 1 to {len(layers)}, the layers")
    profile = [LayerProfile(layer.name, forward=1.0, backward=2.0) for layer in layers]
    made = [plan(profile, hosts, 1, 1.0) for hosts in range(n0, largest + 1)]
    templates = tuple(template for template in made if template is not None)
    return TemplateSet(n0, failures, templates, fingerprint(profile, (n0, failures, largest)))
