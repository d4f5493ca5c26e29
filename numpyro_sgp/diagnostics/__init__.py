"""What a fitted guide is worth: importance ratios, leave-one-out densities, calibration. For ArviZ see `to_arviz`."""

from numpyro_sgp.diagnostics.calibrated import Calibration, calibration
from numpyro_sgp.diagnostics.importance import psis_khat
from numpyro_sgp.diagnostics.leave_one_out import loo_cavity

__all__ = ["Calibration", "calibration", "loo_cavity", "psis_khat"]
