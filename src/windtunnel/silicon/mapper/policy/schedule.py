"""A mapping in Halide's words (Interstellar, section 4): split is blocking, reorder the order of loops,
unroll what the array computes at once, compute_at where a memory holds a tile."""

from collections.abc import Iterator

from windtunnel.base.units import size
from windtunnel.silicon.mapper.model import DIMS, LETTERS, OPERANDS, Accelerator, Layer, Mapping
from windtunnel.silicon.mapper.policy.counts import tile_words


def lines(layer: Layer, accelerator: Accelerator, mapping: Mapping) -> Iterator[str]:
    """The schedule, line by line. A loop is called by its letter and level, such as k1; one without a number
    is that over the PEs."""
    inner = [dict(level) for level in mapping.loops]
    for dim in range(len(DIMS)):
        bounds = [(f"{LETTERS[dim].lower()}{n}", loop_[dim]) for n, loop_ in enumerate(inner) if dim in loop_]
        if mapping.unroll[dim] > 1:
            at = sum(int(name[-1]) < accelerator.inner for name, _ in bounds)
            bounds.insert(at, (LETTERS[dim].lower(), mapping.unroll[dim]))
        if len(bounds) > 1:
            yield f"O.split({', '.join(f'{name}:{bound}' for name, bound in reversed(bounds))})"
    order = [_loops(level, number) for number, level in enumerate(mapping.loops)]
    yield f"O.reorder({', '.join(loop_ for level in order for loop_ in level)})"
    spread = [LETTERS[dim].lower() for dim in range(len(DIMS)) if mapping.unroll[dim] > 1]
    yield "O" + "".join(f".unroll({loop_})" for loop_ in spread) + f"  # {mapping.dataflow} on the array"
    extents = [1] * len(DIMS)
    for number, level in enumerate(accelerator.levels[:-1]):
        for dim, bound in mapping.loops[number]:
            extents[dim] *= bound
        along = [1] * len(DIMS) if level.per_pe else mapping.unroll
        tile = [a * b for a, b in zip(extents, along, strict=True)]
        loop = next((loop_ for above in order[number + 1 :] for loop_ in above), "root")
        for operand in OPERANDS:
            if operand in level.holds:
                nbytes = size(tile_words(operand, tile, layer.stride) * accelerator.word)
                where = f"store_in({level.name})  # {nbytes}{' a PE' * level.per_pe}"
                yield f"{operand}.compute_at(O, {loop}).{where}"


def _loops(level: tuple[tuple[int, int], ...], number: int) -> list[str]:
    return [f"{LETTERS[dim].lower()}{number}" for dim, _ in level]
