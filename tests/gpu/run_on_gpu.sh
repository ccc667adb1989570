#!/usr/bin/env bash
# Run all of tests/gpu and the benchmarks on a machine with one GPU. The machine needs only python3 with torch, CuPy,
# mpi4py and NumPy: no network, no pytest and no MPI. .mpi/openmpi-cuda.tar.xz is a CUDA-aware Open MPI that can be
# unpacked anywhere. .mpi/python is a folder of packages that this python3 lacks: pip install --no-deps
# --target .mpi/python ml_dtypes rich cloudpickle markdown-it-py mdurl pygments. If TensorFlow is installed, its checks
# run, too. The script prints one table, and its exit code is 0 if all checks pass. It takes less than 8 minutes.
#
#   tests/gpu/run_on_gpu.sh [checks|benchmarks]       without an argument: both
# From the environment: PYTHON (default: python3).
set -eu
cd "$(dirname "$0")/../.."
export HVDLITE_TEST_CUDA_MPI=${HVDLITE_TEST_CUDA_MPI:-/tmp/hvdlite-mpi/openmpi}
if [ ! -d "$HVDLITE_TEST_CUDA_MPI" ]; then
    mkdir -p /tmp/hvdlite-mpi
    "${PYTHON:-python3}" -m tarfile -e .mpi/openmpi-cuda.tar.xz /tmp/hvdlite-mpi  # Python's tarfile needs no xz
fi
export PYTHONPATH=$PWD:$PWD/.mpi/python XDG_CACHE_HOME=/tmp/hvdlite-cache

# Ranks connect over the loopback interface, which may be down on a bare machine.
"${PYTHON:-python3}" - <<'PYTHON' || echo "cannot bring up the loopback interface"
import fcntl, socket, struct
GET, SET, UP = 0x8913, 0x8914, 1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
    name, flags = struct.unpack("16sh", fcntl.ioctl(any_socket, GET, struct.pack("16sh", b"lo", 0)))
    if not flags & UP:
        fcntl.ioctl(any_socket, SET, struct.pack("16sh", name, flags | UP))
PYTHON

# Find libcuda.so.1 in folders that the loader does not search.
if ! ldconfig -p 2>/dev/null | grep -q 'libcuda\.so\.1'; then
    for folder in /usr/local/nvidia/lib64 /usr/lib64 /usr/local/cuda/compat; do
        [ ! -e "$folder/libcuda.so.1" ] || export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder
    done
fi
exec "${PYTHON:-python3}" -m tests.gpu "$@"
