"""What a model's directory says of how it is to be asked: ``generation_config.json``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from windtunnel.base.errors import UserError
from windtunnel.base.fields import fitted

FILE = "generation_config.json"
_ACCEPTED = {
    "eos_token_id": "a token or a list of tokens", "do_sample": "true or false",
    "temperature": "0 or more", "top_p": "above 0 and at most 1", "top_k": "0 or more",
}  # fmt: skip


class Defaults(BaseModel):
    """Tokens that end an answer, and how a token is drawn where a request says nothing; as in vLLM, only what
    the file says, and nothing of how it is drawn where the file has it sampled by nobody (``do_sample``)."""

    model_config = ConfigDict(extra="ignore", strict=True)

    eos_token_id: int | list[int] | None = None
    do_sample: bool | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    repetition_penalty: float | None = None

    @property
    def stop(self) -> list[int]:
        ends = self.eos_token_id
        return [] if ends is None else ends if isinstance(ends, list) else [ends]

    @property
    def sampling(self) -> tuple[float, float, int]:
        """Temperature, top_p and top_k; OpenAI's where nothing is said."""
        said = (self.temperature, self.top_p, self.top_k) if self.do_sample else (None, None, None)
        return tuple(usual if one is None else one for one, usual in zip(said, (1.0, 1.0, 0), strict=True))  # type: ignore[return-value]


def defaults(source: str) -> Defaults:
    """Of a model's directory; nothing is said where it has no such file, or is none.

    Raises:
        UserError: the file cannot be used.
    """
    path = Path(source) / FILE
    if not path.is_file():
        return Defaults()
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    found = fitted(Defaults, content, str(path), _ACCEPTED)
    if found.repetition_penalty not in (None, 1.0):
        what = f"repetition_penalty {found.repetition_penalty:g} is not applied"
        print(f"windtunnel serve: {path}: {what}: penalties are not served", file=sys.stderr)
    return found
