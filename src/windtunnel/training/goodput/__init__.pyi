from .planning import ResiliencePlan as ResiliencePlan
from .planning import plan as plan
from .request import ResilienceRequest as ResilienceRequest
