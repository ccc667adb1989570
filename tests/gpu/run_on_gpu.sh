#!/usr/bin/env bash
# Everything of tests/gpu, and the benchmarks, on a machine with one GPU and little else: python3 with torch, CuPy,
# mpi4py and NumPy. Needs no network, no pytest and no MPI there: .mpi/openmpi-cuda.tar.xz is a CUDA-aware Open MPI
# that can be unpacked anywhere, .mpi/python a folder of what that python3 lacks, for its version of Python: pip install
# --no-deps --target .mpi/python ml_dtypes rich cloudpickle markdown-it-py mdurl pygments. TensorFlow takes part where it
# is installed. Prints one table; ends with 0 when all is well. Under 8 minutes.
#
#   tests/gpu/run_on_gpu.sh [checks|benchmarks]       only these; all share the time
# From the environment: PYTHON (python3).
set -eu
cd "$(dirname "$0")/../.."
export HVDLITE_TEST_CUDA_MPI=${HVDLITE_TEST_CUDA_MPI:-/tmp/hvdlite-mpi/openmpi}
if [ ! -d "$HVDLITE_TEST_CUDA_MPI" ]; then
    mkdir -p /tmp/hvdlite-mpi
    "${PYTHON:-python3}" -m tarfile -e .mpi/openmpi-cuda.tar.xz /tmp/hvdlite-mpi  # which needs no xz
fi
export PYTHONPATH=$PWD:$PWD/.mpi/python XDG_CACHE_HOME=/tmp/hvdlite-cache

# Ranks find each other over the loopback interface, which a bare machine may have down.
"${PYTHON:-python3}" - <<'PYTHON' || echo "cannot bring up the loopback interface"
import fcntl, socket, struct
GET, SET, UP = 0x8913, 0x8914, 1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
    name, flags = struct.unpack("16sh", fcntl.ioctl(any_socket, GET, struct.pack("16sh", b"lo", 0)))
    if not flags & UP:
        fcntl.ioctl(any_socket, SET, struct.pack("16sh", name, flags | UP))
PYTHON

# libcuda.so.1 where the loader does not look.
if ! ldconfig -p 2>/dev/null | grep -q 'libcuda\.so\.1'; then
    for folder in /usr/local/nvidia/lib64 /usr/lib64 /usr/local/cuda/compat; do
        [ ! -e "$folder/libcuda.so.1" ] || export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder
    done
fi
exec "${PYTHON:-python3}" -m tests.gpu "$@"
