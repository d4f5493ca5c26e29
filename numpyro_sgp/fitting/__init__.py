"""Training on minibatches: the loop, what it calls between steps, and checkpoints."""

from numpyro_sgp.fitting.callbacks import AbstractCallback, EarlyStopping, FitProgress
from numpyro_sgp.fitting.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from numpyro_sgp.fitting.fit import fit

__all__ = [
    "AbstractCallback",
    "Checkpoint",
    "EarlyStopping",
    "FitProgress",
    "fit",
    "load_checkpoint",
    "save_checkpoint",
]
