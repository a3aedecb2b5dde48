"""Where a loop stands in a `DataLoader`, in the middle of an epoch, and back to there to the bit.

What a loader gives next depends on more than a number of batches: it draws a seed from the global generator
when an epoch begins, its sampler draws the order from that generator or from one of its own, and a dataset
may draw at each sample. A loop that is one batch ahead (Accelerate's, Hugging Face's) has drawn for that
batch before the step in which the state was saved.

So a `Cursor` stands where the loader has its batch sampler. There it sees the beginning of each epoch and
each batch that is asked for, just before it is fetched, and remembers the generators' states at these
moments. On the way back the epoch begins with the states that it began with; the batches that were seen are
passed over without being fetched; what was fetched ahead is fetched with the states of then; and with the
next one the generators stand as they stood when the state was saved. Until then nothing is drawn that was
not drawn before.

With workers, the samples are drawn in these, from seeds that come back; what a dataset draws by itself in
them, batch after batch, does not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from windtunnel.base.errors import UserError
from windtunnel.training.checkpoint.live import objects

Drawn = bytes  # the states of all generators at one moment
Place = dict[str, Any]  # what `Cursor.place` gives


class Cursor(BatchSampler):
    """Put before the batch sampler of ``loader`` by `place_in`; everything else of that one shows through.

    ``skips``: whether batches that were seen are passed over here. Where the framework does that itself, or
    fetches them from an `IterableDataset` and drops them, they are only counted.
    """

    keeps_place = True  # what reads by it is no loader whose place nobody saves (`live.objects.read_outside`)

    def __init__(self, loader: DataLoader[Any], inside: Any) -> None:
        self.loader = loader
        self.skips = not isinstance(loader.dataset, IterableDataset)
        self._inside = inside
        self._due: Place | None = None
        self._start: Drawn | None = None
        self._drawn_batches = 0  # batches of this epoch, and the end of it if that was asked for
        most = 2 + loader.num_workers * (loader.prefetch_factor or 0)
        self._before: deque[Drawn] = deque(maxlen=most)  # each of the newest times that one was asked for

    def place(self, consumed: int) -> Place:
        """Where the loop stands that has had ``consumed`` batches of this epoch."""
        ahead = max(0, self._drawn_batches - consumed)
        return {
            "seen": consumed,
            "start": self._start,
            "ahead": list(self._before)[-ahead:] if ahead else [],
            "now": drawn(self.loader),
        }

    def go_to(self, place: Place) -> None:
        """Have the next epoch that begins go on at ``place``."""
        self._due = place
        self._start, self._drawn_batches = place["start"], place["seen"]

    def settle(self) -> None:
        """The loop is there: the generators are put, in case nothing has come by here (the loader was not
        iterated, or iterated another one's batches)."""
        place, self._due = self._due, None
        if place is not None:
            draw_again(self.loader, place["now"])

    def __iter__(self) -> Iterator[Any]:
        # Not in the generator, whose first line runs with the first batch: the loader draws its seed next.
        self._before.clear()
        place = self._due
        if place is None or place["start"] is None:
            self._start, self._drawn_batches = drawn(self.loader), 0
        else:
            draw_again(self.loader, place["start"])
        return self._pass(iter(self._inside), place)

    def _pass(self, inside: Iterator[Any], place: Place | None) -> Iterator[Any]:
        owed: dict[int, Drawn] = {}
        number = 0
        if place is not None:
            states = [*place["ahead"], place["now"]]
            owed = dict(enumerate(states, place["seen"]))
            if self.skips:
                number = place["seen"]
                next(islice(inside, number, number), None)
        while True:
            self._pay(owed, number)
            self._before.append(drawn(self.loader))
            number += 1
            self._drawn_batches = max(self._drawn_batches, number)
            try:
                batch = next(inside)
            except StopIteration:
                self._pay(owed, number)
                return
            yield batch

    def _pay(self, owed: dict[int, Drawn], number: int) -> None:
        if number in owed:
            draw_again(self.loader, owed.pop(number))
            if not owed:
                self._due = None

    def __len__(self) -> int:
        return len(self._inside)

    def __getattr__(self, name: str) -> Any:
        if name == "_inside":
            raise AttributeError(name)
        return getattr(self._inside, name)


def drawn(loader: Any) -> Drawn:
    """The states of the global generators, and of those that ``loader`` (or None) and its samplers have."""
    own = [objects.saved_of(generator) for generator in _generators(loader)]
    states, names = objects.generators() | {"own": own}, []
    bare = objects.skeleton(states, "", lambda name, tensor: names.append((name, objects.bytes_of(tensor))))
    return objects.pack({"states": bare, "tensors": dict(names)})


def draw_again(loader: Any, states: Drawn) -> None:
    """The inverse of `drawn`."""
    plain = objects.unpack(states)
    drawn_states = objects.flesh(plain["states"], lambda name: objects.tensor_of(plain["tensors"][name]))
    for generator, state in zip(
        _generators(loader), drawn_states.pop("own"), strict=False
    ):  # some are made late
        objects.put_saved({}, "", generator, state)
    objects.put_generators(drawn_states, None)


def _generators(loader: Any) -> list[Any]:
    """Generators that are the loader's or its samplers' own, each once, in an order that stays."""
    own = getattr(loader, "generator", None)
    by_id: dict[int, Any] = {} if own is None else {id(own): own}
    owners: list[Any] = [loader]
    for owner in owners:  # which grow
        values = vars(owner) if owner is not loader else {}
        by_id |= {id(value): value for _, value in sorted(values.items()) if objects.is_generator(value)}
        inner = [getattr(owner, name, None) for name in ("batch_sampler", "sampler", "_inside")]
        owners += [
            value
            for value in inner
            if hasattr(value, "__dict__") and not any(value is other for other in owners)
        ]
    return list(by_id.values())


def place_in(loader: Any) -> Cursor | None:
    """The cursor of ``loader`` (a `DataLoader`, or Accelerate's wrapping of one), put there when first asked
    for; None where there is no such loader."""
    loader = getattr(loader, "base_dataloader", loader)
    if not isinstance(loader, DataLoader):
        return None
    name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
    inside = vars(loader)[name]
    if isinstance(inside, Cursor):
        return inside
    # DataLoader refuses that these are set; an iterator reads them when it is made.
    vars(loader)[name] = cursor = Cursor(loader, inside)
    return cursor


def require_world(saved: int, job: Any) -> None:
    """Refuse a state whose place in the data is of other parts: each rank has its own of every epoch.

    Raises:
        UserError: the job has another number of ranks than when the state was saved.
    """
    if saved != job.world:
        raise UserError(
            f"checkpoint: it is of {saved} ranks, the job has {job.world} now; the data of an epoch that was "
            "begun cannot be dealt out anew: --on-loss replace keeps their number"
        )
