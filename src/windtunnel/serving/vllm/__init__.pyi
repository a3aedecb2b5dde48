from .refusals import Refusals as Refusals
from .scheduler import Scheduler as Scheduler
from .settings import VllmSettings as VllmSettings
