"""Builds the wheel of the files named, with no network and no build environment of its own."""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


def build_wheel(sources: list[Path], out: Path) -> None:
    """Builds a wheel of `sources`, relative to the current folder, the repository's root, into `out`.

    Raises:
        RuntimeError: the build fails, or names its wheel otherwise than `out`.
    """
    with tempfile.TemporaryDirectory() as work:
        tree = Path(work, "tree")
        for source in sources:
            target = tree / source
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
        dist = Path(work, "dist")
        # The wheel's bytes depend on its contents alone. 1980 is the first year a zip file can hold.
        env = dict(os.environ, SOURCE_DATE_EPOCH="315532800", HOME=work)
        env.pop("PYTHONPATH", None)
        command = [
            sys.executable,
            "-m",
            "build",
            "--wheel",
            "--no-isolation",
            "--outdir",
            str(dist),
            str(tree),
        ]
        result = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if result.returncode != 0:
            raise RuntimeError(f"the build failed:\n{result.stdout}")
        (wheel,) = dist.iterdir()
        if wheel.name != out.name:
            raise RuntimeError(f"built {wheel.name}, but {out.name} was asked for")
        shutil.copyfile(wheel, out)


def main(argv: list[str]) -> int:
    """Command line: --out WHEEL SOURCE..."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("sources", nargs="+", type=Path)
    args = parser.parse_args(argv)
    try:
        build_wheel(args.sources, args.out)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
