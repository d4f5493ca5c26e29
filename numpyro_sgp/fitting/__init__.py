"""Training on minibatches, whether they come again or once, what is called between steps, and checkpoints."""

from numpyro_sgp.fitting.automatic import FitReport, FitResult
from numpyro_sgp.fitting.callbacks import AbstractCallback, EarlyStopping, FitProgress
from numpyro_sgp.fitting.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from numpyro_sgp.fitting.fit import fit
from numpyro_sgp.fitting.streaming import Streaming, StreamingState

__all__ = [
    "AbstractCallback",
    "Checkpoint",
    "EarlyStopping",
    "FitProgress",
    "FitReport",
    "FitResult",
    "Streaming",
    "StreamingState",
    "fit",
    "load_checkpoint",
    "save_checkpoint",
]
