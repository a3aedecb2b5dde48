"""The walk over a training state: every tensor by name, everything else by name, and the way back.

Modules are walked through their state dictionaries (which FSDP2, tensor parallelism and DDP keep up to date),
optimizers through ``optimizer.state`` by the names of the parameters in the modules; anything else with
``state_dict`` and ``load_state_dict`` through these. Names are those of the bare module (no ``module.`` of
DDP, no ``_orig_mod.`` of torch.compile), so that a state goes back into another wrapping. A DTensor counts
with its local piece and where that lies in the whole.

The way back has two phases: `wants` says what the state needs and refuses what does not fit, before anything
is changed; `put` writes. Optimizer state that does not exist yet is made from what was saved: the optimizer
takes no step, so nothing is disturbed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from windtunnel.base.errors import UserError
from windtunnel.training.checkpoint.live import objects as plain
from windtunnel.training.checkpoint.live.layout import TensorEntry, Want

RNG = "_rng"
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")

State = dict[str, Any]


def walk(state: State, rng: bool = True) -> tuple[list[tuple[str, torch.Tensor]], dict[str, Any]]:
    """All tensors of ``state`` (the live ones, DTensors among them) and all else, by name, in an order that
    only depends on the state's structure.

    Raises:
        UserError: something in it cannot be saved; it is named.
    """
    tensors: list[tuple[str, torch.Tensor]] = []
    others: dict[str, Any] = {}
    names: set[str] = set()

    def visit_tensor(name: str, tensor: torch.Tensor) -> None:
        _accept(name, tensor)
        if name in names:
            raise UserError(f"state {name}: two tensors have this name (keys such as 1 and '1', or 'a/b')")
        names.add(name)
        tensors.append((name, tensor))

    owners = _owners(state)
    for item, value in state.items():
        if isinstance(value, nn.Module):
            for name, _key, inner in _module(item, value):
                if isinstance(inner, torch.Tensor):
                    visit_tensor(name, inner)
                else:
                    others[name] = plain.skeleton(inner, name, visit_tensor)
        elif isinstance(value, torch.optim.Optimizer):
            for label, parameter in _labels(value, owners):
                if parameter in value.state:
                    name = f"{item}/state/{label}"
                    others[name] = plain.skeleton(value.state[parameter], name, visit_tensor)
            others[f"{item}/groups"] = plain.skeleton(_groups(value, owners), f"{item}/groups", visit_tensor)
        else:
            others[item] = plain.skeleton(plain.saved_of(value), item, visit_tensor)
    if rng:
        if RNG in state:
            raise UserError(f"state: the name {RNG} is taken by the generators' states; choose another")
        others[RNG] = plain.skeleton(plain.generators(), RNG, visit_tensor)
    return tensors, others


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What of ``tensor`` lies on this rank."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def entry(name: str, tensor: torch.Tensor, offset: int) -> TensorEntry:
    """What the layout says of ``tensor`` at ``offset``."""
    here = local(tensor)
    nbytes = here.numel() * here.element_size()
    dtype = str(here.dtype).removeprefix("torch.")
    whole, start = _box(tensor)
    return TensorEntry(name, dtype, tuple(here.shape), offset, nbytes, whole, start)


def wants(state: State, saved: dict[str, TensorEntry], names: set[str], rng: bool = True) -> list[Want]:
    """What ``state`` needs of the saved tensors. ``saved``: one entry of each name, ``names``: of the saved
    objects.

    Raises:
        UserError: ``state`` and what was saved do not fit; the first difference is named.
    """
    out: list[Want] = []
    owners = _owners(state)
    for item, value in state.items():
        before = len(out)
        if isinstance(value, nn.Module):
            for name, _key, inner in _module(item, value):
                if isinstance(inner, torch.Tensor):
                    out.append(_want(name, inner, saved))
                elif name not in names:
                    raise UserError(f"checkpoint: {name} is not in it, but the state has it")
        elif isinstance(value, torch.optim.Optimizer):
            if f"{item}/groups" not in names:
                raise UserError(f"checkpoint: {item} is not in it (as an optimizer), but the state has it")
            for label, parameter in _labels(value, owners):
                for name in _under(saved, f"{item}/state/{label}"):
                    whole = saved[name].whole == tuple(parameter.shape)  # so it is cut as the parameter is
                    out.append(_want(name, parameter, saved, dtype=False) if whole else Want(name))
            out += [Want(name) for name in _under(saved, f"{item}/groups")]
        elif isinstance(value, torch.Tensor):
            out.append(_want(item, value, saved))
        else:
            if item not in names:
                raise UserError(f"checkpoint: {item} is not in it, but the state has it")
            out += [Want(name) for name in _under(saved, item)]
        want_names = {want.name for want in out[before:]}
        surplus = [name for name in _under(saved, item) if name not in want_names]
        if surplus and not isinstance(value, torch.optim.Optimizer):
            raise UserError(f"checkpoint: {surplus[0]} is in it, but {item} has no such tensor")
    if rng:
        out += [Want(name) for name in _under(saved, RNG)]
    return out


def needed_objects(state: State, names: list[str]) -> list[str]:
    """Those of ``names`` that belong to this rank's modules and parameters, whichever rank saved them."""
    owners = _owners(state)
    needed: set[str] = set()
    for item, value in state.items():
        if isinstance(value, nn.Module):
            inside = _module(item, value)
            needed.update(name for name, _key, inner in inside if not isinstance(inner, torch.Tensor))
        elif isinstance(value, torch.optim.Optimizer):
            needed.update(f"{item}/state/{label}" for label, _ in _labels(value, owners))
    return [name for name in names if name in needed]


def put(
    state: State,
    tensor: Callable[[str], torch.Tensor],
    whole: Callable[[str], tuple[int, ...]],
    others: dict[str, Any],
    *,
    rng: bool = True,
    reseed: int | None = None,
) -> None:
    """Write what was loaded into ``state``.

    ``tensor(name)``: the piece that `wants` asked for, on the CPU; ``whole(name)``: the shape of the whole.
    ``others``: objects by name. ``reseed``: the state that was saved is another rank's: the global generators
    are seeded anew from this number. Plain values in ``state`` are replaced in it (dictionaries and lists
    also in place).
    """
    owners = _owners(state)
    with torch.no_grad():
        for item, value in list(state.items()):
            if isinstance(value, nn.Module):
                _put_module(item, value, tensor, others)
            elif isinstance(value, torch.optim.Optimizer):
                _put_optimizer(item, value, owners, tensor, whole, others)
            elif isinstance(value, torch.Tensor):
                local(value).copy_(tensor(item))
            else:
                plain.put_saved(state, item, value, plain.flesh(others[item], lambda n: tensor(n).clone()))
        if rng and RNG in others:
            plain.put_generators(plain.flesh(others[RNG], lambda n: tensor(n).clone()), reseed)


def _module(item: str, module: nn.Module) -> Iterator[tuple[str, str, Any]]:
    for inner in module.modules():
        if type(inner).__name__ == "FullyShardedDataParallel":
            raise UserError(
                f"state {item}: FullyShardedDataParallel (FSDP1) is not accepted; "
                "torch.distributed.fsdp.fully_shard is"
            )
    for key, value in module.state_dict(keep_vars=True).items():
        yield f"{item}/{_bare(key, module)}", key, value


def _bare(key: str, module: nn.Module) -> str:
    for wrapper in _WRAPPERS:
        key = key.replace(wrapper, "")
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        key = key.removeprefix("module.")
    return key


def _put_module(
    item: str, module: nn.Module, tensor: Callable[[str], torch.Tensor], others: dict[str, Any]
) -> None:
    live = {id(t) for t in [*module.parameters(), *module.buffers()]}
    rest: dict[str, Any] = {}
    for name, key, value in _module(item, module):
        if not isinstance(value, torch.Tensor):
            rest[key] = plain.flesh(others[name], lambda n: tensor(n).clone())
        elif id(value) in live:
            local(value).copy_(tensor(name))
        else:  # a hook made this tensor for the state dictionary: only the module can take it back
            here = tensor(name).clone()
            rest[key] = _like(value, here) if isinstance(value, DTensor) else here
    if rest:
        module.load_state_dict(rest, strict=False)


def _owners(state: State) -> dict[int, str]:
    """Names of the modules' parameters by identity; of tied ones, the first."""
    owners: dict[int, str] = {}
    for item, value in state.items():
        if isinstance(value, nn.Module):
            for name, _key, inner in _module(item, value):
                owners.setdefault(id(inner), name)
    return owners


def _labels(optimizer: torch.optim.Optimizer, owners: dict[int, str]) -> Iterator[tuple[str, torch.Tensor]]:
    for number, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            yield owners.get(id(parameter), f"group{number}/{i}"), parameter


def _groups(optimizer: torch.optim.Optimizer, owners: dict[int, str]) -> list[dict[str, Any]]:
    labels = {id(parameter): label for label, parameter in _labels(optimizer, owners)}
    return [
        {
            key: [labels[id(p)] for p in value] if key == "params" else value
            for key, value in group.items()
            if key != "param_names"
        }
        for group in optimizer.param_groups
    ]


def _put_optimizer(
    item: str,
    optimizer: torch.optim.Optimizer,
    owners: dict[int, str],
    tensor: Callable[[str], torch.Tensor],
    whole: Callable[[str], tuple[int, ...]],
    others: dict[str, Any],
) -> None:
    saved = others[f"{item}/groups"]
    if len(saved) != len(optimizer.param_groups):
        raise UserError(
            f"checkpoint: {item} has {len(saved)} parameter groups in it; the state has "
            f"{len(optimizer.param_groups)}"
        )
    for group, of_group in zip(optimizer.param_groups, saved, strict=True):
        for key, value in plain.flesh(of_group, lambda n: tensor(n).clone()).items():
            if key == "params":
                continue
            if isinstance(group.get(key), torch.Tensor) and isinstance(value, torch.Tensor):
                group[key].copy_(value)
            else:
                group[key] = value
    for label, parameter in _labels(optimizer, owners):
        inner = others.get(f"{item}/state/{label}")
        if inner is None:
            optimizer.state.pop(parameter, None)
            continue
        present = optimizer.state[parameter]
        for key in [key for key in present if key not in inner]:
            del present[key]
        for key, value in inner.items():
            old = present.get(key)
            if isinstance(value, plain.Ref):
                new = tensor(value.name)
                if isinstance(old, torch.Tensor) and (local(old).shape, old.dtype) == (new.shape, new.dtype):
                    local(old).copy_(new)
                    continue
            present[key] = plain.flesh(value, partial(_state_of, parameter, tensor, whole))


def _state_of(
    parameter: torch.Tensor,
    tensor: Callable[[str], torch.Tensor],
    whole: Callable[[str], tuple[int, ...]],
    name: str,
) -> torch.Tensor:
    """A tensor of the optimizer for ``parameter``: where and cut as the parameter is, if it is of its shape.

    Others (step counters) stay on the CPU, where optimizers keep them unless told to capture graphs.
    """
    value = tensor(name)
    if whole(name) != tuple(parameter.shape):
        return value.clone()
    if isinstance(parameter, DTensor):
        return _like(parameter, value.to(parameter._local_tensor.device, copy=True))
    new = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
    return new.copy_(value)


def _accept(name: str, tensor: torch.Tensor) -> None:
    if isinstance(tensor, DTensor):
        if any(isinstance(p, Partial) for p in tensor.placements):
            raise UserError(
                f"state {name}: a DTensor with partial sums is not accepted; Shard and Replicate are"
            )
        tensor = tensor._local_tensor
    if tensor.is_quantized:
        raise UserError(f"state {name}: a quantised tensor is not accepted; save its integers and scales")
    if tensor.layout != torch.strided:
        raise UserError(f"state {name}: a tensor of layout {tensor.layout} is not accepted; a dense one is")
    if tensor.is_meta:
        raise UserError(f"state {name}: a tensor on device meta has no data; one with data is accepted")
    if tensor.is_nested:
        raise UserError(f"state {name}: a nested tensor is not accepted; save its values and offsets")


def _box(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of the whole tensor, and where the local piece begins in it."""
    if not isinstance(tensor, DTensor):
        return tuple(tensor.shape), (0,) * tensor.dim()
    shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    here = tuple(tensor._local_tensor.shape)
    if tuple(shape) != here and tensor._local_tensor.numel():
        raise UserError(
            f"state: a DTensor of shape {tuple(tensor.shape)} cut as {tensor.placements} holds a piece of "
            f"shape {here} where {tuple(shape)} is expected"
        )
    return tuple(tensor.shape), tuple(int(s) for s in start) or (0,) * tensor.dim()


def _want(name: str, tensor: torch.Tensor, saved: dict[str, TensorEntry], dtype: bool = True) -> Want:
    if name not in saved:
        raise UserError(f"checkpoint: {name} is not in it, but the state has it")
    whole, start = _box(tensor)
    kind = str(tensor.dtype).removeprefix("torch.") if dtype else saved[name].dtype
    if saved[name].whole != whole:
        raise UserError(f"checkpoint: {name} has shape {saved[name].whole} in it; the state has {whole}")
    if saved[name].dtype != kind:
        raise UserError(f"checkpoint: {name} is {saved[name].dtype} in it; the state has {kind}")
    return Want(name, kind, whole, start, tuple(local(tensor).shape))


def _under(saved: dict[str, TensorEntry], path: str) -> list[str]:
    return [name for name in saved if name == path or name.startswith(path + "/")]


def _like(whole: DTensor, here: torch.Tensor) -> DTensor:
    """The tensor that is cut as ``whole`` is, and of which ``here`` lies on this rank."""
    return DTensor.from_local(
        here,
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
