"""The report: what it reads, what it counts, what it refuses, and that nothing in a run directory becomes HTML."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kronecell.cli.main import main
from kronecell.errors import KronecellError
from kronecell.report import find_runs, group_runs, load_runs, markdown, summary, write_report
from kronecell.report.groups import Spread
from kronecell.training.intervals import wilson
from tests.run_cases import write_mixed, write_run, write_study


class Tags(HTMLParser):
    """All tags with their attributes, and the text outside scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = tag

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside not in ("script", "style"):
            self.words.append(data)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixed(tmp_path_factory.mktemp("mixed"))


@pytest.fixture(scope="module")
def page(mixed: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("page") / "report.html"
    write_report([mixed], out)
    return out.read_text()


def test_runs_are_grouped_over_folds_and_seeds(tmp_path: Path) -> None:
    write_study(tmp_path, folds=2, seeds=2)
    runs, broken = load_runs([tmp_path])
    groups = group_runs(runs)
    assert len(runs) == 28 and broken == [] and len(groups) == 7
    tt = next(group for group in groups if group.label == "ucf11-tt")
    spread, scores = tt.spread("top1"), [run.result["top1"] for run in tt.runs]
    assert spread == Spread.of(scores) and spread is not None and spread.count == 4
    curve = tt.curve("top1")
    assert len(curve) == 40 and all(point["low"] <= point["mean"] <= point["high"] for point in curve)


def test_the_breakdown_adds_up_and_separates_w_from_the_model(tmp_path: Path) -> None:
    write_run(tmp_path, "kcp", "KCP(4,4,2)")
    runs, _ = load_runs([tmp_path])
    (group,) = group_runs(runs)
    parts = group.breakdown
    assert parts == {"W": 4736, "U": 262144, "bias": 2048, "classifier": 2827}
    assert sum(parts.values()) == group.value("params_model")


def test_printed_values_stand_beside_the_same_layer_and_accuracies_only_beside_the_same_data(tmp_path: Path) -> None:
    write_run(tmp_path, "a", "KCP(4,2,2)", shared=True)
    write_run(tmp_path, "b", "KCP(4,2,2)", shared=True, dataset="motions")
    write_run(tmp_path, "c", "Ori")
    groups = group_runs(load_runs([tmp_path])[0])
    text = markdown(groups)
    assert "994 (should be 944)" in text
    first, second, dense = groups
    assert first.printed is not None and first.same_data and first.printed.top1 == 85.0
    assert second.printed == first.printed and not second.same_data
    assert dense.printed is not None and dense.printed.format == "Ori"
    assert text.count("85.0") == 1


def test_a_name_does_not_make_data_the_papers(tmp_path: Path) -> None:
    changes = {"few": {"clips": {"train": 48, "all": 60}}, "two": {"classes": 2}, "silent": {"clips": None}}
    for name, change in changes.items():
        path = write_run(tmp_path, name, "KCP(4,4,2)") / "result.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    groups = group_runs(load_runs([tmp_path])[0])
    assert [group.dataset for group in groups] == ["UCF11"] * 3
    assert not any(group.same_data for group in groups) and "88.1" not in markdown(groups)


def test_the_headline_is_the_last_epoch_with_its_interval(tmp_path: Path) -> None:
    path = write_run(tmp_path, "a", "TT") / "result.json"
    facts = json.loads(path.read_text()) | {"top1": 0.9, "top1_last": 0.8, "clips": {"train": 100, "valid": 50}}
    path.write_text(json.dumps(facts))
    (group,) = group_runs(load_runs([tmp_path])[0])
    low, high = wilson(40, 50)
    assert group.interval == pytest.approx((low, high))
    text = markdown([group])
    assert f"80.0% ({100 * low:.1f} to {100 * high:.1f})" in text and "| 90.0% |" in text
    del facts["top1_last"], facts["clips"]  # of an older release: the last line of the metrics, and no interval
    path.write_text(json.dumps(facts))
    (group,) = group_runs(load_runs([tmp_path])[0])
    last = json.loads((path.parent / "metrics.jsonl").read_text().splitlines()[-1])["top1"]
    assert group.interval is None and f"| {100 * last:.1f}% |" in markdown([group])


def test_the_papers_accuracies_need_a_result_that_counted_the_data(tmp_path: Path) -> None:
    write_run(tmp_path, "going", "KCP(4,4,2)", state="running")
    (group,) = group_runs(load_runs([tmp_path])[0])
    assert group.printed is not None and not group.same_data and "88.1" not in markdown([group])
    write_run(tmp_path, "going", "KCP(4,4,2)", fold=1)
    (group,) = group_runs(load_runs([tmp_path])[0])
    assert group.same_data and "| 88.1% |" in markdown([group])


def test_only_the_selected_accuracy_stands_without_an_interval(tmp_path: Path) -> None:
    write_run(tmp_path, "a", "TT")
    (group,) = group_runs(load_runs([tmp_path])[0])
    heads, _, cells = (line.strip("| ").split(" | ") for line in markdown([group]).splitlines()[:3])
    ours = {head: cell for head, cell in zip(heads, cells, strict=True) if "accuracy" in head and "paper" not in head}
    interval = re.compile(r"\d+\.\d% \(\d+\.\d to \d+\.\d\)")
    assert [head for head, cell in ours.items() if not interval.fullmatch(cell)] == ["accuracy at the best epoch"]
    write_report([tmp_path], tmp_path / "report.html")
    assert "no interval holds for it" in (tmp_path / "report.html").read_text()


def test_an_experiment_without_a_result_says_why_and_how_far_it_came(tmp_path: Path) -> None:
    write_run(tmp_path, "cut", "TT", state="interrupted", epochs=4000)
    text = markdown(group_runs(load_runs([tmp_path])[0]))
    assert "| cut | none, interrupted | 2,000 of 4,000 | 11,904 |" in text and "| 1 interrupted |" in text
    write_report([tmp_path], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Without a result, and not drawn: cut." in page and "without classifier" in page


def test_small_figures_keep_three_digits(tmp_path: Path) -> None:
    path = write_run(tmp_path, "a", "TT") / "result.json"
    small = {"macs_executed": 117_680, "latency_ms": 0.1137, "step_ms": 2.9841, "ratio_w": 7.9448, "ratio_model": 1.0}
    path.write_text(json.dumps(json.loads(path.read_text()) | small))
    text = markdown(group_runs(load_runs([tmp_path])[0]))
    assert "| 7.94x | 1x | 0.118 | 0.114 | 2.98 |" in text


def test_patience_is_named_and_so_is_what_it_selects_by(tmp_path: Path) -> None:
    write_run(tmp_path, "a", "TT", stopped="patience")
    write_run(tmp_path, "a", "TT", fold=1, stopped="patience")
    write_report([tmp_path], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "2 of 2 runs stopped after 20 of 40 epochs by their patience (early_stop)" in page
    assert "The setting early_stop looks at the very clips" in page and "Hollow" not in page
    assert "2 runs: 2 stopped." in page


def test_a_run_stopped_by_its_budget_says_so_everywhere(tmp_path: Path) -> None:
    write_run(tmp_path, "ucf11-ori", "Ori", stopped="time")
    write_run(tmp_path, "whole", "TT")
    old = write_run(tmp_path, "old", "HT", state="finished")  # without the word: known by its seconds
    (old / "config.toml").write_text((old / "config.toml").read_text() + "max_seconds = 60.0\n")
    result = json.loads((old / "result.json").read_text())
    del result["stopped"]
    (old / "result.json").write_text(json.dumps(result))
    groups, broken = write_report([tmp_path], tmp_path / "report.html")
    stopped = {group.label: bool(group.stopped) for group in groups}
    assert stopped == {"ucf11-dense": True, "whole": False, "old": True}
    page = (tmp_path / "report.html").read_text()
    assert "stopped after 20 of 40 epochs by its time budget" in markdown(groups)
    assert "ucf11-dense: stopped after 20 of 40" in page and "Hollow: stopped by a time budget." in page
    data = json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', page).group(1))  # type: ignore[union-attr]
    assert [bool(group["stopped"]) for group in data["groups"]] == [stopped[group.label] for group in groups]
    assert summary(groups, broken)["groups"][0]["stopped"] in page.replace("&quot;", '"') + markdown(groups)


def test_times_say_batch_and_threads(tmp_path: Path) -> None:
    one = write_run(tmp_path, "a", "TT")
    groups = group_runs(load_runs([tmp_path])[0])
    text = markdown(groups)
    assert "latency, ms (batch 1, 2 threads)" in text and "training step, ms (batch 16, 2 threads)" in text
    write_run(tmp_path, "b", "HT")
    (one / "environment.json").write_text('{"threads": 1}')
    assert "(batch 1, 1 to 2 threads)" in markdown(group_runs(load_runs([tmp_path])[0]))


def test_every_state_is_shown_and_broken_runs_are_named(page: str) -> None:
    words = " ".join(Tags(page).words)
    assert "Still running:" in words and "epoch 20 of 40" in words
    assert "failed fold 0 seed 0 failed: the loss is nan" in words
    assert "Broken:" in words and "result.json is missing or damaged" in words
    assert "2 finished" in words


def test_names_are_text(page: str) -> None:
    tags = Tags(page)
    assert "img" not in [tag for tag, _ in tags.tags]
    assert sum(tag == "script" for tag, _ in tags.tags) == 2
    assert any("<script>window.evil=1</script>" in words for words in tags.words)


def test_the_page_asks_the_network_for_nothing(page: str) -> None:
    for tag, attributes in Tags(page).tags:
        for name in ("src", "href", "action", "data", "poster"):
            assert (attributes.get(name) or "data:,").startswith("data:"), (tag, attributes)
    assert "default-src 'none'" in page and "@import" not in page
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|EventSource|sendBeacon)\b", page)


def test_fifty_runs_are_one_small_page(tmp_path: Path) -> None:
    for number in range(50):
        write_run(tmp_path, f"run{number % 10}", ("TT", "HT", "KCP(4,4,2)", "TR", "BT")[number % 5], number // 10)
    heard: list[str] = []
    write_report([tmp_path], tmp_path / "report.html", progress=heard.append)
    assert len(heard) == 5  # plans, which take the time, are made once per format and not once per run
    assert (tmp_path / "report.html").stat().st_size < 6_000_000


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("config.toml", None, "config.toml is missing"),
        ("config.toml", b"name = [", "config.toml cannot be read"),
        ("config.toml", b"\xff\xfe", "config.toml cannot be read"),
        ("config.toml", b"format = 3", "names no format"),
        ("result.json", b"{", "result.json is missing or damaged"),
        ("result.json", b"[1]", "result.json is missing or damaged"),
        ("result.json", None, "result.json is missing or damaged"),
    ],
)
def test_broken_runs_say_why(tmp_path: Path, file: str, content: bytes | None, expected: str) -> None:
    good = write_run(tmp_path, "good", "TT")
    bad = write_run(tmp_path, "bad", "TT")
    (bad / file).unlink() if content is None else (bad / file).write_bytes(content)
    runs, broken = load_runs([tmp_path])
    assert [run.path for run in runs] == [good]
    assert [b.path for b in broken] == [bad] and expected in broken[0].reason


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("status.json", b"nonsense", "status.json cannot be read"),
        ("status.json", b'{"state": "dancing"}', "state 'dancing'"),
        ("status.json", None, "status.json is missing"),
        ("metrics.jsonl", b'{"epoch": 0}\nnonsense\n{"epoch": 1}\n', "1 line(s) cannot be read (2)"),
        ("metrics.jsonl", b"\xff\xff\n", "1 line(s) cannot be read (1)"),
        ("environment.json", b"[", "environment.json cannot be read"),
    ],
)
def test_damage_beside_the_result_is_said_and_not_fatal(
    tmp_path: Path, file: str, content: bytes | None, expected: str
) -> None:
    run = write_run(tmp_path, "run", "TT")
    (run / file).unlink() if content is None else (run / file).write_bytes(content)
    (loaded,), broken = load_runs([tmp_path])
    assert broken == [] and loaded.finished and expected in " ".join(loaded.problems)
    write_report([tmp_path], tmp_path / "report.html")


def test_results_with_missing_and_strange_figures_are_shown_with_holes(tmp_path: Path) -> None:
    run = write_run(tmp_path, "run", "TT")
    result = json.loads((run / "result.json").read_text())
    for key in ("avg", "latency_ms", "macs_paper", "deviations", "classes"):
        del result[key]
    result |= {"params_w": "many", "step_ms": float("nan"), "ratio_w": None}
    (run / "result.json").write_text(json.dumps(result))
    (run / "config.toml").write_text('format = "tt:m=8x20x20x18,n=4x4x4x4,r=4"\nshared = ["G9"]\n')
    groups, broken = write_report([tmp_path], tmp_path / "report.html")
    assert broken == [] and groups[0].spread("step_ms") is None
    assert json.loads(json.dumps(summary(groups, broken)))["groups"][0]["figures"]["params_w"] is None


def test_a_format_that_cannot_be_read_is_a_notice(tmp_path: Path) -> None:
    run = write_run(tmp_path, "run", "TT")
    (run / "config.toml").write_text('format = "future:m=2x2"\n')
    write_report([tmp_path], tmp_path / "report.html")
    assert "unknown format" in (tmp_path / "report.html").read_text()


def test_equal_names_in_two_folders_stay_apart(tmp_path: Path) -> None:
    write_run(tmp_path / "one", "same", "TT")
    write_run(tmp_path / "two", "same", "TT")
    groups = group_runs(load_runs([tmp_path])[0])
    assert sorted(group.label for group in groups) == ["same (one)", "same (two)"]


def test_nothing_to_report_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KronecellError, match="no run directory"):
        find_runs([tmp_path])
    with pytest.raises(KronecellError, match="does not exist"):
        find_runs([tmp_path / "nowhere"])


def run_cli(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([*arguments])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def test_the_command_writes_a_page_json_and_markdown(
    capsys: pytest.CaptureFixture[str], mixed: Path, tmp_path: Path
) -> None:
    target = tmp_path / "r.html"
    code, out, err = run_cli(capsys, "report", str(mixed), "--out", str(target))
    assert code == 0 and f"wrote {target}" in out and "broken run" in err and target.is_file()
    code, out, _ = run_cli(capsys, "report", str(mixed), "--json")
    facts = json.loads(out)
    assert code == 0 and len(facts["groups"]) == 4 and len(facts["broken"]) == 1 and len(facts["runs"]) == 4
    code, out, _ = run_cli(capsys, "report", str(mixed), "--markdown")
    assert code == 0 and out.startswith("| experiment |") and "<script>" not in out
    assert [*tmp_path.iterdir()] == [target]


def test_the_commands_errors_are_one_line(capsys: pytest.CaptureFixture[str], mixed: Path, tmp_path: Path) -> None:
    for arguments in (
        (str(tmp_path),),
        (str(tmp_path / "nowhere"),),
        (str(mixed), "--out", str(tmp_path / "no" / "r.html")),
        (str(mixed), "--json", "--markdown"),
    ):
        code, _, err = run_cli(capsys, "report", *arguments)
        assert code == 2 and err.startswith("kronecell: error: ") and err.count("\n") == 1
