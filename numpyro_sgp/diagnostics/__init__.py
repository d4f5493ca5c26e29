"""Checks of a fitted guide: importance ratios, leave-one-out densities, calibration. For ArviZ see `to_arviz`."""

from numpyro_sgp.diagnostics.calibrated import Calibration, calibration
from numpyro_sgp.diagnostics.importance import psis_khat
from numpyro_sgp.diagnostics.joint_gain import JointGain, joint_gain
from numpyro_sgp.diagnostics.leave_one_out import loo_cavity
from numpyro_sgp.diagnostics.plots import plot_band, plot_hyperparameters, plot_inducing, plot_training

__all__ = [
    "Calibration",
    "JointGain",
    "calibration",
    "joint_gain",
    "loo_cavity",
    "plot_band",
    "plot_hyperparameters",
    "plot_inducing",
    "plot_training",
    "psis_khat",
]
