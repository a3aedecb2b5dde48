from .live.dataset import IngestDataset as IngestDataset
from .live.dataset import Ragged as Ragged
from .model import IngestSession as IngestSession
from .model import Transform as Transform
from .policy import POLICIES as POLICIES
from .policy import Decision as Decision
from .policy import Observation as Observation
from .policy import decide as decide
