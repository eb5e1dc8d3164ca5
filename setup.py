"""The packages that are installed. `daemon/` is installed as `elasticd`; all else stands in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["elastic", "elastic.*"]),
        "elasticd",
        *(f"elasticd.{name}" for name in find_packages("daemon")),
    ]
)
