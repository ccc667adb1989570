#!/usr/bin/env bash
# Everything of tests/gpu, and the benchmark, on a machine with one GPU and nothing else: python3 with torch, CuPy,
# mpi4py and NumPy. Needs no network, no pytest and no MPI there: .mpi/openmpi-cuda.tar.xz is a CUDA-aware Open MPI
# that can be unpacked anywhere, .mpi/python a folder of what python3 lacks (pip install --target .mpi/python ml_dtypes
# rich cloudpickle). Prints one table; ends with 0 when all is well. Under 8 minutes.
#
#   tests/gpu/run_on_gpu.sh [quick]       quick: no benchmark
# From the environment: PYTHON (python3), OUT (where logs go; /tmp/hvdlite-gpu).
set -u
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
out=${OUT:-/tmp/hvdlite-gpu}
mkdir -p "$out"
prefix=/tmp/hvdlite-mpi/openmpi
[ -d "$prefix" ] || { mkdir -p /tmp/hvdlite-mpi && tar -xJf .mpi/openmpi-cuda.tar.xz -C /tmp/hvdlite-mpi; } || exit 2

export OPAL_PREFIX=$prefix PATH=$prefix/bin:$PATH MPI4PY_LIBMPI=$prefix/lib/libmpi.so.40 MPI4PY_MPIABI=openmpi
export LD_LIBRARY_PATH=$prefix/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMP_NUM_THREADS=2
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}:$PWD/.mpi/python XDG_CACHE_HOME=$out/cache

# libcuda.so.1 where the loader does not look.
for folder in /usr/local/nvidia/lib64 /usr/lib64 /usr/local/cuda/compat; do
    ldconfig -p 2>/dev/null | grep -q 'libcuda\.so\.1' || [ ! -e "$folder/libcuda.so.1" ] ||
        export LD_LIBRARY_PATH=$LD_LIBRARY_PATH:$folder
done

table=()
failed=0
row() { # name, seconds allowed, then the command
    local name=$1 seconds=$2 began=$SECONDS log code verdict
    shift 2
    log=$out/$(echo "$name" | tr -c 'a-zA-Z0-9\n' '-').log
    timeout -k 5 "$seconds" "$@" >"$log" 2>&1 </dev/null
    code=$?
    verdict=ok
    if [ "$code" != 0 ]; then
        verdict="FAILED ($code): $(grep -m 1 'failed in' "$log" || tail -n 1 "$log" | cut -c1-80)"
        failed=1
    fi
    table+=("$(printf '%-44s %4ds  %s' "$name" $((SECONDS - began)) "$verdict")")
    echo "${table[-1]}"
    [ "$code" = 0 ] || tail -n 25 "$log"
}
checks() { # name, ranks, seconds, then checks
    local name=$1 ranks=$2 seconds=$3
    shift 3
    row "$name, $ranks ranks" "$seconds" mpirun -np "$ranks" "$python" -m tests.parallel.runner "$@"
}

"$python" -c 'import torch, cupy; print(torch.cuda.get_device_name(0), "| torch", torch.__version__, "| CuPy", cupy.__version__)' |
    tee "$out/machine"
row "is the MPI CUDA-aware (2 processes)" 60 mpirun -np 2 "$python" -m hvdlite.transports.cuda_aware
checks "CuPy arrays" 2 90 gpu/device_arrays
checks "races, AMP, layouts, placement" 2 120 gpu/torch_cuda
export TORCH_TENSORS_ON=cuda
checks "torch checks of tests/parallel" 2 90 torch_gradients torch_collectives torch_dtypes
unset TORCH_TENSORS_ON
checks "CuPy arrays" 4 90 gpu/device_arrays
checks "gradients" 4 60 gpu/torch_cuda.check_gradients_every_way gpu/torch_cuda.check_low_precision
if [ "${1:-}" != quick ]; then
    bench=(mpirun -np 2 "$python" -m hvdlite.bench allreduce --device cuda)
    row "benchmark" 100 "${bench[@]}" --max 64M --seconds 0.5 --json "$out/bench.json"
    row "benchmark, long" 60 "${bench[@]}" --min 256M --max 1G --iters 7 --algorithms ipc,ring,staged,mpi_host,copy \
        --json "$out/bench-long.json"
    cat "$out/benchmark.log" "$out/benchmark--long.log"
fi
echo
cat "$out/machine"
printf '%s\n' "${table[@]}"
exit $failed
