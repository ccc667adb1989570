"""Packaging. The launcher's package lies in launcher/, so that no module called `launcher` is installed."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["hvdlite", "hvdlite.*"]), *find_packages("launcher")],
    package_dir={"": ".", "hvdlite_launcher": "launcher/hvdlite_launcher"},
    package_data={"hvdlite": ["py.typed"], "hvdlite_launcher": ["py.typed"]},
)
