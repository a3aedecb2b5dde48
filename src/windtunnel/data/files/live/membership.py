"""Who the hosts are: one object for each epoch, in the store by URL.

An epoch is written once, by whoever is first: of two hosts that both think that they take over, one does. It
is asked only when something changes, and by who is new.
"""

from __future__ import annotations

import json
import re

from windtunnel.base.errors import UserError
from windtunnel.base.plain import canonical, from_plain, to_plain
from windtunnel.data.files.model import ChainMembership
from windtunnel.store.objects import open_files

_NAME = re.compile(r"epoch-\d{8}")  # what is still being written has another


class MembershipStore:
    """The epochs at ``url``: a folder that all hosts reach, or another place that fsspec knows.

    Raises:
        UserError: fsspec knows no such place.
    """

    def __init__(self, url: str) -> None:
        self._files = open_files(url)

    def newest(self) -> ChainMembership | None:
        """The membership of the newest epoch; None before the first.

        Raises:
            UserError: it is damaged.
            OSError: the store cannot be read.
        """
        names = [name for name in self._files.names("") if _NAME.fullmatch(name)]
        if not names:
            return None
        try:
            return from_plain(ChainMembership, json.loads(self._files.read(names[-1])))
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"{self._files.url}/{names[-1]} is no membership: {error}") from error

    def create(self, membership: ChainMembership) -> bool:
        """Write the epoch of ``membership``; False where another host was first. Raises OSError."""
        try:
            self._files.create(f"epoch-{membership.epoch:08d}", canonical(to_plain(membership)))
        except FileExistsError:
            return False
        return True
