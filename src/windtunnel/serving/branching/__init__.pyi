from .policy import POLICIES as POLICIES
from .policy import Decision as Decision
from .policy import Observation as Observation
from .policy import decide as decide
