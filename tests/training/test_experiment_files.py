"""The experiments folder: every row of the paper's tables is there, counts what the paper counts, and takes a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from kronecell.errors import KronecellError
from kronecell.formats.paper_counting import paper_params
from kronecell.paper.printed import TABLES
from kronecell.paper.tables import paper_format
from kronecell.training.loop import make_optimiser
from kronecell.training.paper_settings import SETTINGS
from kronecell.training.protocol import deviations
from kronecell.training.run import Experiment, list_experiments, load_experiment, make_experiment, parse_overrides

NAMES = list_experiments()
MISPRINTED = {("UCF11", True, "KCP(4,2,2)")}  # 994 in the paper, 944 in truth


def slug(label: str) -> str:
    return label.lower().replace("(", "").replace(",", "").replace(")", "")


def row_name(dataset: str, label: str, shared: bool) -> str:
    return f"{dataset.lower()}-{slug(label)}" + ("-shared" if shared and label != "Ori" else "")


@pytest.mark.parametrize("row", TABLES, ids=lambda row: row_name(row.dataset, row.format, row.shared))
def test_every_row_of_the_six_tables_has_a_file_with_the_papers_settings(row: object) -> None:
    from kronecell.paper.printed import Printed

    assert isinstance(row, Printed)
    e = load_experiment(row_name(row.dataset, row.format, row.shared))
    setting, dense = SETTINGS[row.dataset], row.format == "Ori"
    assert (e.dataset, e.paper, e.cell) == (row.dataset, row.format, "lstm")
    assert (e.hidden, e.classes, e.epochs) == (setting.hidden, setting.classes, setting.epochs)
    assert (e.width, e.height, e.frames, e.segments) == (160, 120, 6, 10)
    assert e.learning_rate == 1e-3 and e.clip_norm == 0 and e.dropout == 0 and e.schedule == "constant"
    assert e.weight_decay == (0.0 if dense or row.dataset == "UCF11" else 0.01)
    assert e.flip == (row.dataset == "UCF50")
    fmt = paper_format(row.dataset, row.format)
    if dense:
        assert e.format == "dense" and row.params == 4 * fmt.M * fmt.N
        return
    assert e.weight_format() == fmt and e.shared == row.shared
    counted = paper_params(fmt, 4, row.shared)
    assert counted == row.params or (row.dataset, row.shared, row.format) in MISPRINTED


def test_the_studies_have_their_files() -> None:
    params = {name: load_experiment(name).weight_format().network(4).num_params for name in NAMES if "kcp" in name}  # type: ignore[union-attr]
    for data in ("ucf11", "ycf"):  # K against C: the same parameters, K halved and C doubled
        assert params[f"{data}-kcp422"] == params[f"{data}-kcp244"]
        assert params[f"{data}-kcp422"] < params[f"{data}-kcp442"] < params[f"{data}-kcp444"]
        assert load_experiment(f"{data}-kcp442-shared-a1").shared == ("A1",)
        assert load_experiment(f"{data}-kcp442-shared").shared is True
    assert params["ucf50-kcp644"] == params["ucf50-kcp466"]


@pytest.mark.parametrize("name", NAMES)
def test_every_file_loads_and_its_model_has_the_parameters_it_counts(name: str) -> None:
    e = load_experiment(name)
    with torch.device("meta"):  # counted, not allocated: UCF50 uncompressed has 552 million
        model = e.build_model(e.classes)
    fmt, gates = e.weight_format(), 4
    w = gates * e.input_size * e.hidden if fmt is None else fmt.network(gates, e.shared).num_params
    rest = gates * e.hidden * (e.hidden + 2) + e.classes * (e.hidden + 1)
    assert sum(p.numel() for p in model.parameters()) == w + rest
    assert make_experiment(dict(e.__dict__)) == e  # round trip of names and types


def one_step(name: str) -> None:
    e = load_experiment(name)
    torch.manual_seed(0)
    model = e.build_model(e.classes)
    optimiser = make_optimiser(model, e.train_settings(0))
    x = torch.randint(0, 256, (2, e.frames or 9, e.input_size), dtype=torch.uint8)
    y = torch.randint(0, e.classes, (2,))
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.numel() < 10**7}
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimiser.step()
    assert bool(loss.isfinite())
    moved = {n for n, p in model.named_parameters() if n in before and not torch.equal(p, before[n])}
    assert moved == {*before}, "every parameter takes part"


FAST = [name for name in NAMES if not name.startswith("ucf50") and not name.endswith("-ori")]


@pytest.mark.parametrize("name", [n for n in FAST if "kcp" in n or "-tr" in n])
def test_one_optimisation_step_runs(name: str) -> None:
    one_step(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in NAMES if n not in FAST or not ("kcp" in n or "-tr" in n)])
def test_one_optimisation_step_runs_for_the_large_ones(name: str) -> None:
    if name == "ucf50-ori":
        pytest.skip("552 million parameters: counted above, not run")
    one_step(name)


def test_a_setting_is_weaker_in_the_defaults_than_in_the_file_than_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "defaults.toml").write_text("epochs = 1\nhidden = 2\nbatch_size = 3\n[mine]\nhidden = 4\nepochs = 5\n")
    (tmp_path / "a.toml").write_text('dataset = "mine"\nepochs = 6\n')
    path = str(tmp_path / "a.toml")
    e = load_experiment(path)
    assert (e.name, e.batch_size, e.hidden, e.epochs) == ("a", 3, 4, 6)
    e = load_experiment(path, parse_overrides(["epochs=7", "shared=true", "name=b", 'fold_method="random"']))
    assert (e.name, e.epochs, e.shared, e.fold_method) == ("b", 7, True, "random")


def test_to_toml_round_trips(tmp_path: Path) -> None:
    e = load_experiment("ucf11-kcp442-shared-a1", {"name": 'quote " and \\ and ü'})
    (tmp_path / "again.toml").write_text(e.to_toml(), encoding="utf-8")
    assert load_experiment(str(tmp_path / "again.toml")) == e


def test_a_paper_experiment_deviates_only_where_the_paper_is_silent() -> None:
    texts = deviations(load_experiment("ucf50-kcp644"))
    assert all("does not say" in text for text in texts) and len(texts) == 3
    changed = deviations(load_experiment("ucf50-kcp644", {"epochs": 3, "fold_method": "random", "clip_norm": 1.0}))
    assert any("epochs 3 instead of 200" in text for text in changed) and any("split groups" in t for t in changed)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epoch": 3}, "unknown setting 'epoch' .did you mean 'epochs'"),
        ({"epochs": "many"}, "epochs must be a whole number, got 'many'"),
        ({"epochs": True}, "epochs must be a whole number"),
        ({"learning_rate": "fast"}, "learning_rate must be a number"),
        ({"shared": [1]}, "shared must be true, false or a list of factor names"),
        ({"format": "tt:m=8x20x20x18,n=4x4x4x4,r=5000"}, "largest feasible value"),
        ({"format": "tt:m=8x20x20,n=4x4x4x4,r=2"}, "tt"),
        ({"format": "nope:m=2,n=2"}, "unknown format"),
        ({"format": "tt:m=8x20x20x18,n=4x4x4x4,r=4", "hidden": 128}, "57600 x 128"),
        ({"format": "tt:m=8x20x20x18,n=4x4x4x4,r=4", "shared": ["Q"]}, "choose at least one of"),
        ({"cell": "rnn"}, "cell must be one of lstm, gru"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"name": "../up"}, "name becomes a folder"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(KronecellError, match=message):
        make_experiment(settings)


def test_the_defaults_of_the_class_are_the_papers() -> None:
    e = Experiment()
    assert (e.epochs, e.learning_rate, e.frames, e.segments) == (400, 1e-3, 6, 10)
