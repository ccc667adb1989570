# SPDX-License-Identifier: Apache-2.0
# Conventions: spack.readthedocs.io/en/latest/build_systems/pythonpackage.html, and py_mpi4py in spack/spack-packages.

import os

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyHvdlite(PythonPackage):
    """Data-parallel training for PyTorch, TensorFlow and Keras over MPI, with Horovod's API, in pure Python.

    Spack takes the sdist from the folder where it is called: `python -m build` makes it in `dist/`.
    """

    url = f"file://{os.getcwd()}/hvdlite-0.1.0.tar.gz"
    manual_download = True

    license("Apache-2.0")

    version("0.1.0")  # add sha256="...", of the sdist that the site has built

    variant("torch", default=True, description="Install PyTorch, too")
    variant("tensorflow", default=False, description="Install TensorFlow and Keras, too")

    depends_on("py-setuptools@77:", type="build")

    with default_args(type=("build", "run")):
        depends_on("python@3.11:")
        depends_on("py-numpy@1.26:")
        depends_on("py-mpi4py@4.0:")
        depends_on("py-ml-dtypes@0.4:")
        depends_on("py-rich@13:")
        depends_on("py-cloudpickle@3:")
        depends_on("py-pyyaml@6:")

    with default_args(type="run"):
        depends_on("py-torch@2.8:", when="+torch")
        depends_on("py-tensorflow@2.18:", when="+tensorflow")
        depends_on("py-keras@3.6:", when="+tensorflow")

    @property
    def import_modules(self):
        return ["hvdlite", "hvdlite_launcher"]  # other modules need a framework
