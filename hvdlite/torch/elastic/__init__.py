"""Horovod's `horovod.torch.elastic`: states of torch models, optimizers and samplers. See `hvdlite.elastic`."""

from hvdlite.elastic import ObjectState, State, run
from hvdlite.torch.elastic.sampler import ElasticSampler
from hvdlite.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
