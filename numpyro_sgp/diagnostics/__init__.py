"""What a fitted guide is worth: ArviZ, importance ratios, leave-one-out densities, calibration."""

from numpyro_sgp.diagnostics.calibrated import Calibration, calibration
from numpyro_sgp.diagnostics.importance import psis_khat
from numpyro_sgp.diagnostics.inference_data import to_arviz
from numpyro_sgp.diagnostics.leave_one_out import loo_cavity

__all__ = ["Calibration", "calibration", "loo_cavity", "psis_khat", "to_arviz"]
