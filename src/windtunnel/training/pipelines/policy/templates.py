"""The set of templates, and what it guarantees.

``n0`` hosts are the fewest that hold the model. A job of ``N`` hosts runs ``f + 1`` pipelines or more,
each by a template of ``n0``, ``n0 + 1``, .. hosts. Every layer is then on ``f + 1`` hosts, one of each
pipeline, and any ``f`` hosts may be lost at once.

Which numbers of hosts can be divided: ``x`` pipelines use every number from ``x n0`` to
``x (n0 + p - 1)``, with ``p`` templates of successive sizes. Each number from ``(f + 1) n0`` on is a sum of
``f + 1`` sizes or more if neighbouring intervals touch, and the first two are the farthest apart: ``p`` must
be ``1 + ceil((n0 - 1) / (f + 1))`` or more (`count_needed`). Oobleck (Jang et al., SOSP 2023, section 4.1)
asks for ``p >= n0``, with no size above ``N - f n0``, which no pipeline can have beside ``f`` others. Sizes
up to ``2 n0 - 1`` are kept in any case: a merge (`reconfigure`) can lead to them.
"""

from __future__ import annotations

from collections.abc import Sequence

from windtunnel.base.errors import UserError
from windtunnel.training.pipelines.model import LayerProfile, Template, TemplateSet
from windtunnel.training.pipelines.policy.planner import fits, plan

USUAL_LARGEST = 4
"""Templates are made for up to so many times n0 hosts unless told otherwise: with yet more hosts, more
pipelines are faster than longer ones."""


def minimum_hosts(profile: Sequence[LayerProfile], memory: float, most: int | None = None) -> int:
    """The fewest hosts on which some plan fits (n0). ``most``: hosts that there are.

    Raises:
        UserError: none fits.
    """
    limit = len(profile) if most is None else min(most, len(profile))
    for hosts in range(1, limit + 1):
        if fits(profile, hosts, memory):
            return hosts
    need = sum(layer.state_bytes + layer.activation_bytes for layer in profile)
    raise UserError(
        f"the model fits no number of hosts up to {limit}: its layers need {need:.4g} bytes with one"
        f" microbatch in flight, and a host has {memory:.4g}"
    )


def count_needed(n0: int, failures: int) -> int:
    """The fewest templates with which every number of hosts from ``(failures + 1) n0`` on is covered."""
    return 1 + -(-(n0 - 1) // (failures + 1))


def template_set(
    profile: Sequence[LayerProfile],
    hosts: int,
    failures: int,
    memory: float,
    largest: int | None = None,
) -> TemplateSet:
    """Templates for a job of ``hosts`` hosts that is to survive ``failures`` at once.

    ``largest``: no template for more hosts, `USUAL_LARGEST` times n0 unless given; but all that coverage and
    merging need are made.

    Raises:
        UserError: the model does not fit, or ``hosts`` is less than ``(failures + 1) n0``.
    """
    if failures < 0:
        raise UserError(f"failures is {failures}; 0 or more is needed")
    n0 = minimum_hosts(profile, memory, hosts)
    if hosts < (failures + 1) * n0:
        raise UserError(
            f"{hosts} hosts cannot hold {failures + 1} copies of the model, which needs {n0} hosts;"
            f" {(failures + 1) * n0} hosts or at most {hosts // n0 - 1} failures at once are needed"
        )
    needed = max(2 * n0 - 1, n0 + count_needed(n0, failures) - 1)
    useful = hosts - failures * n0
    size = max(needed, min(useful, USUAL_LARGEST * n0 if largest is None else largest))
    templates: list[Template] = []
    for number in range(n0, min(size, hosts, len(profile)) + 1):
        template = plan(profile, number, memory)
        if template is None:  # More stages hold more microbatches; sizes must be successive.
            break
        templates.append(template)
    return TemplateSet(n0, failures, tuple(templates))


def covered(set: TemplateSet, hosts: int) -> bool:
    """Whether ``hosts`` hosts are a sum of template sizes."""
    return hosts // set.n0 >= max(1, -(-hosts // largest_size(set)))


def largest_size(set: TemplateSet) -> int:
    """Hosts of the largest template."""
    return set.n0 + len(set.templates) - 1


def guarantee(set: TemplateSet, hosts: int) -> tuple[str, ...]:
    """What the templates guarantee a job of ``hosts`` hosts, and what not, in sentences."""
    f, n0 = set.failures, set.n0
    full, copies = (f + 1) * n0, hosts // n0
    sentences: list[str] = []
    if hosts < n0:
        sentences.append(f"{hosts} hosts do not hold the model, which needs {n0}.")
    elif hosts < full:
        sentences.append(
            f"{hosts} hosts run at most {copies} pipelines: {copies - 1} may be lost at once,"
            f" not the {f} wanted, which take {full} hosts."
        )
    elif f == 0:
        sentences.append(
            f"From {n0} to {hosts} hosts the job runs; one host's loss may take the last copy of a layer:"
            " then it needs a checkpoint."
        )
    else:
        sentences.append(
            f"From {full} to {hosts} hosts, at least {f + 1} pipelines run:"
            f" after the loss of any {f} hosts at once, a copy of each layer is left."
        )
        sentences.append(
            f"From {n0} to {full - 1} hosts the job still runs, with fewer copies:"
            f" after the loss of all holders of a layer it needs a checkpoint."
        )
    sentences.append("After more losses at once, a copy of each layer may be left or not.")
    return tuple(sentences)
