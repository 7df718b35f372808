"""A Python toolchain on an interpreter of this machine, such as a virtual environment's."""

_BUILD = """\
load("@rules_python//python:defs.bzl", "py_runtime", "py_runtime_pair")

exports_files(["environment.txt"])

py_runtime(
    name = "py3_runtime",
    interpreter_path = "{path}",
    python_version = "PY3",
    visibility = ["//visibility:public"],
)

py_runtime_pair(
    name = "py_runtime_pair",
    py3_runtime = ":py3_runtime",
)

toolchain(
    name = "py_toolchain",
    toolchain = ":py_runtime_pair",
    toolchain_type = "@bazel_tools//tools/python:toolchain_type",
)
"""

# Printed by the interpreter: its path, then everything installed beside it.
_DESCRIBE = """\
import sys
from importlib.metadata import distributions
print(sys.executable)
print("python", sys.version.replace(chr(10), " "))
print(*sorted({f"{d.metadata['Name']} {d.version}" for d in distributions()}), sep=chr(10))
"""

def _local_python_impl(repository_ctx):
    path = repository_ctx.os.environ.get("SPECIALIZED_DECODE_PYTHON", "")
    chosen = path != ""
    if not chosen:
        found = repository_ctx.which("python3")
        if found == None:
            fail("no python3 on PATH; set --repo_env=SPECIALIZED_DECODE_PYTHON=/path/to/python")
        path = str(found)
    result = repository_ctx.execute([path, "-c", _DESCRIBE])
    if result.return_code != 0:
        fail("%s does not run: %s" % (path, result.stderr))
    executable, _, environment = result.stdout.partition("\n")

    # A chosen path is kept as it is: a virtual environment is found through the path used. What PATH
    # names may be a version manager's shim, which depends on the folder it is called in.
    repository_ctx.file("BUILD.bazel", _BUILD.format(path = path if chosen else executable))

    # Tests depend on this file, so that they run again when a dependency's version changes.
    repository_ctx.file("environment.txt", environment)

local_python = repository_rule(
    implementation = _local_python_impl,
    configure = True,
    environ = [
        "PATH",
        "SPECIALIZED_DECODE_PYTHON",
    ],
    local = True,
)
