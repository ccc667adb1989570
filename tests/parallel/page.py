"""One rank runs the Python blocks of a page: `hvdliterun -np 2 python -m tests.parallel.page PAGE [full]`."""

import sys
from pathlib import Path

from docs import blocks

if __name__ == "__main__":
    blocks.run(Path(sys.argv[1]), sys.argv[2:] == ["full"])
