"""What placing embedding tables gives, and what finding out about them costs."""

from benchmarks.harness.rows import runner

SECTIONS = {
    "profile": "profile.profile_rows", "flexshard": "flexshard.flexshard_rows",
    "exchange": "exchange.exchange_rows", "tiers": "tiers.tier_rows", "planners": "plans.planner_rows",
    "milp": "plans.milp_rows", "scale": "plans.scale_rows", "forecast": "forecast.forecast_rows",
}  # fmt: skip
run = runner(__name__, SECTIONS)
