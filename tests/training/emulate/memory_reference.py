"""A second caching allocator, as plain as possible, to hold the compiled one against.

No linked blocks, no merging, no free lists: a range of addresses knows which intervals are busy and which
pages are backed, and all else (what is free, what fits best) is worked out anew from these at each request.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from windtunnel.training.emulate.twin.memory.config import AllocatorConfig

MIB = 1 << 20
ENDLESS = 1 << 45


@dataclass
class Range:
    """A segment, or the growing range of a (stream, pool): busy intervals by start, and backed intervals."""

    base: int
    page: int
    busy: dict[int, int] = field(default_factory=dict)
    pages: set[int] = field(default_factory=set)  # numbers of backed pages
    idle_since: int = 0

    def free_runs(self) -> list[tuple[int, int]]:
        """(start, size) of each maximal free and backed interval, ascending."""
        runs: list[tuple[int, int]] = []
        position = -1
        edges = sorted(self.pages)
        for page in edges:
            low, high = page * self.page, (page + 1) * self.page
            cuts = [
                (max(s, low), min(s + n, high))
                for s, n in sorted(self.busy.items())
                if s < high and s + n > low
            ]
            at = low
            for start, end in [*cuts, (high, high)]:
                if start > at:
                    if runs and position == at and sum(runs[-1]) == at:
                        runs[-1] = (runs[-1][0], runs[-1][1] + start - at)
                    else:
                        runs.append((at, start - at))
                    position = start
                at = max(at, end)
        return runs

    def unbacked_run(self, start: int) -> int:
        """Bytes of unbacked pages from ``start`` on."""
        first = start // self.page
        later = [page for page in self.pages if page >= first]
        return (min(later) - first) * self.page if later else ENDLESS


class Reference:
    def __init__(self, config: AllocatorConfig, capacity: int) -> None:
        self.config, self.limit = config, capacity
        limited = config.per_process_memory_fraction < 1
        self.collect_above = int(config.garbage_collection_threshold * capacity) if limited else 0
        self.ranges: dict[tuple[int, bool], list[Range]] = {}
        self.reserved = self.allocated = self.next_base = 0
        self.live: dict[int, tuple[Range, int, int]] = {}  # name -> (range, start, size)
        self.pending: list[tuple[int, set[int]]] = []  # name, streams that still use it
        self.lookups = {False: 0, True: 0}
        self.refused = False

    def rounded(self, size: int) -> int:
        parts = self.config.roundup_power2_divisions[min(max(size.bit_length() - 21, 0), 15)]
        if parts > 1 and size > 512 * parts:
            power = 1 << (size.bit_length() - 1)
            steps = [power + power * step // parts for step in range(parts + 1)]
            return min(step for step in steps if step >= size)
        return max(-(-size // 512), 1) * 512

    def alloc(self, name: int, stream: int, request: int) -> None:
        size = self.rounded(request)
        large = size > MIB
        ranges = self.ranges.setdefault((stream, large), [])
        self.lookups[large] += 1
        place = self.best_fit(ranges, size)
        if place is None:
            self.collect()
            place = self.grow(ranges, large, size)
        if place is None and self.give_back_oversize(ranges, size):
            place = self.grow(ranges, large, size)
        if place is None:
            for pending, _ in self.pending:
                self.drop(pending)
            self.pending = []
            self.give_back_all()
            place = self.grow(ranges, large, size)
        if place is None:
            self.refused, self.limit = True, 1 << 62
            place = self.grow(ranges, large, size)
            assert place is not None
        where, start, room = place
        if self.config.expandable_segments or not large:
            split = room - size >= 512
        else:
            split = room - size > MIB and size < self.config.max_split_size
        taken = size if split else room
        where.busy[start] = taken
        self.live[name] = (where, start, taken)
        self.allocated += taken

    def best_fit(self, ranges: list[Range], size: int) -> tuple[Range, int, int] | None:
        runs = [(n, where.base + s, s, where) for where in ranges for s, n in where.free_runs() if n >= size]
        runs.sort(key=lambda run: run[:2])
        if not runs:
            return None
        if self.config.expandable_segments:
            reach = [
                n + (where.unbacked_run(s + n) if (s + n) % where.page == 0 else 0) for n, _, s, where in runs
            ]
            at = 0
            while at + 1 < len(runs) and reach[at + 1] < reach[at]:
                at += 1
            runs = runs[at:]
        n, _, start, where = runs[0]
        if size < self.config.max_split_size <= n:
            return None
        if size >= self.config.max_split_size and n >= size + self.config.max_non_split_rounding:
            return None
        return where, start, n

    def grow(self, ranges: list[Range], large: bool, size: int) -> tuple[Range, int, int] | None:
        page = self.config.large_segment_size if large else 2 * MIB
        if not self.config.expandable_segments:
            segment = page if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            if self.reserved + segment > self.limit:
                return None
            self.reserved += segment
            ranges.append(Range(self.next_base, segment, pages={0}))
            self.next_base += segment
            return ranges[-1], 0, segment
        if not ranges:
            ranges.append(Range(0, page))
        where = ranges[0]
        start = self.lowest_place(where, size)
        while True:
            backed = dict(where.free_runs()).get(start, 0)
            if backed >= size:
                return where, start, backed
            step = min(size - backed, where.unbacked_run(start + backed))
            pages = -(-step // page)
            if self.reserved + pages * page > self.limit:
                return None
            self.reserved += pages * page
            where.pages |= {(start + backed) // page + index for index in range(pages)}

    def lowest_place(self, where: Range, size: int) -> int:
        """The lowest start of free or unbacked room of ``size`` bytes that contains an unbacked page."""
        ends = {s + n: s for s, n in where.free_runs()}
        for page in range(max(where.pages, default=0) + 2):
            if page in where.pages or (page and page - 1 not in where.pages):
                continue  # not the beginning of an unbacked run
            address = page * where.page
            begin = ends.get(address, address)
            if min((s for s in where.busy if s >= address), default=ENDLESS) - begin >= size:
                return begin
        raise AssertionError("the range has no end")

    def give_back_all(self) -> None:
        for ranges in self.ranges.values():
            for where in list(ranges):
                if not self.config.expandable_segments:
                    if not where.busy:
                        ranges.remove(where)
                        self.reserved -= where.page
                    continue
                for page in list(where.pages):
                    low, high = page * where.page, (page + 1) * where.page
                    if all(s >= high or s + n <= low for s, n in where.busy.items()):
                        where.pages.remove(page)
                        self.reserved -= where.page

    def give_back_oversize(self, ranges: list[Range], size: int) -> bool:
        limit = self.config.max_split_size
        if limit == 1 << 62 or self.config.expandable_segments:
            return False
        need = max(size, limit)
        idle = sorted((r.page, r.base, r) for r in ranges if not r.busy and r.page >= limit)
        enough = [entry for entry in idle if entry[0] >= need]
        chosen, total = enough[:1], sum(entry[0] for entry in enough[:1])
        while not enough and total < need and idle:
            chosen.append(idle.pop())
            total += chosen[-1][0]
        for page, _, where in chosen:
            ranges.remove(where)
            self.reserved -= page
        return total >= need

    def collect(self) -> None:
        if not self.collect_above or self.config.expandable_segments:
            return
        excess = self.reserved - self.collect_above
        while excess > 0:
            large = [ranges for (_, is_large), ranges in self.ranges.items() if is_large]
            idle = [(self.lookups[True] - r.idle_since, own, r) for own in large for r in own if not r.busy]
            if not idle:
                return
            average = sum(age for age, _, _ in idle) / len(idle)
            for age, ranges, where in idle:
                if age >= average:
                    ranges.remove(where)
                    self.reserved -= where.page
                    excess -= where.page

    def free(self, name: int, streams: set[int]) -> None:
        self.allocated -= self.live[name][2]
        if streams:
            self.pending.append((name, set(streams)))
        else:
            self.drop(name)

    def drop(self, name: int) -> None:
        where, start, _ = self.live.pop(name)
        del where.busy[start]
        where.idle_since = self.lookups[where.page > 2 * MIB]

    def passed(self, stream: int | None, names: set[int]) -> None:
        """The device has got past the uses on ``stream`` (None: all) of the pending blocks ``names``."""
        left = []
        for name, streams in self.pending:
            if name in names:
                streams -= {stream} if stream is not None else set(streams)
            if streams:
                left.append((name, streams))
            else:
                self.drop(name)
        self.pending = left
