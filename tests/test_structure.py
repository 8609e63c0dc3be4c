"""The design's rules about files: layer order, sizes, empty __init__, planning without torch, one reader of RANK."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "heptad"
LAYERS = (
    "errors units trace config cluster mesh precision models schedule recompute axes optim loader checkpoint account "
    "simulate plan report launch train api verify dryrun cli __main__"
).split()
ALONGSIDE = {("dryrun", "verify")}  # one level: neither imports the other
PLANNING = (
    "errors.py units.py trace.py config/*.py cluster/*.py mesh/layout.py precision/dtypes.py models/spec.py "
    "models/chunk.py models/resolve.py schedule/action.py schedule/lower.py schedule/check.py recompute/policy.py "
    "recompute/cost.py recompute/expert_cost.py recompute/peak.py recompute/sizes.py "
    "axes/*/cost.py axes/data/buckets.py optim/schedule.py optim/roles.py account/*.py report/*.py loader/order.py "
    "schedule/pipeline.py axes/pipeline/formulas.py simulate/*.py cli/*.py"
).split()
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def _sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def _module(path: Path) -> str:
    parts = ("heptad", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import of this package, those inside functions and for type checking too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] == "heptad")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            if node.module == "heptad":
                yield from ((node.lineno, f"heptad.{alias.name}") for alias in node.names)
            elif node.module is not None and node.module.startswith("heptad."):
                yield node.lineno, node.module


def _breaks_order(importer: str, imported: str) -> bool:
    if importer == imported:
        return False
    return LAYERS.index(imported) >= LAYERS.index(importer) or (importer, imported) in ALONGSIDE


def test_a_module_imports_its_own_folder_and_what_stands_to_its_left() -> None:
    wrong = []
    for path in _sources("src/heptad"):
        layer = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if layer == "__init__":
            assert not list(_imports(path)), path
            continue
        assert layer in LAYERS, f"{path} is in no layer of the design"
        for line, module in _imports(path):
            imported = module.partition(".")[2].split(".")[0]
            if imported not in ("", "__version__") and _breaks_order(layer, imported):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_axes_never_import_each_other() -> None:
    wrong = []
    for path in _sources("src/heptad/axes"):
        parts = path.relative_to(PACKAGE / "axes").parts
        for line, module in _imports(path):
            names = module.split(".")
            folders = [item.name for item in (PACKAGE / "axes").iterdir() if item.is_dir()]
            if (
                len(parts) > 1
                and names[1] == "axes"
                and len(names) > 2
                and names[2] in folders
                and names[2] != parts[0]
            ):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_the_order_test_sees_a_wrong_import() -> None:
    assert _breaks_order("config", "models") and not _breaks_order("models", "config")
    assert _breaks_order("train", "verify") and not _breaks_order("verify", "train")
    assert _breaks_order("dryrun", "verify") and _breaks_order("verify", "dryrun")


def test_no_file_is_longer_than_400_lines() -> None:
    sizes = {path.relative_to(ROOT): len(path.read_text(encoding="utf-8").splitlines()) for path in _everything()}
    assert not {str(path): lines for path, lines in sizes.items() if lines > MAX_FILE_LINES}


def test_no_function_is_longer_than_60_lines() -> None:
    long = []
    for path in _everything():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {lines} lines")
    assert not long, "\n".join(long)


def _everything() -> list[Path]:
    return _sources("src", "tests", "examples", "benchmarks")


def test_package_inits_are_empty_and_an_axis_has_a_docstring() -> None:
    for path in _sources("src/heptad"):
        if path.name != "__init__.py" or path.parent == PACKAGE:
            continue
        body = ast.parse(path.read_text(encoding="utf-8")).body
        if path.parent.parent == PACKAGE / "axes":
            assert len(body) == 1 and isinstance(body[0], ast.Expr), f"{path} is a docstring and nothing else"
            assert len(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "") > 100, path
        else:
            assert not body, f"{path} is not empty"


def test_every_module_says_what_it_is() -> None:
    for path in _sources("src/heptad"):
        if path.name != "__init__.py":
            assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path


def test_ranks_and_world_size_are_read_in_one_file() -> None:
    readers = {
        str(path.relative_to(PACKAGE))
        for path in _sources("src/heptad")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb")
    }
    assert readers <= {"launch/environ.py"}, readers


def test_the_planning_side_never_imports_torch() -> None:
    """All planning modules imported, a job loaded, checked and resolved: torch is still not there."""
    modules = sorted({_module(path) for pattern in PLANNING for path in PACKAGE.glob(pattern)})
    assert len(modules) > 20
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
        "from heptad.cli.job import ready\n"
        "from heptad.models.resolve import derived\n"
        "assert derived(ready('debug', []))['data_ranks'] == 1\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT / "src")})
