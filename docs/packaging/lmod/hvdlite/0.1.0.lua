-- Conventions: lmod.readthedocs.io, "An Introduction to Writing Modulefiles" and "Dependent Modules".
-- Lmod takes the name and the version from this file's place: MODULEPATH/hvdlite/0.1.0.lua.
-- A site edits the first three lines, and the names in depends_on:
local root   = "/apps"        -- hvdlite is installed into root/hvdlite/0.1.0, as README.md beside this folder shows
local python = "3.11"         -- the version of the Python that installed it
local mpi    = "openmpi"      -- the module of the MPI that mpi4py was built with

local prefix = pathJoin(root, myModuleName(), myModuleVersion())

help([[
Data-parallel training for PyTorch, TensorFlow and Keras over MPI.

  hvdliterun --check                 tells what this node is ready for
  hvdliterun -np 4 python train.py   starts four ranks
]])

whatis("Name: " .. myModuleName())
whatis("Version: " .. myModuleVersion())
whatis("Category: library, machine learning, MPI")
whatis("License: Apache-2.0")
whatis("Description: Data-parallel training for PyTorch, TensorFlow and Keras over MPI, with Horovod's API")

depends_on(atleast("python", "3.11"))
depends_on(mpi)

prepend_path("PATH", pathJoin(prefix, "bin"))
prepend_path("PYTHONPATH", pathJoin(prefix, "lib/python" .. python .. "/site-packages"))
