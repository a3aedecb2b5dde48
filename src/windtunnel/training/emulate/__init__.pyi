from .options import Options as Options
from .program import step as step
from .run import Run as Run
from .summary import Summary as Summary
from .twin.job import Slow as Slow
