"""Tests that run under pytest: package_tests for a folder of them, pytest_test for one file."""

load("@rules_python//python:defs.bzl", "py_test")

_SUPPORT = ["//tests:conftest"]

def pytest_test(name, src, srcs = [], data = [], deps = [], interpreter_from = None, **kwargs):
    """A py_test of one test file.

    Args:
        name: the target's name.
        src: the file pytest collects.
        srcs: further sources, such as a folder's conftest.py.
        data: files that the test reads.
        deps: libraries that the test imports; tests/conftest.py is always there.
        interpreter_from: the variable that names another interpreter to run it.
        **kwargs: passed on to py_test.
    """
    py_test(
        name = name,
        srcs = [src, "//tools/python:pytest_main.py"] + srcs,
        main = "//tools/python:pytest_main.py",
        args = (["--interpreter-from=" + interpreter_from] if interpreter_from else []) + ["$(rootpath %s)" % src],
        data = data + ["//:pyproject.toml", "@local_python//:environment.txt"],
        deps = deps + _SUPPORT,
        **kwargs
    )

def package_tests(name, deps, data = [], sizes = {}, interpreter_from = None):
    """One target per test_*.py under this folder, and a test_suite of them all.

    A file's target has its name without .py. Files named test_gpu_*.py need a GPU: they get the tags
    `gpu`, which .bazelrc leaves out unless --config=gpu is given, and `exclusive`.

    Args:
        name: the suite's name: the folder's.
        deps: libraries that the tests import.
        data: files that the tests read.
        sizes: Bazel's test size by file name, where `medium` (GPU: `large`) does not fit.
        interpreter_from: the variable that names another interpreter to run them.
    """
    files = native.glob(["**/test_*.py"], allow_empty = True)
    support = native.glob(["**/*.py"], exclude = ["**/test_*.py"], allow_empty = True)
    unknown = [file for file in sizes if file not in files]
    if unknown:
        fail("sizes names files that do not exist: %s" % ", ".join(unknown))
    for file in files:
        gpu = file.split("/")[-1].startswith("test_gpu_")
        pytest_test(
            name = file[:-len(".py")],
            size = sizes.get(file, "large" if gpu else "medium"),
            src = file,
            srcs = support,
            data = data,
            tags = ["exclusive", "gpu"] if gpu else [],
            deps = deps,
            interpreter_from = interpreter_from,
        )

    # Without tests, a test_suite would stand for every test of the package; there is none.
    native.test_suite(
        name = name,
        tests = [file[:-len(".py")] for file in files],
    )
