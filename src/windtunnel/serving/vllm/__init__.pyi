from .refusals import Refusals as Refusals
from .scheduler import Scheduler as Scheduler
from .settings import Settings as Settings
