from .agents.sandbox import Sandbox as Sandbox
from .api import SweepRun as SweepRun
from .api import emulate as emulate
from .api import load_run as load_run
from .api import runs as runs
from .api import sweep as sweep
from .base.errors import HangError as HangError
from .base.errors import HostError as HostError
from .base.errors import LessError as LessError
from .base.errors import ScriptError as ScriptError
from .base.errors import UserError as UserError
from .base.errors import VerdictError as VerdictError
from .base.errors import WindtunnelError as WindtunnelError
from .cluster.load import load_cluster as load_cluster
from .training import elastic as elastic
from .training.checkpoint import PeerCheckpointer as PeerCheckpointer
from .training.emulate import Options as Options
from .training.emulate import Run as Run
from .training.emulate import Slow as Slow
from .training.emulate import step as step
from .training.pipelines import PipelineTrainer as PipelineTrainer

__version__: str
