from .planning import Plan as Plan
from .planning import plan as plan
from .request import PlanRequest as PlanRequest
