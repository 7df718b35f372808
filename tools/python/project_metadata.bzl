"""The version of specialized_decode/__init__.py, for BUILD files to load.

A BUILD file cannot read other files, and the wheel's file name holds the version.
"""

_PREFIX = "__version__ = \""

def _project_metadata_impl(repository_ctx):
    source = repository_ctx.read(Label("//:specialized_decode/__init__.py"))
    versions = [
        line[len(_PREFIX):].split("\"")[0]
        for line in source.splitlines()
        if line.startswith(_PREFIX)
    ]
    if len(versions) != 1:
        fail("specialized_decode/__init__.py: expected one line '%s...\"', found %d" % (_PREFIX, len(versions)))
    repository_ctx.file("BUILD.bazel", "")
    repository_ctx.file("version.bzl", "VERSION = \"%s\"\n" % versions[0])

project_metadata = repository_rule(
    implementation = _project_metadata_impl,
    local = True,
)
