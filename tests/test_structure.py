"""The shape of the source tree: imports go downward only, and optional packages are imported where they are used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "kronecell"
OPTIONAL = {"av", "matplotlib", "plotly", "onnx", "onnxruntime", "onnxscript", "rich", "tensorboard", "psutil", "scipy"}

# From the bottom up; a module may import from layers below its own and from its own package.
LAYERS = [
    {"errors"},
    {"atomic", "network", "progress"},
    {"order", "modes"},
    {"steps"},
    {"compiled", "processor", "space", "watched"},
    {"matrices"},
    {"narrow"},
    {"last", "operation", "lstm_kernel"},
    {"lowering"},
    {"fold", "products"},
    {"hot", "bytes"},
    {"joined"},
    {"plan"},
    {"split"},
    {"fit"},
    {"formats"},
    {"theory", "candidates", "facts", "layout"},
    {"kept", "tune", "drawing"},
    {"layer_formats"},
    {"linear"},
    {"recurrence", "dense_rnn"},
    {"sequences"},
    {"recurrent"},
    {"rnn"},
    {"accounting", "suggest", "paper_printed"},
    {"files", "paper"},
    {"compress", "export", "data"},
    {"model", "world"},
    {"train", "checkpoint", "parallel"},
    {"measure", "display", "environment", "experiment_file", "branch_study"},
    {"protocol"},
    {"experiment"},
    {"report", "explore"},
    {"commands"},
    {"cli"},
    {"__main__", "__init__"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def unit(path: Path) -> str:
    """The name in LAYERS: the top-level module or the sub-package."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for_types = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    unseen = {id(inner) for block in for_types for inner in ast.walk(block)}  # names for the type checker only
    for node in ast.walk(tree):
        if id(node) in unseen:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
            if node.module == "kronecell":
                names |= {f"kronecell.{alias.name}" for alias in node.names}
    return names


def test_every_module_has_its_layer() -> None:
    assert {unit(path) for path in modules()} <= {*RANK}


def test_imports_go_downward_only() -> None:
    wrong = []
    for path in modules():
        own = unit(path)
        for name in imported(ast.parse(path.read_text())):
            parts = name.split(".")
            ours = parts[0] == "kronecell" and len(parts) > 1 and parts[1] in RANK and parts[1] != own
            if ours and RANK[parts[1]] >= RANK[own]:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert wrong == []


def test_there_is_no_utils_module() -> None:
    assert [path for path in modules() if "util" in path.stem] == []


def test_importing_kronecell_needs_no_optional_package() -> None:
    code = f"import sys, kronecell, kronecell.cli.main; print(sorted({OPTIONAL!r} & {{*sys.modules}}))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    found = set(ast.literal_eval(output)) - {"rich"}  # typer itself brings and imports rich
    assert found == set()


def test_the_public_names_exist() -> None:
    import kronecell

    assert sorted(kronecell.__all__, key=str.lower) == sorted(set(kronecell.__all__), key=str.lower)
    for name in kronecell.__all__:
        assert hasattr(kronecell, name), name
