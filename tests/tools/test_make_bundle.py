"""The bundle for a GPU host: what goes into it, how it is cut, and that the host's script puts it together again."""

import os
import random
import shutil
import stat
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tools import lint
from tools.gpu import make_bundle
from tools.gpu.make_bundle import (
    Archive,
    BundleError,
    cut,
    fill_parts,
    make_archive,
    prepare_tree,
    read_archives,
    sums,
    write_parts,
    write_project,
)

SCRIPTS = lint.ROOT / "tools" / "gpu"
needs_tools = pytest.mark.skipif(
    not all(shutil.which(tool) for tool in ("bash", "tar", "xz", "sha256sum")),
    reason="needs bash, tar, xz and sha256sum",
)


def test_the_list_is_pinned_and_complete() -> None:
    archives = {archive.name: archive for archive in read_archives()}
    assert archives["vllm"].requirements == ("vllm==0.33.0",)
    names = [requirement.split("==")[0] for archive in archives.values() for requirement in archive.requirements]
    assert len(set(names)) == len(names)
    # What the host has of its own must not be shadowed.
    assert not {"torch", "triton", "transformers", "numpy"} & set(names)


def test_loose_requirements_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bundle.toml"
    path.write_text('[a]\nrequirements = ["one==1", "two>=2", "three"]\n')
    with pytest.raises(BundleError, match=r"a\.requirements: found two>=2, three, expected NAME==VERSION"):
        read_archives(path)


def test_digest_follows_the_content() -> None:
    archive = Archive("a", ("one==1",), ("x*",))
    assert archive.digest() == Archive("a", ("one==1",), ("x*",)).digest()
    for other in (
        Archive("a", ("one==2",), ("x*",)),
        Archive("a", ("one==1",)),
        Archive("a", ("one==1",), ("x*",), ("t",)),
    ):
        assert other.digest() != archive.digest()


@pytest.mark.parametrize(
    ("size", "pieces"), [(0, []), (1, [(0, 1)]), (10, [(0, 10)]), (11, [(0, 10), (10, 1)]), (20, [(0, 10), (10, 10)])]
)
def test_cut(size: int, pieces: list[tuple[int, int]]) -> None:
    assert cut(size, 10) == pieces


def test_parts_are_filled_largest_first() -> None:
    sizes = {"a": 6, "b": 5, "c": 4, "d": 4, "e": 1}
    parts = fill_parts(sizes, 10)
    assert parts == [["a", "c"], ["b", "d", "e"]]
    with pytest.raises(BundleError, match="big: found 11 bytes, expected at most 10"):
        fill_parts({"big": 11}, 10)


def wheel(folder: Path, name: str, files: dict[str, tuple[str, int]]) -> Path:
    """A wheel of files with their text and mode."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, (text, mode) in files.items():
            entry = zipfile.ZipInfo(file)
            entry.external_attr = (stat.S_IFREG | mode) << 16
            archive.writestr(entry, text)
    return path


def test_tree(tmp_path: Path) -> None:
    files = {"p/run": ("#!", 0o755), "p/a.py": ("1", 0o644), "p/b.so": ("2", 0o644), "p/skip/c.py": ("3", 0o644)}
    archive = Archive("a", ("one==1",), ("p/skip", "p/*.so"), ("p/b.py",), (("p/link", "a.py"),))
    tree = tmp_path / "tree"
    tree.mkdir()
    prepare_tree(archive, [wheel(tmp_path, "one", files)], tree)
    assert sorted(str(path.relative_to(tree)) for path in tree.rglob("*") if not path.is_dir()) == [
        "p/a.py",
        "p/b.py",
        "p/link",
        "p/run",
    ]
    assert os.access(tree / "p/run", os.X_OK)
    assert not os.access(tree / "p/a.py", os.X_OK)
    assert (tree / "p/link").read_text() == "1"


@pytest.mark.parametrize(
    ("archive", "message"),
    [
        (Archive("a", (), ("p/none*",)), r"a: leave_out p/none\*: found nothing"),
        (Archive("a", (), links=(("p/link", "gone"),)), "a: links p/link: found no gone"),
    ],
)
def test_a_list_that_fits_no_more_is_refused(tmp_path: Path, archive: Archive, message: str) -> None:
    one = wheel(tmp_path, "one", {"p/a.py": ("1", 0o644)})
    with pytest.raises(BundleError, match=message):
        prepare_tree(archive, [one], tmp_path / "tree")


Unpack = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle of two archives in three parts or more; no index is asked."""

    def download(archive: Archive, folder: Path) -> list[Path]:
        name = archive.name
        noise = random.Random(name).randbytes(6000).hex()
        return [wheel(folder, name, {f"{name}/data": (name + noise, 0o644), f"{name}/run": ("", 0o755)})]

    monkeypatch.setattr(make_bundle, "download", download)
    out = tmp_path / "bundle"
    (out / "work").mkdir(parents=True)
    made = {name: make_archive(Archive(name, (f"{name}==1",)), out / "work") for name in ("one", "two")}
    parts = write_parts(made, out, limit=4000)
    assert len(parts) > 2
    assert all(sum(f.stat().st_size for f in part.iterdir() if f.suffix != ".sha256") <= 4000 for part in parts)
    return out


@pytest.fixture
def unpack(tmp_path: Path) -> Unpack:
    """Runs a script of tools/gpu as on the host, whose folder is `host` and whose home is `home`."""
    (tmp_path / "home").mkdir()
    environment = os.environ | {"SPECIALIZED_DECODE_GPU": str(tmp_path / "host"), "HOME": str(tmp_path / "home")}

    def run(*arguments: Path | str, script: str = "unpack.sh") -> "subprocess.CompletedProcess[str]":
        command = ["bash", str(SCRIPTS / script), *map(str, arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    return run


@needs_tools
def test_host_puts_the_parts_together(bundle: Path, unpack: Unpack, tmp_path: Path) -> None:
    parts = sorted(bundle.glob("part*"), reverse=True)
    for index, part in enumerate(parts[:-1]):
        result = unpack(part)
        assert result.returncode == 0
        assert result.stdout.startswith("taken; still to come: ")
        waiting = {path.name for later in parts[index + 1 :] for path in later.iterdir() if path.suffix != ".sha256"}
        assert set(result.stdout.split(": ")[1].split()) == waiting
    result = unpack(parts[-1])
    assert (result.returncode, result.stderr) == (0, "")
    site = tmp_path / "host" / "site"
    assert result.stdout.endswith(f"in {site}; next: . {tmp_path / 'host' / 'env.sh'}\n")
    for name in ("one", "two"):
        assert (site / name / "data").read_text() == name + random.Random(name).randbytes(6000).hex()
        assert os.access(site / name / "run", os.X_OK)
    shown = subprocess.run(
        ["bash", "-c", f". {tmp_path}/host/env.sh && echo $PYTHONPATH"], capture_output=True, text=True, check=True
    ).stdout
    assert shown.split(":")[:2] == [f"{tmp_path}/host/project", str(site)]
    # Done work is not done again; a part whose archive changed is.
    (site / "one" / "data").unlink()
    assert unpack().returncode == 0
    assert not (site / "one" / "data").exists()


@needs_tools
def test_host_refuses_damage(bundle: Path, unpack: Unpack, tmp_path: Path) -> None:
    part = bundle / "part1"
    (piece,) = (path for path in part.iterdir() if path.suffix != ".sha256")
    whole = piece.read_bytes()
    piece.write_bytes(b"x" + whole[1:])
    result = unpack(part)
    assert result.returncode == 1
    assert result.stderr.endswith(f"error: {part}: damaged; send it again\n")
    assert not (tmp_path / "host" / "store" / piece.name).exists()
    piece.write_bytes(whole)
    (part / "unknown").touch()
    result = unpack(part)
    assert (result.returncode, result.stderr) == (1, f"error: {part}/unknown: found no sum of it\n")
    result = unpack(bundle / "part99")
    assert (result.returncode, result.stderr.split(":")[2]) == (1, " found no folder, expected a part of the bundle\n")


@needs_tools
def test_caches_go_there_and_back(bundle: Path, unpack: Unpack, tmp_path: Path) -> None:
    home = tmp_path / "home"
    result = unpack(tmp_path / "caches", script="save_caches.sh")
    assert (result.returncode, result.stderr) == (1, f"error: {home}: found no caches of compiled kernels\n")
    for name in (".triton/cache/a", ".cache/vllm/b", ".cache/other/c"):
        (home / name).parent.mkdir(parents=True)
        (home / name).write_text(name)
    result = unpack(tmp_path / "caches", script="save_caches.sh")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("saved .triton .cache/vllm: ")
    shutil.rmtree(home)
    home.mkdir()
    assert unpack(*sorted(bundle.glob("part*")), tmp_path / "caches").returncode == 0
    assert (home / ".triton/cache/a").read_text() == ".triton/cache/a"
    assert (home / ".cache/vllm/b").read_text() == ".cache/vllm/b"
    assert not (home / ".cache/other").exists()


@needs_tools
def test_the_plugin_of_a_new_project_takes_the_place_of_the_old(bundle: Path, unpack: Unpack, tmp_path: Path) -> None:
    unpack(*sorted(bundle.glob("part*")))
    for text in ("old", "new"):
        project = tmp_path / text
        one = wheel(project, "p", {f"{text}.py": (text, 0o644)})
        (project / "project.sha256").write_text(sums([one]))
        assert unpack(project).returncode == 0
    assert [path.name for path in (tmp_path / "host" / "project").iterdir()] == ["new.py"]


def test_project(tmp_path: Path) -> None:
    path = write_project(tmp_path)
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    assert "specialized_decode/runtime/executor.py" in names
    assert any(name.endswith(".dist-info/entry_points.txt") for name in names)
    assert not any(name.startswith("tests/") for name in names)
    assert (tmp_path / "project" / "project.sha256").read_text() == sums([path])


def test_a_failed_download_says_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_bundle.sys, "executable", shutil.which("false"))
    with pytest.raises(BundleError, match="a: pip download failed"):
        make_bundle.download(Archive("a", ("one==1",)), tmp_path)
    monkeypatch.setattr(make_bundle.sys, "executable", shutil.which("true"))
    with pytest.raises(BundleError, match="found 0 wheels, expected 1; remove the folder"):
        make_bundle.download(Archive("a", ("one==1",)), tmp_path)
