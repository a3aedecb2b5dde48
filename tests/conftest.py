"""For all tests: nothing is timed, so examples that hypothesis makes have no deadline either."""

from hypothesis import settings

settings.register_profile("untimed", settings.default, deadline=None)
settings.load_profile("untimed")
