"""Packs vLLM, what it imports and this project's wheel for a GPU host that reaches no package index.

`python -m tools.gpu.make_bundle` writes .gpu-bundle/part1 and so on, each small enough to be sent alone, and
.gpu-bundle/project with the project's wheel. An archive that is there already is not made again.
README.md beside this file says how to use them. Needs pip, a package index, tar and xz.
"""

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tools import lint
from tools.python.build_wheel import build_wheel

BUNDLE = lint.ROOT / ".gpu-bundle"
PACKAGES = Path(__file__).absolute().with_name("bundle.toml")
# Large enough for a bundle of six parts, small enough for a transfer of 64 MiB that also holds the checkout.
PART_BYTES = 54_000_000
PYTHON_VERSION = "3.12"
# Oldest to newest glibc that a wheel of the host's may ask for.
PLATFORMS = (
    "any",
    "manylinux1_x86_64",
    "manylinux2010_x86_64",
    "manylinux2014_x86_64",
    *(f"manylinux_2_{minor}_x86_64" for minor in range(5, 40)),
)


class BundleError(RuntimeError):
    """A bundle that cannot be made; the message says what was found and what is expected."""


@dataclass(frozen=True)
class Archive:
    """One table of bundle.toml."""

    name: str
    requirements: tuple[str, ...]
    leave_out: tuple[str, ...] = ()
    touch: tuple[str, ...] = ()
    links: tuple[tuple[str, str], ...] = ()

    def digest(self) -> str:
        """Changes with anything that changes the archive's content."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]


def read_archives(path: Path = PACKAGES) -> list[Archive]:
    """The archives that `path` describes. Raises BundleError for requirements without an exact version."""
    archives = []
    for name, table in tomllib.loads(path.read_text(encoding="utf-8")).items():
        loose = [requirement for requirement in table["requirements"] if requirement.count("==") != 1]
        if loose:
            raise BundleError(f"{path}: {name}.requirements: found {', '.join(loose)}, expected NAME==VERSION")
        lists = {key: tuple(table.get(key, ())) for key in ("requirements", "leave_out", "touch")}
        archives.append(Archive(name, links=tuple(sorted(table.get("links", {}).items())), **lists))
    return archives


def cut(size: int, limit: int) -> list[tuple[int, int]]:
    """Cuts `size` bytes into pieces of at most `limit`: offset and length of each."""
    return [(start, min(limit, size - start)) for start in range(0, size, limit)]


def fill_parts(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Spreads files over few parts of at most `limit` bytes: largest first, each into the first part with room.

    Raises BundleError for a file that is larger than a part.
    """
    parts: list[tuple[int, list[str]]] = []
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        if size > limit:
            raise BundleError(f"{name}: found {size} bytes, expected at most {limit}")
        index = next((i for i, (used, _) in enumerate(parts) if used + size <= limit), len(parts))
        used, names = parts[index] if index < len(parts) else (0, [])
        parts[index : index + 1] = [(used + size, [*names, name])]
    return [names for _, names in parts]


def sums(files: Sequence[Path]) -> str:
    """Lines that `sha256sum --check` reads, sorted by name."""
    lines = []
    for file in sorted(files, key=lambda file: file.name):
        with file.open("rb") as stream:
            lines.append(f"{hashlib.file_digest(stream, 'sha256').hexdigest()}  {file.name}\n")
    return "".join(lines)


def unpack_wheel(wheel: Path, tree: Path) -> None:
    """Unpacks a wheel as an installer would, run bits included; zipfile alone drops them."""
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            path = archive.extract(entry, tree)
            mode = entry.external_attr >> 16
            if stat.S_ISREG(mode) and mode & stat.S_IXUSR:
                os.chmod(path, 0o755)


def prepare_tree(archive: Archive, wheels: Sequence[Path], tree: Path) -> None:
    """Lays out in `tree` what the archive holds. Raises BundleError for a pattern of bundle.toml that fits nothing."""
    for wheel in wheels:
        unpack_wheel(wheel, tree)
    for pattern in archive.leave_out:
        found = list(tree.glob(pattern))
        if not found:
            raise BundleError(f"{archive.name}: leave_out {pattern}: found nothing, expected files of its wheels")
        for path in found:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    for name in archive.touch:
        (tree / name).touch()
    for name, target in archive.links:
        if not (tree / name).parent.joinpath(target).exists():
            raise BundleError(f"{archive.name}: links {name}: found no {target}")
        (tree / name).symlink_to(target)


def download(archive: Archive, folder: Path) -> list[Path]:
    """Downloads the archive's wheels for the host, keeping those already in `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", PYTHON_VERSION, "--implementation", "cp", "--dest", str(folder)]
    command += [option for abi in ("cp312", "abi3", "none") for option in ("--abi", abi)]
    command += [option for platform in PLATFORMS for option in ("--platform", platform)]
    result = subprocess.run([*command, *archive.requirements], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if result.returncode != 0:
        raise BundleError(f"{archive.name}: pip download failed:\n{result.stdout.decode()}")
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != len(archive.requirements):
        found = f"found {len(wheels)} wheels, expected {len(archive.requirements)}"
        raise BundleError(f"{archive.name}: {folder}: {found}; remove the folder and try again")
    return wheels


def make_archive(archive: Archive, work: Path) -> Path:
    """The archive as a .tar.xz in `work`, made unless it is there."""
    target = work / f"{archive.name}-{archive.digest()}.tar.xz"
    if target.exists():
        return target
    folder = work / "wheels" / f"{archive.name}-{archive.digest()}"
    folder.mkdir(parents=True, exist_ok=True)
    wheels = download(archive, folder)
    with tempfile.TemporaryDirectory(dir=work) as temporary:
        tree, partial = Path(temporary, "tree"), Path(temporary, "archive")
        tree.mkdir()
        prepare_tree(archive, wheels, tree)
        command = [
            "tar",
            "--sort=name",
            "--owner=0",
            "--group=0",
            "--mtime=@315532800",
            "-C",
            str(tree),
            "-cf",
            "-",
            ".",
        ]
        with partial.open("wb") as out, subprocess.Popen(command, stdout=subprocess.PIPE) as tar:
            subprocess.run(["xz", "-T0", "-5"], stdin=tar.stdout, stdout=out, check=True)
        if tar.returncode != 0:
            raise BundleError(f"{archive.name}: tar failed with exit status {tar.returncode}")
        partial.rename(target)
    shutil.rmtree(folder)
    return target


def write_parts(archives: dict[str, Path], out: Path, limit: int = PART_BYTES) -> list[Path]:
    """Cuts archives into `out`/part1, part2, ..., and returns these folders.

    Every part has bundle.sha256, the sums of all parts' files, so that the host knows from any one part what is
    still to come.
    """
    for old in out.glob("part*"):
        shutil.rmtree(old)
    pieces = {
        f"{name}.tar.xz.{number:02d}": (path, offset, length)
        for name, path in archives.items()
        for number, (offset, length) in enumerate(cut(path.stat().st_size, limit))
    }
    files = []
    parts = []
    for number, names in enumerate(fill_parts({name: piece[2] for name, piece in pieces.items()}, limit), 1):
        part = out / f"part{number}"
        part.mkdir()
        parts.append(part)
        for name in names:
            path, offset, length = pieces[name]
            with path.open("rb") as stream:
                stream.seek(offset)
                (part / name).write_bytes(stream.read(length))
            files.append(part / name)
    text = sums(files)
    for part in parts:
        (part / "bundle.sha256").write_text(text, encoding="utf-8")
    return parts


def project_sources() -> list[Path]:
    """The files of the project's wheel, relative to the checkout."""
    files = [
        path.relative_to(lint.ROOT)
        for folder in (lint.IMPORT_ROOT, *lint.packages())
        for path in sorted((lint.ROOT / folder).rglob("*"))
        if path.is_file()
    ]
    packaged = [path for path in files if path.suffix == ".py" or path.name == "py.typed" or path.parts[1] == "data"]
    return [*packaged, *map(Path, ("pyproject.toml", "setup.py", "README.md", "LICENSE"))]


def write_project(out: Path) -> Path:
    """Builds the project's wheel of the checkout into the folder `out`/project, and returns the wheel.

    Made every time: the host reads the plugin's entry point from it.
    """
    folder = out / "project"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    wheel = folder / f"{lint.IMPORT_ROOT}-{_version()}-py3-none-any.whl"
    with contextlib.chdir(lint.ROOT):  # build_wheel takes paths relative to the repository
        build_wheel(project_sources(), wheel)
    (folder / "project.sha256").write_text(sums([wheel]), encoding="utf-8")
    return wheel


def _version() -> str:
    for line in (lint.ROOT / lint.IMPORT_ROOT / "__init__.py").read_text(encoding="utf-8").splitlines():
        if line.startswith("__version__"):
            return line.split('"')[1]
    raise BundleError(f"{lint.IMPORT_ROOT}/__init__.py: found no __version__")


def main(argv: list[str]) -> int:
    """Command line: [--out FOLDER] [--project-only]."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=BUNDLE, help="the bundle's folder (default: .gpu-bundle)")
    parser.add_argument("--project-only", action="store_true", help="only the project's wheel, in seconds")
    args = parser.parse_args(argv)
    out = args.out.absolute()
    try:
        if not args.project_only:
            work = out / "work"
            work.mkdir(parents=True, exist_ok=True)
            archives = {}
            for archive in read_archives():
                archives[archive.name] = make_archive(archive, work)
                print(f"{archive.name}: {archives[archive.name].stat().st_size / 1e6:.1f} MB", flush=True)
            for part in write_parts(archives, out):
                size = sum(file.stat().st_size for file in part.iterdir())
                print(f"{part}: {size / 1e6:.1f} MB, {', '.join(sorted(file.name for file in part.iterdir()))}")
        print(write_project(out))
    except (BundleError, OSError, RuntimeError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
