"""Batches that are seen once, beside the same guide trained on all rows; and the time to condition.

Each data set comes in 50 batches, shuffled or sorted by the first input. `Streaming` sees each batch once. The same
guide is trained on all rows by minibatches (`fit`), with as many inducing inputs. Measured is the mean negative log
predictive density (NLPD) of test rows after each batch. With `--peers`, GPyTorch's online variational conditioning
(`get_fantasy_model`) takes the same batches of the data sets that are in the results already, where the outcomes are
numbers; hyperparameters and inducing inputs are those of the first batch.

    python benchmarks/streaming.py --data elevators.npz bike.npz magic.npz --output results
    python benchmarks/streaming.py --data kin40k.npz --num-inducing 512 --output results
    python benchmarks/streaming.py --data kin40k.npz --num-inducing 512 --memory 4000 --output results
    python benchmarks/streaming.py --synthetic --output results
    python benchmarks/streaming.py --data elevators.npz bike.npz kin40k.npz --peers PYTHON --output results
    python benchmarks/streaming.py --costs --output results
    python benchmarks/streaming.py --nuts --output results
"""

import argparse
import itertools
import json
import os
from pathlib import Path
import subprocess
import tempfile
import time

import numpy as np

BATCHES = 50
SETTINGS = {"num_inducing": 256, "memory": 1000, "num_steps": 20, "first_steps": 300, "batch_steps": 6000}
PEER_SECONDS = 300  # for one stream; what GPyTorch keeps of it grows with its rows
REDUCED = {"num_inducing": 12, "memory": 20, "num_steps": 3, "first_steps": 10, "batch_steps": 10}


def synthetic(N: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """N rows of a function of four inputs with noise, and 5000 test rows."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-2.0, 2.0, (N + 5000, 4))
    f = np.sin(2.0 * X[:, 0]) + 0.5 * np.cos(X[:, 1] + X[:, 2]) + 0.25 * X[:, 2] * X[:, 3]
    y = f + 0.3 * rng.normal(size=len(X))
    return X[:N], y[:N], X[N:], y[N:]


def make_model(columns: int, binary: bool):
    """A GP with a lengthscale for each column."""
    import numpyro
    import numpyro.distributions as dist

    import numpyro_sgp as sgp

    def model(X, y=None, num_data=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(1.0, 1.0).expand([columns]).to_event(1))
        variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern52(lengthscale, variance), X))
        noise = None if binary else numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
        with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=f) if noise is None else dist.Normal(f, noise), obs=y)

    return model


def nlpd(guide, params, X, y, binary: bool) -> float:
    """Mean negative log predictive density of test rows."""
    import jax

    import numpyro_sgp as sgp

    q = sgp.process_posterior(guide, jax.random.key(0), params, X[:2])["f"].posterior(X)
    mean, variance = np.asarray(q.mean), np.asarray(q.variance)
    if binary:
        p = np.asarray(q.expectation(jax.nn.sigmoid))
        return float(-np.mean(np.log(np.where(y == 1.0, p, 1.0 - p))))
    variance = variance + float(guide.median(params)["noise"]) ** 2
    return float(np.mean(0.5 * np.log(2.0 * np.pi * variance) + 0.5 * (y - mean) ** 2 / variance))


def on_all_rows(model, data, Xt, yt, binary: bool, settings: dict) -> dict:
    """The guide trained on all rows by minibatches."""
    import jax
    from numpyro.infer import SVI
    from numpyro.infer.autoguide import AutoDelta
    import optax

    import numpyro_sgp as sgp

    steps, M = settings["batch_steps"], settings["num_inducing"]
    guide = sgp.AutoTSVGP(model, sgp.kmeans(None, data[0], num_inducing=M, num_rows=20_000), base=AutoDelta)
    others = optax.adam(optax.cosine_decay_schedule(0.03, steps))
    optim = sgp.NaturalGradient(optax.cosine_decay_schedule(0.3, steps, 0.03), others)
    svi = SVI(model, guide, optim, sgp.QuadratureELBO())
    start = time.perf_counter()
    result = sgp.fit(
        svi, jax.random.key(0), data, batch_size=min(1000, len(data[0])), num_steps=steps, progress_bar=False
    )
    return {"seconds": time.perf_counter() - start, "nlpd": nlpd(guide, result.params, Xt, yt, binary)}


def in_batches(model, parts, data, Xt, yt, binary: bool, settings: dict) -> dict:
    """Each batch once."""
    import jax
    from numpyro.infer import SVI
    from numpyro.infer.autoguide import AutoDelta
    import optax

    import numpyro_sgp as sgp

    X, y = data
    Z = sgp.kmeans(None, X[parts[0]], num_inducing=min(settings["num_inducing"], len(parts[0])))
    guide = sgp.AutoTSVGP(model, Z, base=AutoDelta)
    svi = SVI(model, guide, sgp.NaturalGradient(0.7, optax.adam(0.02)), sgp.QuadratureELBO())
    most = settings["num_inducing"] if len(parts[0]) < settings["num_inducing"] else None
    stream = sgp.Streaming(svi, memory=settings["memory"], num_steps=settings["num_steps"], max_inducing=most)
    state = stream.init(jax.random.key(0), X[parts[0]], y[parts[0]])
    curve, seconds = [], []
    for number, part in enumerate(parts):
        start = time.perf_counter()
        steps = settings["first_steps"] if number == 0 else None
        state, losses = stream.update(state, X[part], y[part], num_steps=steps)
        jax.block_until_ready(losses)
        seconds.append(time.perf_counter() - start)
        curve.append(nlpd(guide, stream.get_params(state), Xt, yt, binary))
    refused = int(sgp.num_refused(state.svi_state))
    typical = float(np.median(seconds[len(seconds) // 2 :]))
    return {"nlpd": curve[-1], "curve": curve, "seconds": sum(seconds), "seconds_a_batch": typical, "refused": refused}


def child_of_gpytorch(path: Path, settings: dict) -> None:
    """Online variational conditioning of a posterior that is trained on the first batch; prints JSON."""
    import gpytorch
    import torch

    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    with np.load(path) as file:
        X, y, Xt, yt, Z = (torch.tensor(file[name]) for name in ("X", "y", "Xt", "yt", "Z"))
        ends = file["ends"]

    class Model(gpytorch.models.ApproximateGP):
        def __init__(self):
            q = gpytorch.variational.CholeskyVariationalDistribution(len(Z))
            super().__init__(gpytorch.variational.VariationalStrategy(self, Z, q, learn_inducing_locations=True))
            self.mean_module = gpytorch.means.ZeroMean()
            kernel = gpytorch.kernels.MaternKernel(nu=2.5, ard_num_dims=X.shape[1])
            self.covar_module = gpytorch.kernels.ScaleKernel(kernel)
            kernel.lengthscale = 2.7

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    model, likelihood = Model(), gpytorch.likelihoods.GaussianLikelihood()
    model.likelihood = likelihood
    first = slice(0, int(ends[0]))
    optim = torch.optim.Adam([*model.parameters()], lr=0.02)
    objective = gpytorch.mlls.VariationalELBO(likelihood, model, int(ends[0]))
    start = time.perf_counter()
    for _ in range(10 * settings["first_steps"]):
        optim.zero_grad()
        (-objective(model(X[first]), y[first])).backward()
        optim.step()
    model.eval()
    likelihood.eval()

    def score(fitted) -> float:
        with torch.no_grad():
            q = likelihood(fitted(Xt))
        variance = q.variance
        return float((0.5 * torch.log(2.0 * torch.pi * variance) + 0.5 * (yt - q.mean) ** 2 / variance).mean())

    curve, fitted, failed = [score(model)], None, None
    with gpytorch.settings.cholesky_max_tries(8):
        for begin, end in itertools.pairwise(ends):
            try:
                with torch.no_grad():
                    rows, outcomes = X[begin:end], y[begin:end]
                    old = model if fitted is None else fitted
                    make = old.variational_strategy.get_fantasy_model if fitted is None else old.get_fantasy_model
                    fitted = make(rows, outcomes)
                curve.append(score(fitted))
            except (RuntimeError, ValueError, MemoryError) as error:
                failed = f"after batch {len(curve)}: {type(error).__name__}: {str(error)[:200]}"
                break
            if time.perf_counter() - start > PEER_SECONDS:
                failed = f"stopped after batch {len(curve)} and {time.perf_counter() - start:.0f} s"
                break
    seconds = time.perf_counter() - start
    versions = {"gpytorch": gpytorch.__version__, "torch": torch.__version__}
    print(json.dumps({"nlpd": curve[-1], "curve": curve, "seconds": seconds, "failed": failed, "versions": versions}))


def peer(python: str, parts, data, Xt, yt, settings: dict) -> dict:
    """Run the child under an interpreter with GPyTorch."""
    import numpyro_sgp as sgp

    X, y = data
    rows = np.concatenate(parts)
    Z = sgp.kmeans(None, X[parts[0]], num_inducing=min(settings["num_inducing"], len(parts[0])))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stream.npz"
        ends = np.cumsum([len(part) for part in parts])
        np.savez(path, X=X[rows], y=y[rows], Xt=Xt, yt=yt, Z=np.asarray(Z), ends=ends)
        command = [python, __file__, "--child", str(path), "--settings", json.dumps(settings)]
        result = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=False)
    if result.returncode:
        raise RuntimeError(f"GPyTorch failed:\n{result.stderr}")
    return json.loads(result.stdout.splitlines()[-1])


def split(X: np.ndarray, batches: int, order: str) -> list[np.ndarray]:
    """Rows of each batch, equally many; what is left over is dropped."""
    rows = np.argsort(X[:, 0], kind="stable") if order == "sorted" else np.random.default_rng(0).permutation(len(X))
    size = len(X) // batches
    return [rows[size * number : size * (number + 1)] for number in range(batches)]


def costs(reduced: bool) -> list[dict]:
    """Milliseconds of a natural step on all rows, of `condition` on one row, and of many fantasies."""
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import SVI
    import optax

    import numpyro_sgp as sgp

    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern52(0.7), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)

    rng = np.random.default_rng(0)
    N, fantasies = (50, 5) if reduced else (2000, 1000)
    X = rng.uniform(-2.0, 2.0, (N, 2))
    y = rng.poisson(np.exp(np.sin(3.0 * X[:, 0]))).astype(float)

    def milliseconds(fn, *args) -> float:
        jax.block_until_ready(fn(*args))
        times = []
        for _ in range(2 if reduced else 7):
            start = time.perf_counter()
            jax.block_until_ready(fn(*args))
            times.append(1e3 * (time.perf_counter() - start))
        return min(times)

    table = []
    for M in (8,) if reduced else (128, 512):
        guide = sgp.AutoTSVGP(model, X[:M])
        svi = SVI(model, guide, sgp.NaturalGradient(0.5, optax.adam(1e-2)), sgp.QuadratureELBO())
        result = svi.run(jax.random.key(0), 5, X, y, progress_bar=False)
        new, outcomes = X[:1] + 0.1, jnp.asarray(rng.poisson(2.0, (fantasies, 1)), float)
        batch = X[:100] + 0.01, jnp.asarray(rng.poisson(2.0, min(N, 100)), float)
        row = {
            "M": M,
            "step_on_all_rows": milliseconds(jax.jit(svi.update), result.state, X, y),
            "condition_on_1": milliseconds(jax.jit(guide.condition), result.params, new, outcomes[0]),
            "condition_on_100": milliseconds(jax.jit(guide.condition), result.params, *batch),
            "fantasies": fantasies,
            "condition_on_fantasies": milliseconds(
                jax.jit(jax.vmap(guide.condition, (None, None, 0))), result.params, new, outcomes
            ),
        }
        table.append(row)
        print({name: round(value, 2) for name, value in row.items()}, flush=True)
    return table


def against_nuts(reduced: bool) -> list[dict]:
    """Counts with effects of groups: conditioning and a stream, beside long chains of the dense model."""
    from common import long_chains
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import SVI
    import optax

    import numpyro_sgp as sgp

    rng, N = np.random.default_rng(0), 80
    X, group = rng.uniform(-2.0, 2.0, (N, 1)), rng.integers(0, 5, N)
    y = rng.poisson(np.exp(np.sin(3.0 * X[:, 0]) + rng.normal(size=5)[group] + 0.5)).astype(float)
    kernel = sgp.kernels.Matern52(1.0)
    L = np.linalg.cholesky(np.asarray(kernel(X, X)) + 1e-8 * np.eye(N))

    def counts(f, group, y):
        level = numpyro.sample("level", dist.Normal(0.0, 2.0))
        with numpyro.plate("groups", 5):
            effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", len(group)):
            numpyro.sample("y", dist.Poisson(jnp.exp(f + level + effect[group])), obs=y)

    def model(X, group, y=None):
        counts(numpyro.sample("f", sgp.GaussianProcess(kernel, X)), group, y)

    def dense(group, y):
        v = numpyro.sample("v", dist.Normal().expand([N]))
        counts(numpyro.deterministic("f", L @ v), group, y)

    draws, r_hat, ess = long_chains(dense, group, y, num_samples=50 if reduced else 4000)
    print(f"NUTS: largest R-hat {r_hat:.4f}, smallest effective sample size {ess:.0f}")

    guide = sgp.AutoTSVGP(model, np.linspace(-2.0, 2.0, 25)[:, None])
    svi = SVI(model, guide, sgp.NaturalGradient(0.7, optax.set_to_zero()), sgp.QuadratureELBO())

    def fitted(rows: int) -> dict:
        return svi.run(jax.random.key(0), 60, X[:rows], group[:rows], y[:rows], progress_bar=False).params

    def streamed(memory: int) -> dict:
        stream = sgp.Streaming(svi, memory=memory, num_steps=15, move_inducing=False)
        state = stream.init(jax.random.key(0), X[:10], group[:10], y[:10])
        for start in range(0, N, 10):
            rows = slice(start, start + 10)
            state, _ = stream.update(state, X[rows], group[rows], y[rows])
        return stream.get_params(state)

    ways = {
        "all rows": lambda: fitted(N),
        "half, then `condition`": lambda: guide.condition(fitted(40), X[40:], group[40:], y[40:]),
        "ten, then `condition`": lambda: guide.condition(fitted(10), X[10:], group[10:], y[10:]),
        "8 batches, no memory": lambda: streamed(0),
        "8 batches, memory of 16": lambda: streamed(16),
    }
    table = []
    for name, way in ways.items():
        params = way()
        median, upper = guide.median(params, X, group), guide.quantiles(params, 0.8413447460685429, X, group)
        for latent in ("f", "level", "effect"):
            mean, sd = np.mean(draws[latent], axis=0), np.std(draws[latent], axis=0)
            error, ratio = np.max(np.abs(median[latent] - mean) / sd), (upper[latent] - median[latent]) / sd
            row = {"way": name, "latent": latent, "error": float(error)}
            table.append({**row, "least": float(np.min(ratio)), "largest": float(np.max(ratio))})
            print(f"{name:26s} {latent:7s} mean within {error:.2f} sd, sds {np.min(ratio):.3f} to {np.max(ratio):.3f}")
    return table


def draw(runs: dict, path: Path) -> None:
    """NLPD against the share of the stream that has been seen."""
    import matplotlib.pyplot as plt

    columns = min(4, len(runs) + 1)
    rows = -(-(len(runs) + 1) // columns)  # one place for the legend
    figure, axes = plt.subplots(rows, columns, figsize=(3.2 * columns, 2.7 * rows), layout="constrained", squeeze=False)
    for ax in axes.flat[len(runs) :]:
        ax.set_axis_off()
    for ax, (name, run) in zip(axes.flat, runs.items(), strict=False):
        for label, style in (("shuffled", "C0-"), ("sorted", "C1-")):
            curve = run["numpyro_sgp"][label]["curve"]
            ax.plot(np.linspace(1.0 / len(curve), 1.0, len(curve)), curve, style, label=label)
            other = run.get("gpytorch", {}).get(label)
            if other is not None:
                seen = np.arange(1, len(other["curve"]) + 1) / len(curve)
                ax.plot(seen, other["curve"], style[:2] + ":", label=f"{label}, GPyTorch")
        ax.axhline(run["all_rows"]["nlpd"], color="k", linestyle="--", linewidth=1.0, label="all rows")
        curves = [run["numpyro_sgp"][label]["curve"] for label in ("shuffled", "sorted")]
        low, high = min(run["all_rows"]["nlpd"], *map(min, curves)), max(curve[len(curve) // 10] for curve in curves)
        ax.set(title=name, xlabel="share of the rows seen", ylim=(low - 0.1 * (high - low), high + 0.2 * (high - low)))
    for ax in axes[:, 0]:
        ax.set_ylabel("NLPD of test rows")
    handles = {label: line for ax in axes.flat for line, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    where = axes.flat[len(runs)]
    where.legend(handles.values(), handles.keys(), frameon=False, fontsize="small", loc="center")
    figure.savefig(path, dpi=120)


def main(arguments: argparse.Namespace) -> None:
    """Every data set, in both orders."""
    from common import data_set, earlier, report
    import numpyro

    numpyro.enable_x64()
    if arguments.costs:
        report("conditioning", {"table": costs(arguments.reduced)}, arguments.output)
        return
    if arguments.nuts:
        report("conditioning_nuts", {"table": against_nuts(arguments.reduced)}, arguments.output)
        return
    settings = REDUCED if arguments.reduced else {**SETTINGS, "num_inducing": arguments.num_inducing}
    if arguments.memory is not None:
        settings = {**settings, "memory": arguments.memory}
    batches = 5 if arguments.reduced else BATCHES
    runs = earlier("streaming", {"batches": batches}, arguments.output)
    sets = {path.stem: data_set(path) for path in arguments.data}
    if arguments.reduced:
        sets = {"synthetic": synthetic(100)}
    elif arguments.synthetic:
        sets["synthetic, 500 000 rows"] = synthetic(500_000)
    for name, (X, y, Xt, yt) in sets.items():
        binary = bool(np.isin(y, (0.0, 1.0)).all())
        parts = {order: split(X, batches, order) for order in ("shuffled", "sorted")}
        if arguments.peers:
            if binary:
                continue
            run = runs[name]
            for order in parts:
                other = peer(arguments.peers, parts[order], (X, y), Xt, yt, run["settings"])
                run.setdefault("gpytorch", {})[order] = other
                print(f"{name} {order}, GPyTorch: {other['nlpd']:.4f} {other['failed'] or ''}", flush=True)
                report("streaming", {"settings": {"batches": batches}, "runs": runs}, arguments.output)
        else:
            model = make_model(X.shape[1], binary)
            run = {"rows": len(X), "settings": settings, "numpyro_sgp": {}}
            if "gpytorch" in runs.get(name, {}) and arguments.memory is None:
                run["gpytorch"] = runs[name]["gpytorch"]
            if arguments.memory is None:
                run["all_rows"] = on_all_rows(model, (X, y), Xt, yt, binary, settings)
            else:
                # All rows at once know of no memory.
                if {**runs[name]["settings"], "memory": arguments.memory} != settings:
                    raise SystemExit(f"{name} is in the results with other settings: {runs[name]['settings']}.")
                run["all_rows"] = runs[name]["all_rows"]
                name = f"{name}, memory of {arguments.memory}"
            print(f"{name}: {len(X)} rows, all rows {run['all_rows']['nlpd']:.4f}", flush=True)
            for order in parts:
                found = in_batches(model, parts[order], (X, y), Xt, yt, binary, settings)
                run["numpyro_sgp"][order] = found
                seconds = f"{found['seconds_a_batch']:.2f} s a batch"
                print(f"  {order}: {found['nlpd']:.4f}, {seconds}, refused {found['refused']}", flush=True)
                runs[name] = run
                report("streaming", {"settings": {"batches": batches}, "runs": runs}, arguments.output)
    if arguments.figure:
        draw(runs, arguments.figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="data sets as .npz with X, y and test_mask")
    parser.add_argument("--synthetic", action="store_true", help="500 000 rows of a known function, too")
    parser.add_argument("--num-inducing", type=int, default=SETTINGS["num_inducing"])
    parser.add_argument("--memory", type=int, help="another memory, for data sets in the results")
    parser.add_argument("--costs", action="store_true", help="the times of `condition` in the place of streams")
    parser.add_argument("--nuts", action="store_true", help="a comparison with NUTS in the place of streams")
    parser.add_argument("--peers", help="interpreter with GPyTorch, for data sets in the results")
    parser.add_argument("--reduced", action="store_true")
    parser.add_argument("--output", type=Path, help="folder for the result as JSON")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--settings", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child_of_gpytorch(options.child, options.settings)
    else:
        main(options)
