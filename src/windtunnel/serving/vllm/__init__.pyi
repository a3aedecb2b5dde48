from .scheduler import Scheduler as Scheduler
from .settings import Settings as Settings
