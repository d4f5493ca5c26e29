"""Inducing variables: what a sparse posterior conditions on, and where to put them."""

from numpyro_sgp.inducing.multiscale import MultiscaleInducing
from numpyro_sgp.inducing.points import (
    AbstractInducing,
    BoundedInducingPoints,
    InducingPoints,
    as_inducing,
    check_width,
)
from numpyro_sgp.inducing.rows import RowMatch, find_rows
from numpyro_sgp.inducing.selection import (
    Suggestion,
    TraceError,
    greedy_variance,
    kmeans,
    subset,
    suggest_num_inducing,
    trace_error,
)

__all__ = [
    "AbstractInducing",
    "BoundedInducingPoints",
    "InducingPoints",
    "MultiscaleInducing",
    "RowMatch",
    "Suggestion",
    "TraceError",
    "as_inducing",
    "check_width",
    "find_rows",
    "greedy_variance",
    "kmeans",
    "subset",
    "suggest_num_inducing",
    "trace_error",
]
