"""The checkpoints that one sandbox rests on, and what its next one must hold.

Here is what the policy is told of a sandbox (its effects since the newest checkpoint, and what there is
reason to doubt), the checkpoint that its answer calls for, and whether what that lacks is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from windtunnel.agents.sandbox import record as records
from windtunnel.agents.sandbox.checkpoint import FAULTS, Order, quiesce, take
from windtunnel.agents.sandbox.context import Context
from windtunnel.agents.sandbox.errors import SandboxError
from windtunnel.agents.sandbox.lacks import hold, kinds
from windtunnel.agents.sandbox.machine import Machine, shell_effect
from windtunnel.agents.sandbox.model import (
    Diff,
    Doubt,
    Effects,
    Event,
    Lack,
    Manifest,
    Part,
    References,
    SandboxSpec,
    ShellEffect,
    TurnClass,
)
from windtunnel.agents.sandbox.policy import READS_EFFECTS, Keep, Less, Look, Occasion
from windtunnel.agents.sandbox.record import Record
from windtunnel.agents.sandbox.store import new_id
from windtunnel.agents.sandbox.verify import whole_before
from windtunnel.base.errors import UserError
from windtunnel.base.plain import to_plain


class Lineage:
    """The past of one sandbox, by its ``record``; who calls it holds the sandbox's lock, or its queue."""

    def __init__(self, context: Context, record: Record, doubt: str) -> None:
        self.context = context
        self.record = record
        self.log = context.log(record.spec.name)
        self.tip: Manifest | None = context.manifests.load(record.tip) if record.tip else None
        self.doubt = doubt
        """Why the inspector cannot know what happened since ``tip``; empty where it can."""
        self.lacks: tuple[Lack, ...] = self.tip.lacks if self.tip else ()
        self.allowed = -1
        """The turn of which somebody has allowed less."""

    @property
    def name(self) -> str:
        return self.record.spec.name

    @property
    def spec(self) -> SandboxSpec:
        return self.record.spec

    def checkpoints(self) -> tuple[Manifest, ...]:
        """Those of this sandbox and of what it was forked from, oldest first."""
        found, _ = self.context.manifests.all()
        known = {manifest.id: manifest for manifest in found}
        chain = {manifest.id for manifest in found if manifest.box == self.name}
        for start in (*chain, self.record.base):
            at: str | None = start
            while at and at in known:
                chain.add(at)
                at = known[at].parent
        return tuple(sorted((known[one] for one in chain if one in known), key=lambda m: (m.created, m.id)))

    def own(self, checkpoint: str) -> Manifest:
        """One of ``checkpoints``; UserError where it is another sandbox's."""
        manifest = self.context.manifests.find(checkpoint)
        if manifest.id not in {one.id for one in self.checkpoints()}:
            raise UserError(
                f"sandbox {self.name}: checkpoint {manifest.id} is one of sandbox {manifest.box}; "
                f"'windtunnel sandbox fork {manifest.id}' starts a sandbox from it"
            )
        return manifest

    def instead(self, damaged: Manifest) -> str:
        """Which earlier checkpoint can be restored where ``damaged`` cannot, in words."""
        known = {manifest.id: manifest for manifest in self.checkpoints()}
        whole = known.get(whole_before(self.context, damaged, known))
        if whole is None:
            return "no checkpoint before it is whole"
        return f"checkpoint {whole.id}, from turn {whole.turn}, is whole"

    def diff(self, older: str, newer: str, commands: Callable[[], Sequence[str]]) -> Diff:
        """What changed from checkpoint ``older`` to ``newer`` (empty: to now, when ``commands`` run)."""
        first = self.own(older)
        second = self.own(newer) if newer else None
        if first.files is None or (second is not None and second.files is None):
            raise UserError(f"diff: checkpoint {older if first.files is None else newer} holds no files")
        pool = self.context.pool
        if second is None:
            files = pool.changed(first.files.id, None, box=self.name)
            after = list(commands())
        else:
            assert second.files is not None
            files = pool.changed(first.files.id, second.files.id)
            after = list(second.image.processes) if second.image else []
        before = list(first.image.processes) if first.image else []
        return Diff(tuple(files), tuple(_less(after, before)), tuple(_less(before, after)))

    def look(
        self,
        machine: Machine,
        occasion: Occasion,
        *,
        full: bool = False,
        named: bool = False,
        most: TurnClass = TurnClass.FULL,
        least: TurnClass = TurnClass.NONE,
    ) -> Look:
        """What the policy has to know; what the sandbox did, only where the answer can depend on it."""
        context, tip = self.context, self.tip
        image = tip.image if tip else None
        reads = context.policy in READS_EFFECTS and tip is not None and not full
        return Look(
            occasion=occasion,
            effects=self._effects(machine, tip, occasion) if reads and tip is not None else None,
            references=(
                References(frozenset(image.references), frozenset(image.mapped)) if image else References()
            ),
            has_parent=tip is not None,
            has_files=tip is not None and tip.files is not None,
            has_image=image is not None,
            images_possible=context.criu is not None,
            no_images=context.no_images,
            full=full,
            named=named,
            most=most,
            least=least,
            has_lacks=tip is not None and bool(tip.lacks),
            memory=machine.cgroup.usage()[1],
            processes=len(machine.cgroup.pids()),
            rules=context.rules,
        )

    def _effects(self, machine: Machine, tip: Manifest, occasion: Occasion) -> Effects:
        busy = () if occasion is Occasion.FROZEN else quiesce(machine.shells())
        effects = Effects(doubts=(Doubt(Part.PROCESSES, "no inspector"),))
        if self.context.inspector is not None:
            try:
                effects = self.context.inspector.effects(self.name)
            except FAULTS as error:
                effects = Effects(doubts=(Doubt(Part.PROCESSES, f"the inspector failed: {error}"),))
        doubts = (Doubt(Part.PROCESSES, self.doubt),) if self.doubt else ()
        kept = {state.name: state.fingerprint for state in tip.shells}
        states = {state.name: state for state in machine.shell_states()}
        shells = []
        for name in sorted(kept.keys() | states.keys() | set(busy)):
            state = states.get(name)
            if state is None:
                shells.append(ShellEffect(name, busy=name in busy, gone=name in kept))
            elif kept.get(name) != state.fingerprint:
                shells.append(replace(shell_effect(state), busy=name in busy))
            elif name in busy:
                shells.append(ShellEffect(name, busy=True))
        return replace(effects, shells=tuple(shells), doubts=doubts + effects.doubts)

    def cover(
        self,
        machine: Machine,
        number: int,
        look: Look,
        keep: Keep,
        *,
        request: str = "",
        label: str = "",
        pin: bool = False,
        allow_less: bool = False,
    ) -> Manifest:
        """Take the checkpoint that ``keep`` calls for: from then on it is the newest one."""
        decide = self.log.decide
        order = Order(
            id=new_id(),
            spec=self.spec,
            turn=number,
            keep=keep,
            parent=self.tip,
            again=lambda: decide(self.look(machine, Occasion.FROZEN, most=look.most, least=keep.turn_class)),
            undumped=lambda why: decide(
                replace(look, occasion=Occasion.UNDUMPED, images_possible=False, no_images=why)
            ),
            refused=lambda tries, lacks: decide(
                Less(
                    keep.turn_class,
                    TurnClass.FILES,
                    kinds(lacks),
                    tries,
                    again=True,
                    allow_less=allow_less or self.allows(),
                )
            ),
            request=request,
            label=label,
            pinned=pin,
        )
        self.context.in_use.append(order.id)
        try:
            manifest = take(self.context, machine, order)
        except SandboxError as error:
            self.doubt = f"the last checkpoint failed: {error}"
            raise
        finally:
            self.context.in_use.remove(order.id)
        self.doubt = ""
        self.log.did(made=to_plain(manifest.made), image=manifest.image is not None)
        self.tip, self.lacks = manifest, manifest.lacks
        self.save(tip=manifest.id)
        self.context.report(
            Event(
                "checkpoint", self.name, f"{manifest.id} {manifest.turn_class.word}", manifest.total_seconds
            )
        )
        return manifest

    def save(self, **changes: object) -> None:
        """Change the record, on the disk too."""
        self.record = replace(self.record, **changes)  # type: ignore[arg-type]
        try:
            records.write(self.context.home.box(self.name), self.record)
        except OSError as error:
            raise SandboxError(
                f"the record of sandbox {self.name} could not be written: {error.strerror}"
            ) from error

    def allows(self) -> bool:
        """Whether somebody has allowed less of this turn."""
        return self.spec.allow_less or self.allowed == self.record.turns

    def held(self, manifest: Manifest, *, allow_less: bool) -> None:
        """Raises LessError where the policy says that the checkpoint must not be taken as it is."""
        hold(
            self.log,
            f"checkpoint {manifest.id} of sandbox {self.name}",
            manifest.lacks,
            wanted=manifest.wanted,
            kept=manifest.turn_class,
            allow_less=allow_less or self.allows(),
            manifest=manifest,
        )


def _less(left: list[str], right: list[str]) -> list[str]:
    """What of ``left`` is not in ``right``, each as often as it is more."""
    rest = list(right)
    more = []
    for one in left:
        if one in rest:
            rest.remove(one)
        else:
            more.append(one)
    return more
