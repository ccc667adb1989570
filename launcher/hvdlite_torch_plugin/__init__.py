"""Makes torch.distributed know the backend "hvdlite": `import torch` calls `register`, by an entry point.

Every program that imports torch pays for this package, so it imports nothing but the standard library until a process
group of the backend is made.
"""

import warnings


def register() -> None:
    """Register the backend. Warns, but never raises: an error in an entry point would break `import torch`."""
    try:
        from hvdlite_torch_plugin.backend import register_all

        register_all()
    except Exception as error:
        warnings.warn(f"hvdlite cannot be a backend of torch.distributed: {error!r}", stacklevel=2)
