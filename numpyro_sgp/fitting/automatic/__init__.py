"""A fit of a model without choices: inducing inputs, optimizer, schedule and end are found."""

from numpyro_sgp.fitting.automatic.fit_model import fit_model
from numpyro_sgp.fitting.automatic.report import Evidence, FitReport, FitResult

__all__ = ["Evidence", "FitReport", "FitResult", "fit_model"]
