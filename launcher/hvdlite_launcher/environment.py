"""The environment variables that go to other hosts: a fixed list, without secrets.

On several hosts every rank gets these variables and those given with -x, and no others, also on hvdliterun's host. A
variable that only some ranks have is a mistake that is found late. mpirun itself also keeps what a login needs (HOME,
SSH_AUTH_SOCK, ...).
"""

import re
from collections.abc import Mapping

NAMES = (
    *("PATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "VIRTUAL_ENV", "TZ", "TERM"),
    *("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"),
)
PREFIXES = (
    *("PYTHON", "MPI4PY_", "HVDLITE_", "HOROVOD_", "LANG", "LC_", "CONDA_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "NUMEXPR_", "MALLOC_", "GLIBC_TUNABLES"),
    *("OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_", "MPICH_", "MPIR_CVAR_", "I_MPI_", "MV2_", "MVP_"),
    *("FI_", "UCX_", "PSM2_", "PSM3_", "NCCL_", "RCCL_", "GLOO_"),
    *("CUDA_", "CUPY_", "NVIDIA_", "ROCR_", "HIP_", "HSA_"),
    *("XLA_", "TF_", "TORCH_", "PYTORCH_", "KERAS_", "JAX_", "HF_", "TRANSFORMERS_"),
)
OF_ONE_HOST = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
OF_SCHEDULERS = ("SLURM_", "SLURMD_", "SRUN_", "SALLOC_", "SBATCH_", "LSB_", "LSF_", "JSM_", "JSRUN_", "PBS_", "FLUX_")
LOGIN = ("HOME", "USER", "LOGNAME", "SHELL", "SSH_AUTH_SOCK", "KRB5CCNAME", "XDG_RUNTIME_DIR", "TMPDIR")
_SECRET = re.compile(
    r"_TOKENS?(_|$)|_(API)?KEYS?$|_PASS$|_PATS?$|_DSN$|_AUTH$|SECRET|PASSW|PASSPHRASE|CREDENTIAL|^AWS_"
)


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of `environ` that every rank gets."""
    return {name: value for name, value in environ.items() if _goes(name)}


def kept(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of `environ` for mpirun or a scheduler's launcher itself."""
    return {name: value for name, value in environ.items() if name in LOGIN or name.startswith(OF_SCHEDULERS)}


def is_secret(name: str) -> bool:
    """Whether a variable's name suggests that its value is a secret."""
    return _SECRET.search(name.upper()) is not None


def _goes(name: str) -> bool:
    return (name in NAMES or name.startswith(PREFIXES)) and not is_secret(name) and name not in OF_ONE_HOST
