from .planning import Plan as Plan
from .planning import PlanRequest as PlanRequest
from .planning import plan as plan
