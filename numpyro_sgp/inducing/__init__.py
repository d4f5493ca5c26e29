"""Inducing variables, and how to choose them."""

from numpyro_sgp.inducing.grid import InducingGrid
from numpyro_sgp.inducing.growing import (
    Candidates,
    GrowingInducing,
    ProbedInducing,
    added,
    growing,
    report_candidates,
)
from numpyro_sgp.inducing.multiscale import MultiscaleInducing
from numpyro_sgp.inducing.points import (
    AbstractInducing,
    AbstractPoints,
    BoundedInducingPoints,
    InducingPoints,
    as_inducing,
    check_new_inputs,
    check_width,
)
from numpyro_sgp.inducing.rows import RowMatch, find_rows
from numpyro_sgp.inducing.selection import (
    Suggestion,
    TraceError,
    greedy_variance,
    kmeans,
    median_lengthscale,
    subset,
    suggest_num_inducing,
    trace_error,
)

__all__ = [
    "AbstractInducing",
    "AbstractPoints",
    "BoundedInducingPoints",
    "Candidates",
    "GrowingInducing",
    "InducingGrid",
    "InducingPoints",
    "MultiscaleInducing",
    "ProbedInducing",
    "RowMatch",
    "Suggestion",
    "TraceError",
    "added",
    "as_inducing",
    "check_new_inputs",
    "check_width",
    "find_rows",
    "greedy_variance",
    "growing",
    "kmeans",
    "median_lengthscale",
    "report_candidates",
    "subset",
    "suggest_num_inducing",
    "trace_error",
]
