"""Static checks: `python tools/lint.py [ruff|format|mypy]...`, all of them by default."""

import importlib.util
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).absolute().parent.parent
IMPORT_ROOT = "specialized_decode"
# What is checked beside the packages.
DEVELOPMENT = ("benchmarks", "tests", "tools")
CHECKS = ("ruff", "format", "mypy")


def packages() -> list[str]:
    """The top-level folders that are packages of the import root, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return sorted(project["tool"]["setuptools"]["package-dir"].values())


def installed(check: str) -> bool:
    """Whether the tool of a check is there; a GPU host may have only what the decoder needs."""
    return importlib.util.find_spec("mypy" if check == "mypy" else "ruff") is not None


def run(check: str) -> bool:
    """Runs one of `CHECKS`, prints what it finds, and returns whether it found nothing."""
    if check == "mypy":
        return _mypy()
    command = ["check", "--output-format=concise"] if check == "ruff" else ["format", "--check"]
    return subprocess.run([sys.executable, "-m", "ruff", *command, "."], cwd=ROOT).returncode == 0


def _mypy() -> bool:
    with tempfile.TemporaryDirectory() as work:
        _lay_out(Path(work))
        folders = [name for name in (IMPORT_ROOT, *DEVELOPMENT) if any(Path(work, name).rglob("*.py"))]
        command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
        command += ["--cache-dir", str(ROOT / ".mypy_cache"), "--explicit-package-bases"]
        result = subprocess.run(
            command + folders, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    print(_checkout_paths(result.stdout, packages()), end="", flush=True)
    return result.returncode == 0


def _lay_out(work: Path) -> None:
    """Links the sources under `work` as they lie in a wheel, where mypy finds them by their module names."""
    root = work / IMPORT_ROOT
    root.mkdir()
    for source in (ROOT / IMPORT_ROOT).iterdir():
        if source.is_file():
            (root / source.name).symlink_to(source)
    for package in packages():
        (root / package).symlink_to(ROOT / package)
    for folder in DEVELOPMENT:
        (work / folder).symlink_to(ROOT / folder)


def _checkout_paths(output: str, names: Sequence[str]) -> str:
    """Turns the paths of the laid-out tree into those of the checkout."""
    return re.sub(rf"^{IMPORT_ROOT}/({'|'.join(names)})/", r"\1/", output, flags=re.MULTILINE)


def main(argv: list[str]) -> int:
    """Command line: the names of the checks to run."""
    unknown = [name for name in argv if name not in CHECKS]
    if unknown:
        print(f"error: no check {', '.join(unknown)}; there are {', '.join(CHECKS)}", file=sys.stderr)
        return 2
    results = [run(name) for name in argv or CHECKS]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
