"""MNIST digits with ten latent GPs and a softmax likelihood: the setting of Adam et al. (2021), Figure 4 and Table 1.

Matern-5/2 with a lengthscale for each pixel, all hyperparameters 1 at the start, shared by ten latents; 100 inducing
inputs, the first rows of the shuffled training set, trained like the hyperparameters; batches of 200; pixels between 0
and 1. The split is the standard one, 60000 rows for training and 10000 for the test; the 70000 of the paper are both
together, and its authors' code trains on 60000 too. The ten latents meet in one term, so its expectation is sampled:
`num_samples` antithetic draws at each step. Negative log predictive density (NLPD) and accuracy are of the test set,
with 200 draws of the ten latents at each row. The clock stands still during these evaluations, and starts after the
first iterations, so compilation is not in it.

    python benchmarks/mnist.py --data mnist.npz [--iterations 150] [--converge 3000] [--output results] [--figure FILE]
"""

import argparse
import os
from pathlib import Path
import time

from common import report
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
import optax

import numpyro_sgp as sgp

CLASSES = 10
# E-steps, M-steps, ρ, learning rate of Adam, and the paper's NLPD of t-SVGP and q-SVGP; Figure 4 has 150 iterations,
# Table 1 as many as convergence took, and gives no number for the former.
FIGURE_4 = (1, 1, 0.03, 0.02, None, None)
TABLE_1 = (
    (1, 1, 0.040, 0.05, 0.304, 0.304),
    (2, 1, 0.035, 0.10, 0.283, 0.289),
    (3, 1, 0.030, 0.10, 0.281, 0.293),
    (4, 2, 0.025, 0.03, 0.255, 0.259),
    (4, 2, 0.050, 0.03, 0.283, 0.282),
    (4, 1, 0.030, 0.03, 0.230, 0.243),
)


def model(X, y=None, num_data=None):
    """Digits y from pixels X, (N, D) of 0 … 255."""
    X = X / 255.0
    positive = dist.constraints.positive
    lengthscale = numpyro.param("lengthscale", jnp.ones(X.shape[1]), constraint=positive)
    variance = numpyro.param("variance", 1.0, constraint=positive)
    with numpyro.plate("class", CLASSES):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern52(lengthscale, variance), X))
    with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=f.T), obs=y)


def digits(data: Path | None, seed: int) -> tuple[np.ndarray, ...]:
    """Shuffled training rows and test rows."""
    rng = np.random.default_rng(1 + seed)
    if data is None:
        centres = rng.integers(0, 256, size=(CLASSES, 12))
        y = rng.integers(0, CLASSES, size=700)
        X = np.clip(centres[y] + rng.normal(scale=30.0, size=(700, 12)), 0, 255).astype(np.uint8)
        test = np.arange(700) >= 600
    else:
        with np.load(data, allow_pickle=False) as file:
            X, y, test = file["X"], file["y"].astype(np.int32), file["test_mask"][:, 0]
    order = rng.permutation(np.flatnonzero(~test))
    return X[order], y[order].astype(np.int32), X[test], y[test].astype(np.int32)


class Watch(sgp.AbstractCallback):
    """Judges the run at some steps, and notes the time without that."""

    def __init__(self, guide, every: int, judged_at: set[int], test: tuple[np.ndarray, np.ndarray]) -> None:
        self.guide, self.every, self.judged_at, self.test = guide, every, judged_at, test
        self.judge = jax.jit(self._judge)
        self.times: dict[int, np.ndarray] = {}
        self.paused = np.zeros(2)
        self.points: list[dict] = []

    def _judge(self, params, X, y):
        """Sum of log predictive densities, and number of right answers."""
        q = sgp.process_posterior(self.guide, jax.random.key(0), params, X, y, X.shape[0])["f"].posterior(X / 255.0)
        z = jax.random.normal(jax.random.key(1), (200, *q.mean.shape), q.mean.dtype)
        probabilities = jax.nn.softmax(q.mean + jnp.sqrt(q.variance) * z, axis=1).mean(0)
        at = jnp.take_along_axis(probabilities, y[None], axis=0)[0]
        return jnp.sum(jnp.log(at)), jnp.sum(probabilities.argmax(0) == y)

    def __call__(self, progress: sgp.FitProgress) -> None:
        now = np.array([time.perf_counter(), time.process_time()])
        self.times[progress.step] = now - self.paused
        if progress.step in self.judged_at:
            params, (X, y) = progress.params(), self.test
            chunks = np.array_split(np.arange(len(X)), -(-len(X) // 1000))
            sums = np.sum([np.array(self.judge(params, X[rows], y[rows])) for rows in chunks], axis=0)
            self.points.append(
                {
                    "iteration": progress.step,
                    "cpu": float((self.times[progress.step] - self.times[min(self.times)])[1]),
                    "nlpd": float(-sums[0] / len(X)),
                    "accuracy": float(sums[1] / len(X)),
                    "mean_loss": float(progress.losses.mean()),
                    "refused": int(sgp.num_refused(progress.state)),
                }
            )
            print("   ", {k: round(v, 4) for k, v in self.points[-1].items()}, flush=True)
        self.paused += np.array([time.perf_counter(), time.process_time()]) - now

    def begin(self, saved) -> None:
        del saved

    def state(self) -> dict[str, np.ndarray]:
        return {}


def run(
    data: tuple,
    Z: np.ndarray,
    schedule: tuple,
    batch_size: int,
    judged_at: list[int],
    seed: int,
    *,
    num_samples: int,
    decay: bool,
) -> dict:
    """One run: what was reached at the iterations asked for, and seconds of 100 iterations."""
    e_steps, m_steps, rho, rate = schedule[:4]
    num_steps, every = max(judged_at), min(10, min(judged_at))
    if decay:
        rho, rate = optax.cosine_decay_schedule(rho, num_steps, 0.1), optax.cosine_decay_schedule(rate, num_steps, 0.01)
    X, y, X_test, y_test = data
    guide = sgp.AutoTSVGP(model, Z, learn_inducing=True)
    optim = sgp.NaturalGradient(rho, optax.adam(rate), e_steps=e_steps, m_steps=m_steps)
    svi = SVI(model, guide, optim, sgp.QuadratureELBO(num_samples=num_samples))
    watch = Watch(guide, every, set(judged_at), (X_test, y_test))
    key = jax.random.key(seed)
    sgp.fit(svi, key, (X, y), batch_size=batch_size, num_steps=num_steps, progress_bar=False, callback=watch)
    first, last = min(watch.times), max(watch.times)
    seconds = (watch.times[last] - watch.times[first]) / max(last - first, 1) * 150
    settings = {"e_steps": e_steps, "m_steps": m_steps, "rho": schedule[2], "rate": schedule[3], "B": batch_size}
    timed = {"wall_150": float(seconds[0]), "cpu_150": float(seconds[1]), "load": os.getloadavg()[0]}
    return {**settings, "seed": seed, "num_samples": num_samples, "decay": decay, **timed, "points": watch.points}


def figure(result: dict, path: Path) -> None:
    """NLPD against iterations, of the first seed."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    _, ax = plt.subplots(figsize=(6.5, 3.8), layout="constrained")
    first = result["runs"][0]["seed"]
    for entry in (run for run in result["runs"] if run["seed"] == first):
        label = f"#E={entry['e_steps']} #M={entry['m_steps']} ρ={entry['rho']} lr={entry['rate']} B={entry['B']}"
        label += ", decreasing" if entry["decay"] else ""
        ax.plot(*([p[k] for p in entry["points"]] for k in ("iteration", "nlpd")), ".-", label=label)
    ax.axhline(0.230, color="0.6", linewidth=0.8)
    ax.text(ax.get_xlim()[1], 0.232, "best of Table 1 ", ha="right", fontsize=7)
    ax.set(xscale="log", yscale="log", xlabel="iteration", ylabel="test NLPD")
    ax.legend(fontsize=7, frameon=False)
    plt.savefig(path, dpi=110)
    print(f"figure written to {path}")


def main(arguments: argparse.Namespace) -> None:
    """The setting of Figure 4, those of Table 1, and a run until nothing changes any more."""
    numpyro.enable_x64()
    M, B, num_samples = (10, 50, 8) if arguments.reduced else (100, 200, arguments.num_samples)
    if arguments.reduced:
        plan = [((4, 2, 0.025, 0.03, 0.255, 0.259), B, [10, 20], True)]
    else:
        at = sorted({150, *arguments.iterations})
        plan = [(FIGURE_4, B, at, False), *((schedule, B, at, False) for schedule in TABLE_1)]
        if arguments.converge:
            at = [n for n in (150, 500, 1000, 2000, 4000, 8000, 16000) if n < arguments.converge]
            plan.append(((1, 1, 0.1, 0.02, None, None), 500, [*at, arguments.converge], True))
    if arguments.only is not None:
        plan = [plan[number] for number in arguments.only]
    print(f"M={M}, {num_samples} draws; seconds are for 150 iterations, CPU / wall")
    result: dict = {"M": M, "runs": []}
    for schedule, batch_size, at, decay in plan:
        e_steps, m_steps, rho, rate, paper, _ = schedule
        name = f"#E={e_steps} #M={m_steps} ρ={rho} lr={rate} B={batch_size}{', decreasing' if decay else ''}"
        for seed in arguments.seeds:
            data = digits(arguments.data, seed)
            Z = data[0][:M] / 255.0
            entry = run(data, Z, schedule, batch_size, at, seed, num_samples=num_samples, decay=decay)
            last = entry["points"][-1]
            print(
                f"{name:48s} seed {seed} {entry['cpu_150']:6.1f} / {entry['wall_150']:6.1f} s  {last['iteration']} "
                f"iterations: NLPD {last['nlpd']:.3f}, accuracy {last['accuracy']:.4f}; paper NLPD {paper or '-'}",
                flush=True,
            )
            result["runs"].append({**entry, "N": len(data[0]), "paper_nlpd": paper})
            report("mnist", result, arguments.output)
    if arguments.figure is not None:
        figure(result, arguments.figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the digits as .npz with X, y and test_mask")
    parser.add_argument("--iterations", type=int, nargs="*", default=[150], help="when to judge the runs")
    parser.add_argument("--converge", type=int, default=8000, help="iterations of the last run; 0 for none")
    parser.add_argument("--num-samples", type=int, default=32, help="draws of the latents at each step")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0], help="of rows, batches and draws")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the runs to do, from 0")
    parser.add_argument("--reduced", action="store_true")
    parser.add_argument("--output", type=Path, help="folder for the result as JSON")
    parser.add_argument("--figure", type=Path, help="where to write the figure")
    options = parser.parse_args()
    if not options.reduced and options.data is None:
        parser.error("`--data` is needed; without it there is only `--reduced`.")
    main(options)
