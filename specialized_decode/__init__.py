"""Import root of the packages: beside this folder in a checkout and in Bazel's runfiles, inside it in a wheel."""

import os

__version__ = "0.1.0"

# Not resolved: Bazel's runfiles are links, and behind them lie the packages that a target did not declare.
_here = os.path.dirname(os.path.abspath(__file__))
if not os.path.isdir(os.path.join(_here, "backbone")):
    __path__.append(os.path.dirname(_here))
