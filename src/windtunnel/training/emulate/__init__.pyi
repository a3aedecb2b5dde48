from .options import Options as Options
from .run import Run as Run
from .steps import step as step
from .summary import Summary as Summary
from .twin.job import Slow as Slow
