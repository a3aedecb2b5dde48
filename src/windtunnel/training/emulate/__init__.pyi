from .emulation import Options as Options
from .summary import Summary as Summary
from .twin.job import Slow as Slow
