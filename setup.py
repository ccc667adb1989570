"""Packaging. The launcher's package and torch's plug-in lie in launcher/, so that no module called `launcher`
is installed."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["hvdlite", "hvdlite.*"]), *find_packages("launcher")],
    package_dir={"": ".", **{name: f"launcher/{name}" for name in find_packages("launcher")}},
    package_data={"hvdlite": ["py.typed"], "hvdlite_launcher": ["py.typed"]},
)
