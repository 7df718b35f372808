"""decode_package: one package of the import root specialized_decode."""

load("@rules_python//python:defs.bzl", "py_library")

def decode_package(name, visibility, deps = [], data = []):
    """Declares the library of a top-level folder, imported as specialized_decode.<name>.

    Args:
        name: the folder's name.
        visibility: who may depend on it, from the package groups of //:BUILD.bazel.
        deps: the packages it imports.
        data: files that it reads at run time, and that go into the wheel.
    """
    srcs = native.glob(["**/*.py"])
    py_library(
        name = name,
        srcs = srcs,
        data = data,
        visibility = visibility,
        deps = ["//specialized_decode"] + deps,
    )
    native.filegroup(
        name = "sources",
        srcs = srcs + data,
        visibility = [
            "//:__pkg__",
            "//:development",
        ],
    )
