from .planning import plan as plan
from .policy import POLICIES as POLICIES
from .policy import Decision as Decision
from .policy import Observation as Observation
from .policy import decide as decide
from .spec import read as read
from .twin import emulate as emulate
