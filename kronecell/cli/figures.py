"""`kronecell paper figures`: complexity, serial against parallel, the networks' drawings, curves of runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kronecell.cli.count import EXAMPLES
from kronecell.deploy.atomic import write_atomically
from kronecell.errors import KronecellError

KINDS = ("svg", "png", "pdf")
RUNS = typer.Option(None, "--runs", help="Run directories, or folders that hold them; may be repeated.")


def figures(
    out: Annotated[Path, typer.Argument(help="Folder for the figures; made if missing.")],
    runs: list[Path] | None = RUNS,
    ranks: Annotated[str, typer.Option(help="CP ranks of serial against parallel, measured; empty leaves it out.")] = (
        "2,4,8,16"
    ),
    kind: Annotated[str, typer.Option("--kind", help="svg, png or pdf; drawings are always svg.")] = "svg",
    as_json: Annotated[bool, typer.Option("--json", help="The files as one JSON document on stdout.")] = False,
) -> None:
    """All figures: complexity, serial against parallel, every format's network with its order, curves of runs.

    Example: kronecell paper figures figures --runs runs
    """
    from kronecell.cli.paper import plot_complexity
    from kronecell.paper.tables import complexity

    if kind not in KINDS:
        raise KronecellError(f"--kind must be one of {', '.join(KINDS)}, got {kind!r}")
    pyplot()  # says that matplotlib is missing before anything is written
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KronecellError(f"cannot make the folder {out}: {error.strerror or error}") from None
    written: list[Path] = []

    def done(path: Path) -> None:
        written.append(path)
        print(f"wrote {path}", file=sys.stderr, flush=True)

    for name, svg in drawings().items():
        target = out / f"network-{name}.svg"
        write_atomically(target, lambda path, text=svg: path.write_text(text, encoding="utf-8"))  # type: ignore[misc]
        done(target)
    plot_complexity(complexity(), out / f"complexity.{kind}")
    done(out / f"complexity.{kind}")
    if ranks:
        from kronecell.cli.parallel import plot_parallel, read_ranks
        from kronecell.paper.branch_study import K, study

        chosen = read_ranks(ranks)
        results = [point for name in K for point in study(name, chosen, 3, lambda text: print(text, file=sys.stderr))]
        plot_parallel(results, out / f"parallel.{kind}")
        done(out / f"parallel.{kind}")
    if runs:
        from kronecell.report import group_runs, load_runs

        loaded, broken = load_runs(runs)
        for b in broken:
            print(f"kronecell: broken run {b.path}: {b.reason}", file=sys.stderr)
        groups = group_runs(loaded)
        for dataset in dict.fromkeys(group.dataset for group in groups):
            part = [group for group in groups if group.dataset == dataset]
            stem = "".join(c if c.isalnum() or c in "-_" else "-" for c in dataset.lower()) or "data"
            for key, title in (("top1", "Accuracy on validation"), ("loss", "Training loss")):
                target = out / f"curves-{stem}-{key}.{kind}"
                if plot_curves(part, key, f"{title}, {dataset or 'own data'}", target):
                    done(target)
    if as_json:
        typer.echo(json.dumps([str(path) for path in written]))
    else:
        typer.echo(f"{len(written)} figures in {out}")


def drawings() -> dict[str, str]:
    """Every format's network at the paper's UCF11 shape in each of its named orders, by "kind-order"."""
    from kronecell.formats import parse
    from kronecell.report.drawing import draw

    found = {}
    for kind, text in EXAMPLES.items():
        fmt = parse(text)
        for order in fmt.orders():
            plan = fmt.plan(order)
            found[f"{kind}-{order}"] = draw(plan, title=f"{kind.upper()}, order {order}", standalone=True)
    every = parse(EXAMPLES["kcp"] + ",tie=all")
    found["kcp-all-separable"] = draw(every.plan(), title="KCP of Theorem 1, order separable", standalone=True)
    return found


def plot_curves(groups: Sequence[Any], key: str, title: str, target: Path) -> bool:
    """Mean and range over folds and seeds by epoch; False when no run has the metric."""
    curves = {group.label: group.curve(key) for group in groups}
    curves = {label: points for label, points in curves.items() if points}
    if not curves:
        return False
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(8, 4.6), layout="constrained")
    for label, points in curves.items():
        epochs = [point["epoch"] for point in points]
        (line,) = axis.plot(epochs, [point["mean"] for point in points], label=label.replace("$", r"\$"), linewidth=1.8)
        low, high = [point["low"] for point in points], [point["high"] for point in points]
        axis.fill_between(epochs, low, high, color=line.get_color(), alpha=0.15)
    axis.set(title=title.replace("$", r"\$"), xlabel="epoch", ylabel=title.split(",")[0])
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, ncols=1 + len(curves) // 9)
    write_atomically(target, lambda path: figure.savefig(path, dpi=150, format=target.suffix[1:]))
    plt.close(figure)
    return True


PICTURES = (".png", ".svg", ".pdf")


def pyplot(target: Path | None = None) -> Any:
    """matplotlib.pyplot that needs no screen, for a file of this name."""
    if target is not None and target.suffix not in PICTURES:
        raise KronecellError(f"cannot plot to {target.name!r}: expected a file ending in {', '.join(PICTURES)}")
    try:
        import matplotlib
    except ImportError:
        raise KronecellError("plots need matplotlib; install it with: pip install 'kronecell[report]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
