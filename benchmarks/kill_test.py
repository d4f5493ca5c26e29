"""A run killed with SIGKILL at random moments, many times: what is lost, and whether the end is the same.

A child process trains with `fit` and a checkpoint every few steps, and prints each step it has done. The parent kills
it at a random moment, checks that every checkpoint in the folder can be read and that the newest is not older than it
may be, and starts it again. In the end the child is left alone, and its result is compared bit for bit with that of a
run that was never interrupted.
"""

import argparse
from pathlib import Path
import random
import signal
import subprocess
import sys
import tempfile
import time

from common import report
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI

import numpyro_sgp as sgp
from numpyro_sgp.fitting import AbstractCallback, Checkpoint, fit
from numpyro_sgp.fitting.checkpoint import read_arrays

EVERY = 5


def model(X, y=None, num_data=None):
    lengthscale = numpyro.param("lengthscale", jnp.ones(2), constraint=dist.constraints.positive)
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.SquaredExponential(lengthscale), X))
    with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


class Say(AbstractCallback):
    """Prints every step that is done."""

    every = 1

    def __call__(self, progress):
        print(progress.step, flush=True)

    def begin(self, saved):
        print("fresh" if saved is None else "resumed", flush=True)

    def state(self):
        return {}


def train(num_steps: int, folder: str | None, result: str) -> None:
    """The child: writes the losses and all numbers of the last state."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(503, 2)).astype("f4")
    y = (X[:, 0] > X[:, 1] ** 2).astype("f4")
    svi = SVI(model, sgp.AutoTSVGP(model, X[:20]), sgp.NaturalGradient(0.1), sgp.QuadratureELBO())
    checkpoint = None if folder is None else Checkpoint(folder, every=EVERY)
    fitted = fit(
        svi,
        jax.random.key(0),
        (X, y),
        batch_size=50,
        num_steps=num_steps,
        callback=Say(),
        checkpoint=checkpoint,
        progress_bar=False,
    )
    numbers = [np.asarray(leaf) for leaf in jax.tree.leaves((fitted.losses, fitted.state._replace(rng_key=None)))]
    np.savez(result, *numbers, key=jax.random.key_data(fitted.state.rng_key))


def child(num_steps: int, folder: Path | None, result: Path) -> subprocess.Popen:
    arguments = [sys.executable, __file__, "--steps", str(num_steps), "--child", str(result)]
    return subprocess.Popen(
        arguments + ([] if folder is None else ["--folder", str(folder)]), stdout=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen) -> None:
    process.communicate()
    if process.returncode:
        message = f"the child ended with {process.returncode}"
        raise RuntimeError(message)


def kill_once(process: subprocess.Popen, folder: Path, delay: float) -> dict[str, int]:
    """Kill the child some time after its first step of this life; what it had done, and what is in the folder."""
    done = 0
    for line in process.stdout:
        if line.strip().isdigit():
            done = int(line)
            break
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    for line in process.stdout:
        done = int(line) if line.endswith("\n") else done
    process.wait()
    files = Checkpoint(folder).files()
    unreadable = 0
    for file in files.values():
        try:
            read_arrays(file)
        except ValueError:
            unreadable += 1
    return {
        "done": done,
        "checkpoint": max(files, default=0),
        "unreadable": unreadable,
        "unfinished": len(list(folder.glob(".*"))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="how often the run is killed")
    parser.add_argument("--reduced", action="store_true", help="one kill, which the tests run")
    parser.add_argument("--output", type=Path, help="folder for the result as JSON")
    parser.add_argument("--steps", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        train(options.steps, options.folder, options.child)
        return
    kills = 1 if options.reduced else options.kills
    num_steps = 400 * (kills + 1)  # more than are done in the time that a life lasts
    random.seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "checkpoints"
        rounds = []
        for number in range(kills):
            rounds.append(kill_once(child(num_steps, folder, Path(name) / "killed.npz"), folder, random.uniform(0, 1)))
            print(f"kill {number + 1}: {rounds[-1]}", flush=True)
        finish(child(num_steps, folder, Path(name) / "killed.npz"))
        finish(child(num_steps, None, Path(name) / "alone.npz"))
        with np.load(Path(name) / "killed.npz") as killed, np.load(Path(name) / "alone.npz") as alone:
            equal = set(killed) == set(alone) and all(
                np.array_equal(killed[key], alone[key], equal_nan=True) for key in alone
            )
    lost = max(one["done"] - one["checkpoint"] for one in rounds)
    unreadable = sum(one["unreadable"] for one in rounds)
    print(f"{kills} kills, {unreadable} unreadable checkpoints, at most {lost} steps lost of {EVERY} allowed")
    print(f"a checkpoint was being written in {sum(one['unfinished'] > 0 for one in rounds)} of them")
    print(f"result equal to that of a run without interruption, bit for bit: {equal}")
    report(
        "kill_test",
        {
            "kills": kills,
            "every": EVERY,
            "steps": num_steps,
            "unreadable": unreadable,
            "lost_steps": lost,
            "equal_bit_for_bit": equal,
            "rounds": rounds,
        },
        options.output,
    )
    if unreadable or lost > EVERY or not equal:
        raise SystemExit("checkpoints did not hold what they promise")


if __name__ == "__main__":
    main()
