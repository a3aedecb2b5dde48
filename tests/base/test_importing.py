"""Imports without the collector leave it as it was."""

import gc

import pytest

from windtunnel.base.importing import uncollected


@pytest.mark.parametrize("on", [True, False])
def test_the_collector_is_as_before_and_passes_over_what_was_made(on: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if on else gc.disable)()
        with uncollected():
            assert not gc.isenabled()
            container = [[]]
        assert gc.isenabled() == on
        assert not any(tracked is container for tracked in gc.get_objects())
    finally:
        gc.unfreeze()
        (gc.enable if before else gc.disable)()


def test_what_fails_to_import_leaves_it_as_before() -> None:
    try:
        with pytest.raises(ImportError), uncollected():
            raise ImportError
        assert gc.isenabled()
    finally:
        gc.unfreeze()
