from .emulation import Options as Options
from .steps import step as step
from .summary import Summary as Summary
from .twin.job import Slow as Slow
