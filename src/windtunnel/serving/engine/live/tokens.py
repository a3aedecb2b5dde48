"""Text to tokens and back: a local directory's own tokenizer, or bytes for models that were built at
random."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers.decoders import DecodeStream

from windtunnel.base.errors import UserError

SPECIAL = 3
"""Of `ByteTokens`: padding, beginning and end come before the bytes."""
Message = Mapping[str, str]


class ByteTokens:
    """Token b + 3 is the byte b; what a larger vocabulary has beyond means bytes again, the first three
    nothing. Of a text that comes by tokens, ``stream`` gives what is certain with each: it is called with a
    token, and whether that is the last."""

    def encode(self, text: str) -> list[int]:
        return [byte + SPECIAL for byte in text.encode("utf-8", "surrogatepass")] or [1]

    def chat(self, messages: Sequence[Message]) -> list[int]:
        return self.encode(_plain(messages))

    def decode(self, tokens: Sequence[int]) -> str:
        return self._bytes(tokens).decode(errors="replace")

    def stream(self) -> Callable[[int, bool], str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda token, last: decoder.decode(self._bytes([token]), last)

    def _bytes(self, tokens: Sequence[int]) -> bytes:
        return bytes((token - SPECIAL) % 256 for token in tokens if token >= SPECIAL)


class LocalTokens:
    """The tokenizer of a directory, by Transformers. Special tokens are no text."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._of: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # its code is the directory's family's, and raises what it likes
            reason = (str(error).splitlines() or [""])[0]
            raise UserError(
                f"{folder}: its tokenizer cannot be read: {type(error).__name__}: {reason}"
            ) from error
        self._backend: Any = getattr(self._of, "backend_tokenizer", None)
        if self._backend is None:
            raise UserError(f"{folder}: its tokenizer is not one of the library tokenizers: not supported")

    def encode(self, text: str) -> list[int]:
        text = text.encode(errors="replace").decode()  # half a surrogate pair is no text
        return list(self._of(text).input_ids) or [self._of.bos_token_id or 0]

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """By the directory's chat template, if it has one.

        Raises:
            UserError: the template does not take these messages.
        """
        if self._of.chat_template is None:
            return self.encode(_plain(messages))
        try:
            prompt = self._of.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        except TemplateError as error:
            raise UserError(f"the model's chat template does not take these messages: {error}") from error
        text = prompt.encode(errors="replace").decode()
        return list(self._of(text, add_special_tokens=False).input_ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._of.decode(tokens, skip_special_tokens=True))

    def stream(self) -> Callable[[int, bool], str]:
        """A token's text depends on those before it; a character in part is held back."""
        decoder = DecodeStream(skip_special_tokens=True)
        return lambda token, last: decoder.step(self._backend, token) or ""


Tokenizer = ByteTokens | LocalTokens


def tokenizer(source: str) -> Tokenizer:
    """Of a model's directory that has one, else bytes."""
    folder = Path(source)
    if any(
        (folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    ):
        return LocalTokens(folder)
    return ByteTokens()


class Text:
    """The text of one unit as it comes; ``stops`` end it and are no part of it."""

    def __init__(self, tokens: Tokenizer, stops: Sequence[str]) -> None:
        self._further, self._stops = tokens.stream(), stops
        self._most = max(map(len, stops), default=1) - 1  # characters that are held back
        self._pending = ""
        self.stopped = False
        self.length = 0
        """Characters until now, those among them that are not sent yet."""

    def add(self, token: int, last: bool = False) -> str:
        """What may be sent with one more token; nothing more after a stop."""
        if self.stopped:
            return ""
        new = self._further(token, last)
        self.length += len(new)
        text = self._pending + new
        ends = [at for at in map(text.find, self._stops) if at >= 0]
        if ends:
            self.stopped, self._pending = True, ""
            return text[: min(ends)]
        sure = max(0, len(text) - self._most)
        self._pending = text[sure:]
        return text[:sure]

    def rest(self) -> str:
        """What was held back when there is nothing to come."""
        pending, self._pending = self._pending, ""
        return pending


def _plain(messages: Sequence[Message]) -> str:
    """``<|role|>``, a new line, the content and a new line for each message; then ``<|assistant|>`` and a new
    line."""
    turns = "".join(f"<|{message['role']}|>\n{message['content']}\n" for message in messages)
    return f"{turns}<|assistant|>\n"
