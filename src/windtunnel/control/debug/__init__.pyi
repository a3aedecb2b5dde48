from .live.capture import request as request
from .live.recorder import Recorder as Recorder
from .policy import POLICIES as POLICIES
from .policy import Decision as Decision
from .policy import Observation as Observation
from .policy import decide as decide
