from . import checkpoint as checkpoint
from . import elastic as elastic
from . import emulate as emulate
from . import goodput as goodput
from . import gradsync as gradsync
from . import pipelines as pipelines
