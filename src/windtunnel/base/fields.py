"""Files of fields that users write, held against a Pydantic model: what is wrong first becomes a sentence.

`fitted` is what a reader of such a file ends with. It names field, value, and what is accepted, which a table
says by the field's name, ``name.*`` for what is in a mapping::

    class Spec(BaseModel, extra="forbid"):
        line: Rate

    spec = fitted(Spec, read_mapping(path, "file of shares"), str(path), {"line": "a rate, such as 10 Gb/s"})
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from itertools import takewhile
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from windtunnel.base.errors import UserError

LONGEST = 100
"""Characters of a value that a sentence repeats."""
Model = TypeVar("Model", bound=BaseModel)


def fitted(model: type[Model], document: Any, where: str, accepted: Mapping[str, str]) -> Model:
    """``document`` as a ``model``; ``where``: the file that errors name; ``accepted``: what is, by a
    field's name.

    Raises:
        UserError: the first thing in it that is wrong.
    """
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise UserError(f"{where}: {_sentence(error, model, accepted)}") from None


def _sentence(error: ValidationError, model: type[BaseModel], accepted: Mapping[str, str]) -> str:
    first = error.errors()[0]
    loc = tuple(str(part) for part in first["loc"])
    if loc[-1] == "[key]":
        return f"{'.'.join(loc[:-1])} is no name, accepted are {accepted.get('[key]', 'names')}"
    holder, path, names = _followed(model, loc)
    field = ".".join(path)
    words = next((accepted[name] for name in reversed(names) if name in accepted), "")
    if first["type"] == "missing":
        return f"field {field} is missing, accepted is {words}"
    if first["type"] == "extra_forbidden":
        field_names = [field.alias or name for name, field in holder.model_fields.items()]
        return f"field {field} is unknown{suggest(loc[-1], field_names)}"
    text = repr(first["input"])
    text = text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
    words = (
        first["ctx"]["error"] if first["type"] == "value_error" else f"accepted is {words or first['msg']}"
    )
    return f"field {field} is {text}, {words}"


def _followed(model: type[BaseModel], loc: tuple[str, ...]) -> tuple[type[BaseModel], list[str], list[str]]:
    """Along a place that Pydantic names: the model that has its last field, the place without what is only
    Pydantic's (branches of unions), and those parts of it that are fields."""
    holder, at, path, names = model, _holder(model), list[str](), list[str]()
    for part in loc:
        if at is None:
            break
        path.append(part)
        if get_origin(at) is dict:
            at = _holder(get_args(at)[1])
            names.append(f"{names[-1]}.*")
            continue
        holder = at
        names.append(part)
        match = next((field for name, field in at.model_fields.items() if part in (name, field.alias)), None)
        at = _holder(match.annotation) if match else None
    return holder, path, names


def _holder(kind: Any) -> Any:
    """The model or the mapping that a type is, or None; None too where it may be several things, whose names
    Pydantic then has among the fields."""
    if get_origin(kind) in (Annotated, Union, UnionType):
        kinds = [argument for argument in get_args(kind) if argument is not NoneType]
        return _holder(kinds[0]) if len(kinds) == 1 or get_origin(kind) is Annotated else None
    is_model = isinstance(kind, type) and issubclass(kind, BaseModel)
    return kind if is_model or get_origin(kind) is dict else None


def suggest(word: str, accepted: Iterable[str]) -> str:
    """``, did you mean X? Accepted are ...`` for a name that is not among ``accepted``."""
    names = list(accepted)

    def likeness(name: str) -> float:
        if name.startswith(word):
            return len(word) + 1
        alike = difflib.SequenceMatcher(None, word, name).ratio()
        # What begins alike is meant more often than what is only spelled alike: h1000 is h100-sxm, not v100.
        start = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(word, name, strict=False)))
        return alike + start if alike >= 0.5 else 0

    near = max(names, key=likeness) if word else ""
    hint = f", did you mean {near}?" if near and likeness(near) else ","
    return f"{hint} accepted are {', '.join(names)}"
