"""The list of packages, which pyproject.toml cannot compute: each top-level package and its inner ones."""

import tomllib
from pathlib import Path

from setuptools import find_packages, setup

_FOLDERS = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]

setup(
    packages=[
        "specialized_decode",
        *_FOLDERS,
        *(f"{package}.{inner}" for package, folder in _FOLDERS.items() for inner in find_packages(folder)),
    ]
)
