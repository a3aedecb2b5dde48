from .model import Accelerator as Accelerator
from .model import Layer as Layer
from .policy import POLICIES as POLICIES
from .policy import Decision as Decision
from .policy import Observation as Observation
from .policy import decide as decide
from .spec import read_accelerator as read_accelerator
from .spec import read_layers as read_layers
