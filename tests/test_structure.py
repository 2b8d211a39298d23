"""The shape of the source tree: imports go downward only, torch and optional packages are imported where used."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGE = Path(__file__).resolve().parents[1] / "kronecell"
OPTIONAL = {"av", "h5py", "matplotlib", "onnx", "onnxruntime", "onnxscript", "rich", "tensorboard", "psutil", "scipy"}

# From the bottom up: a package imports from those above its line here, and from itself.
ORDER = (
    "errors",
    "plans",
    "ops",
    "formats",
    "nn",
    "deploy",
    "data",
    "training",
    "compress",
    "paper",
    "report",
    "cli",
)


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Dotted names that a file imports, also inside functions and for type checkers."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_the_tree_is_the_twelve_packages() -> None:
    found = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in modules()}
    assert found == {*ORDER, "__init__", "__main__"}


def test_imports_go_downward_only() -> None:
    wrong = []
    for path in modules():
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for name in imported(path) if own in ORDER else ():
            root, _, rest = name.partition(".")
            other = rest.partition(".")[0]
            if root == "kronecell" and other in ORDER and ORDER.index(other) > ORDER.index(own):
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert wrong == []


def test_nothing_from_torch_c_and_no_foreign_functions() -> None:
    wrong = []
    for path in modules():
        attributes = {ast.unparse(n) for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)}
        for name in imported(path) | attributes:
            if name.startswith("torch._C") or name.partition(".")[0] == "ctypes":
                wrong.append(f"{path.relative_to(PACKAGE)}: {name}")
    assert wrong == []


def test_there_is_no_utils_module() -> None:
    assert [path for path in modules() if "util" in path.stem] == []


def loaded_by(code: str) -> set[str]:
    """The packages that a new process has imported after running `code`."""
    code = f"import sys\n{code}\nprint({{name.partition('.')[0] for name in sys.modules}})"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    found: set[str] = ast.literal_eval(output.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    "code",
    [
        "import kronecell; kronecell.ShapeError; dir(kronecell)",
        "import kronecell.cli.main",
        "from kronecell.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass",
        "from kronecell.cli.main import main\ntry: main(['--version'])\nexcept SystemExit: pass",
        "import kronecell.data.worker",
        "from kronecell import data; data.find_dataset, data.decode, data.prepare",
    ],
)
def test_torch_is_imported_only_when_something_needs_it(code: str) -> None:
    assert "torch" not in loaded_by(code)


def test_importing_everything_public_needs_no_optional_package() -> None:
    found = loaded_by("import kronecell, kronecell.cli.main\nfor name in kronecell.__all__: getattr(kronecell, name)")
    assert "torch" in found and found & OPTIONAL <= {"rich"}  # typer imports rich


def test_the_public_names_exist() -> None:
    import kronecell

    assert sorted(kronecell.__all__, key=str.lower) == sorted(set(kronecell.__all__), key=str.lower)
    for name in kronecell.__all__:
        assert hasattr(kronecell, name) and name in dir(kronecell), name
    # A type checker reads the imports, Python the table: both must name the same.
    assert {*kronecell.__all__} <= defined(PACKAGE / "__init__.py")
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = kronecell.nonsense


def test_compress_is_a_function_and_a_package_in_either_order_of_imports() -> None:
    for code in (
        "import kronecell as kc; f = kc.compress; from kronecell.compress.report import Report",
        "import kronecell.compress.model, kronecell as kc; f = kc.compress",
    ):
        check = "; assert callable(f) and callable(kc.compress) and kc.compress.Report and callable(kc.suggest)"
        loaded_by(f"{code}{check}; import inspect; assert 'model' in inspect.signature(kc.compress).parameters")


def test_every_file_that_is_no_module_is_package_data_and_every_pattern_finds_one() -> None:
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["kronecell"]
    ignored = {".py", ".pyc", ".so"}  # libraries are built by the installation
    files = [p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*") if p.is_file() and p.suffix not in ignored]
    assert [f for f in files if not any(fnmatch(f, pattern) for pattern in patterns)] == []
    data = [pattern for pattern in patterns if not pattern.endswith(".so")]
    assert [pattern for pattern in data if not any(fnmatch(f, pattern) for f in files)] == []


def test_modules_import_on_systems_without_posix_locks() -> None:
    modules = "kronecell.data.cache, kronecell.training.run, kronecell.cli.main, kronecell.deploy.atomic"
    loaded_by(f"sys.modules['fcntl'] = None; import {modules}")


ROOT = PACKAGE.parent
FENCE = re.compile(r"^```python\n(.*?)^```", re.S | re.M)


def outside_sources() -> list[tuple[str, str]]:
    """(name, code) of benchmarks, examples, scripts of the documentation and every Python block of its pages."""
    scripts = [path for folder in ("benchmarks", "examples", "docs") for path in sorted((ROOT / folder).glob("*.py"))]
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = [(path.name, path.read_text()) for path in scripts]
    return found + [(page.name, code) for page in pages for code in FENCE.findall(page.read_text())]


def defined(module: Path) -> set[str]:
    """Names at the top level of a file, those it imports and those a lazy table quotes among them."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def file_of(module: str) -> Path | None:
    path = ROOT / module.replace(".", "/")
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def test_what_benchmarks_examples_and_pages_import_exists() -> None:
    """By reading alone: a module that was renamed is noticed without running every benchmark."""
    missing = []
    for source, code in outside_sources():
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Import):
                named = [(alias.name, "") for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                named = [(node.module or "", alias.name) for alias in node.names]
            else:
                continue
            for module, name in named:
                if module.partition(".")[0] != "kronecell":
                    continue
                file = file_of(module)
                if file is None or (name and file_of(f"{module}.{name}") is None and name not in defined(file)):
                    missing.append(f"{source}: {module} {name}".rstrip())
    assert missing == []


def test_the_api_page_names_what_exists() -> None:
    missing = []
    for name in re.findall(r"^::: (\S+)", (ROOT / "docs" / "api.md").read_text(), re.M):
        module, _, last = name.rpartition(".")
        file = file_of(module)
        if file_of(name) is None and (file is None or last not in defined(file)):
            missing.append(name)
    assert missing == []
