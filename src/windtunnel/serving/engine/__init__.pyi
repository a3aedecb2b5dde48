from .emulation import Emulated as Emulated
from .emulation import emulate as emulate
from .live.serve import serve as serve
from .policy import POLICIES as POLICIES
from .policy import Decision as Decision
from .policy import Observation as Observation
from .policy import decide as decide
from .settings import ServeSettings as ServeSettings
