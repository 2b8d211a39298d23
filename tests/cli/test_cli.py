"""The command line as a person and a script meet it: output, JSON, help, and one-line errors with exit code 2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kronecell.cli.main import COMMANDS, build, main
from kronecell.cli.tables import text_table

KCP = "kcp:m=8x20x20x18,n=4x4x4x4,K=4,CA=4,CB=2"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([*arguments])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def test_the_module_runs_as_a_program() -> None:
    result = subprocess.run([sys.executable, "-m", "kronecell", "--version"], capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout.startswith("kronecell ")


def test_count_prints_parameters_ratio_and_every_order(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "count", KCP)
    assert code == 0
    assert "parameters 1,184" in out and "ratio 12,454.1x" in out
    for figure in ("11,943,936", "2,978,816", "234,240"):
        assert figure in out


def test_count_json_is_one_document_with_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "count", KCP, "--gates", "4", "--shared", "--rows", "96", "--json")
    facts = json.loads(out)
    assert code == 0 and err == ""
    assert facts["params"] == 1664 and facts["rows"] == 96
    assert facts["orders"]["algorithm2"]["flops"] == 2 * facts["orders"]["algorithm2"]["macs"]
    _, out, _ = run(capsys, "count", KCP, "--gates", "4", "--unshared", "A1", "--json")
    assert json.loads(out)["params"] == 1664 - 3 * 4 * 4 * 2


def test_count_order_prints_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "count", KCP, "--order", "algorithm1")
    assert "11,943,936 multiply-adds a row" in out


def test_formats_lists_all_ten(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "formats", "--json")
    facts = {f["kind"]: f for f in json.loads(out)}
    assert len(facts) == 10 and facts["kcp"]["space"] == "O(d (m+n) r K)"
    assert facts["kcp"]["example_macs"]["algorithm2"] == 2_978_816
    _, text, _ = run(capsys, "formats")
    assert "2,978,816" in text and "sum_k A_k (x) B_k" in text


def test_paper_tables_json_has_44_rows(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "paper", "tables", "--json")
    document = json.loads(out)
    assert code == 0 and err == "" and len(document["rows"]) == 44
    assert {"dataset", "shared", "format", "printed", "recomputed", "errata"} <= {*document["rows"][0]}
    _, out, _ = run(capsys, "paper", "tables", "--dataset", "ucf50", "--json")
    assert {row["dataset"] for row in json.loads(out)["rows"]} == {"UCF50"}


def test_paper_tables_text_marks_the_errata(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "paper", "tables")
    assert out.count("  * ") == 5 and "335.5*" in out and "994*" in out


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_complexity_plot_is_a_real_picture(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, suffix: str, magic: bytes
) -> None:
    target = tmp_path / f"curves.{suffix}"
    code, out, _ = run(capsys, "paper", "complexity", "--plot", str(target), "--json")
    assert code == 0 and json.loads(out)["K"] == 4
    assert target.read_bytes().startswith(magic) and target.stat().st_size > 10_000
    assert [*tmp_path.iterdir()] == [target]  # no temporary file left


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("count", "nope:m=2,n=2"), "unknown format 'nope'"),
        (("count", "tt:m=4x3,n=2x2,r=50"), "largest feasible value is 6"),
        (("count", KCP, "--order", "sideways"), "no order 'sideways'"),
        (("count", KCP, "--rows", "0"), "--rows must be at least 1"),
        (("count", KCP, "--gates", "0"), "gates must be at least 1"),
        (("count", KCP, "--rows", "many"), "--rows"),
        (("count", KCP, "--gates", "4", "--unshared", "Q"), "choose at least one of"),
        (("count",), "(see kronecell count --help)"),
        (("paper", "tables", "--nope"), "(see kronecell paper tables --help)"),
        (("frobnicate",), "No such command"),
        (("paper", "tables", "--dataset", "imagenet"), "unknown data set 'imagenet'"),
        (("paper", "complexity", "--plot", "curves.xyz"), "expected a file ending in .png"),
        (("paper", "complexity", "--plot", "no/such/folder/curves.png"), "cannot write"),
    ],
)
def test_errors_are_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *arguments)
    assert code == 2 and out == ""
    assert err.startswith("kronecell: error: ") and err.count("\n") == 1 and message in err


def test_help_shows_every_word_of_an_option(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import typer

    def words(text: str | None) -> str:
        return "".join((text or "").replace("`", "").replace("│", "").split())

    monkeypatch.setenv("COLUMNS", "200")
    todo: list[tuple[tuple[str, ...], Any]] = [((), typer.main.get_command(build()))]
    seen = 0
    while todo:
        path, command = todo.pop()
        todo += [((*path, name), sub) for name, sub in getattr(command, "commands", {}).items()]
        _, out, _ = run(capsys, *path, "--help")
        for parameter in command.params if path else ():
            assert words(getattr(parameter, "help", "")) in words(out), (path, parameter.name)
            seen += 1
    assert seen > 100


def test_a_table_that_is_too_wide_for_a_terminal_is_shown_in_parts() -> None:
    rows = [("up", "1", "2", "3"), ("counter-clockwise", "10", "20", "30")]
    header = ("class", "clips", "correct", "answered")
    whole = text_table(header, rows)
    assert text_table(header, rows, width=43) == whole and max(map(len, whole.splitlines())) == 43
    for width in (42, 30, 27):
        text = text_table(header, rows, width=width)
        assert max(map(len, text.splitlines())) <= width
        assert all(part.startswith("class  ") and "counter-clockwise" in part for part in text.split("\n\n"))
        assert {word for word in whole.split() if word.strip("-")} <= {*text.split()}
    assert text_table(header, rows, width=20).splitlines()[:4] == [
        "class     up",
        "clips     1",
        "correct   2",
        "answered  3",
    ]


@pytest.mark.parametrize("name", [*COMMANDS])
def test_every_command_has_help_with_an_example(capsys: pytest.CaptureFixture[str], name: str) -> None:
    import typer

    command = COMMANDS[name]
    if isinstance(command, typer.Typer):
        subcommands = [info.name or info.callback.__name__ for info in command.registered_commands if info.callback]
        calls = [(name, sub.replace("_", "-")) for sub in subcommands]
    else:
        calls = [(name,)]
    for call in calls:
        code, out, _ = run(capsys, *call, "--help")
        assert code == 0 and "Example" in out, call
