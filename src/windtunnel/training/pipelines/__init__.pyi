from .live.entry import LayersLost as LayersLost
from .live.layers import LayerSpec as LayerSpec
from .live.layers import even_templates as even_templates
from .live.trainer import PipelineTrainer as PipelineTrainer
from .policy import POLICIES as POLICIES
from .policy import Decision as Decision
from .policy import Observation as Observation
from .policy import decide as decide
