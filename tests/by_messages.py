"""The names of the all-reduce algorithms by messages. A new algorithm takes part in their tests by itself."""

from hvdlite.algorithms import MESSAGES
from hvdlite.config import ALGORITHMS

BY_MESSAGES = [name for name in ALGORITHMS if name in MESSAGES and name != "native"]
