"""What lossy compression has not sent, in checkpoints; the statistics; bfloat16 where it is faster; the timeline."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim

import hvdlite.torch as hvd
from hvdlite.compression.saved import Saved
from hvdlite.gradients import wire_trial
from hvdlite.gradients.wire_trial import WireTrial
from tests.parallel.common import require_same_bits
from tests.parallel.ranks.torch_compression import loss_of, model, rounds_of, store_of, within_host

SIZES = (2, 3)
TOPK, POWERSGD = hvd.Compression.topk(0.05, momentum=0.5), hvd.Compression.powersgd(1, start_step=2)
Trained = tuple[nn.Module, optim.Optimizer]


def attached(compression: Any, **options: Any) -> Trained:
    """A new model with an attached optimizer that has state of its own."""
    net = model()
    adam = optim.Adam(net.parameters(), lr=0.01)
    return net, hvd.DistributedOptimizer(adam, net.named_parameters(), compression=compression, **options)


def train(trained: Trained, start: int, stop: int) -> None:
    net, optimizer = trained
    for step in range(start, stop):
        optimizer.zero_grad()
        loss_of(net, step).backward()
        optimizer.step()


def weights(trained: Trained) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in trained[0].parameters()])


def unsent(optimizer: optim.Optimizer) -> Saved:
    found = optimizer._hvdlite.unsent()  # type: ignore[attr-defined]
    assert isinstance(found, Saved)
    return found


def folder() -> Path:
    """A folder of rank 0's, which all ranks see."""
    made = tempfile.mkdtemp() if hvd.rank() == 0 else None
    return Path(str(hvd.broadcast_object(made, 0)))


def check_each_ranks_own_state_resumes_with_the_same_bits() -> None:
    with within_host():
        for compression in (TOPK, POWERSGD):
            first = attached(compression)
            train(first, 0, 6)
            states = copy.deepcopy([each.state_dict() for each in first])
            train(first, 6, 12)
            again = attached(compression)
            again[0].load_state_dict(states[0])
            again[1].load_state_dict(states[1])
            train(again, 6, 12)
            assert torch.equal(weights(again), weights(first))
            assert store_of(again[1]).rounds == 12


def check_save_and_load_keep_the_sum_over_hosts() -> None:
    path = folder() / "run.pt"
    with within_host():
        for sharded in (False, True):
            first = attached(POWERSGD, sharded=sharded)
            train(first, 0, 6)
            saved = unsent(first[1])
            assert all(kept.residual.any() for kept in saved.values.values())
            hvd.save(path, model=first[0], optimizer=first[1])
            train(first, 6, 12)
            again = attached(POWERSGD, sharded=sharded)
            train(again, 0, 2)  # what has been kept until now is replaced
            hvd.load(path, model=again[0], optimizer=again[1])
            again[1]._hvdlite.reducer.take_loaded()  # type: ignore[attr-defined]
            loaded = unsent(again[1])
            assert loaded.rounds == saved.rounds == 6
            for name, kept in saved.values.items():
                assert (loaded.values[name].residual == kept.residual).all()
                assert (loaded.values[name].extra == kept.extra).all()
            if hvd.rank():
                assert not any(store_of(again[1]).before(name).residual.any() for name in saved.values)
            train(again, 6, 12)
            torch.testing.assert_close(weights(again), weights(first), rtol=1e-4, atol=1e-5)
            require_same_bits(weights(again))


def check_loads_are_taken_by_the_next_backward() -> None:
    path = folder() / "run.pt"
    with within_host():
        first = attached(POWERSGD)
        train(first, 0, 6)
        hvd.save(path, model=first[0], optimizer=first[1])
        again = attached(POWERSGD)
        hvd.load(path, model=again[0], optimizer=again[1])
        train(again, 6, 7)
        assert store_of(again[1]).rounds == 7
        assert store_of(again[1]).loaded is None


def check_plain_torch_loads_the_state() -> None:
    with within_host():
        net, optimizer = attached(TOPK)
        train((net, optimizer), 0, 2)
        plain = optim.Adam(model().parameters())
        plain.load_state_dict(optimizer.state_dict())
        assert len(plain.state_dict()["state"]) == len(list(net.parameters()))


def check_a_state_does_not_change_with_later_steps() -> None:
    with within_host():
        trained = attached(TOPK)
        train(trained, 0, 2)
        unsent_then = trained[1].state_dict()["hvdlite_unsent"]
        before = copy.deepcopy(unsent_then)
        train(trained, 2, 5)
        assert all(torch.equal(unsent_then[name], array) for name, array in before.items())


def check_one_hosts_state_on_all_ranks_starts_anew() -> None:
    with within_host():
        first = attached(TOPK)
        train(first, 0, 4)
        state = hvd.broadcast_object(first[1].state_dict(), 0)
        again = attached(TOPK)
        again[1].load_state_dict(state)
        again[1]._hvdlite.reducer.take_loaded()  # type: ignore[attr-defined]
        store = store_of(again[1])
        assert store.rounds == 0
        assert not any(store.before(name).residual.any() for name in store.entries)
        train(again, 0, 2)
        require_same_bits(weights(again))


def check_broadcast_of_rank_0s_state_starts_anew() -> None:
    with within_host():
        first = attached(TOPK)
        train(first, 0, 4)
        state = first[1].state_dict()
        again = attached(TOPK)
        train(again, 0, 3)  # what has been kept until now is dropped, too
        if hvd.rank() == 0:
            again[1].load_state_dict(state)
        hvd.broadcast_optimizer_state(again[1], 0)
        again[1]._hvdlite.reducer.take_loaded()  # type: ignore[attr-defined]
        store = store_of(again[1])
        assert store.rounds == 0
        assert not any(store.before(name).residual.any() for name in store.entries)
        train(again, 4, 6)
        assert store.rounds == 2
        require_same_bits(weights(again))


def check_an_elastic_restart_goes_on() -> None:
    """What was not sent starts anew with the restart, on all ranks."""
    with within_host():
        trained = attached(TOPK)
        state = hvd.elastic.TorchState(model=trained[0], optimizer=trained[1], step=0)
        failed: list[int] = []

        @hvd.elastic.run
        def loop(state: Any) -> None:
            while state.step < 6:
                if state.step == 4 and not failed:
                    failed.append(1)
                    raise hvd.HorovodInternalError
                train(trained, state.step, state.step + 1)
                state.step += 1
                if state.step == 3:
                    state.commit()

        loop(state)
        assert failed
        assert store_of(trained[1]).rounds == 3
        assert trained[1].state_dict()["hvdlite_unsent"]["counts"].tolist()[2] == 3
        require_same_bits(weights(trained))


def check_statistics() -> None:
    with within_host():
        trained = attached(TOPK)
        train(trained, 0, 4)
        found = hvd.communication_stats()
        (name,) = found.traffic
        numbers, hosts = found.as_dict(), hvd.size()
        small = sum(p.numel() for p in trained[0].parameters() if p.ndim < 2 or p.numel() < 1024)
        exact = numbers[f"{name}/bytes_per_step/exact"]
        assert 4 * small <= exact / (2 * (hosts - 1) / hosts) <= 4 * small + 64 * 6  # padding to cache lines
        counted = sum(bucket.part.sent_bytes for bucket in rounds_of(trained[1]).buckets.values() if bucket.part)
        assert numbers[f"{name}/bytes_per_step/topk"] == counted > 0
        assert numbers[f"{name}/bytes_per_step"] == exact + counted
        assert numbers[f"{name}/ratio"] > 2
        assert 0.8 < numbers[f"{name}/unsent"] < 30
        assert "topk(ratio=0.05" in str(found)
        assert "fewer than without compression" in str(found)


def check_statistics_of_a_cast() -> None:
    """A cast is no lossy compressor, so the dtype stands in place of a ratio."""
    trained = attached(hvd.Compression.bf16)
    train(trained, 0, 1)
    found = hvd.communication_stats()
    assert str(found).endswith(" bytes per step to other hosts, as bfloat16"), str(found)
    assert not any(key.endswith("/ratio") for key in found.as_dict())


def check_one_half_of_the_squares_is_unsent() -> None:
    """Top-K of 1/2 of equal magnitudes sends one half and leaves the other, whatever the loss scale."""
    with within_host():
        weight = nn.Parameter(torch.zeros(64, 64))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = hvd.DistributedOptimizer(
            optim.SGD([weight], lr=0.0), compression=hvd.Compression.topk(0.5), grad_scaler=scaler
        )
        scaler.scale((weight * 3.0).sum()).backward()
        scaler.step(optimizer)
        (found,) = hvd.communication_stats().traffic.values()
        assert found.unsent is not None
        assert abs(found.unsent - 0.5**0.5) < 1e-5, found.unsent


def check_auto_keeps_the_faster_way() -> None:
    usual = wire_trial.GAIN
    rounds = wire_trial.WARM_UP + 2 * wire_trial.EACH
    try:
        for gain, narrow in ((1e9, True), (0.0, False)):
            wire_trial.GAIN = gain
            with within_host():
                trained = attached("auto")
                train(trained, 0, rounds + 2)
                trial = rounds_of(trained[1])
                assert isinstance(trial, WireTrial)
                assert trial.narrow is narrow
                assert all(len(seconds) == wire_trial.EACH for seconds in trial.seconds.values())
                require_same_bits(weights(trained))
                plain = attached(hvd.Compression.none)
                train(plain, 0, rounds + 2)
                torch.testing.assert_close(weights(trained), weights(plain), rtol=0.05, atol=0.02)
    finally:
        wire_trial.GAIN = usual


def check_auto_in_bfloat16_rounds_results() -> None:
    with within_host():
        trained = attached("auto")
        trial = rounds_of(trained[1])
        assert isinstance(trial, WireTrial)
        for step in range(4):
            loss_of(trained[0], step).backward()
            grad = next(trained[0].parameters()).grad
            assert grad is not None
            in_bfloat16 = torch.equal(grad, grad.bfloat16().float())
            assert in_bfloat16 is (step // 2 == 1), step
            trained[1].zero_grad()


def check_the_timeline_shows_phases() -> None:
    path = folder() / "trace.json"
    with within_host(TIMELINE=str(path)):
        train(attached(TOPK), 0, 2)
    if hvd.rank() == 0:
        events = json.loads(path.read_text())
        names = [event["name"] for event in events if event.get("ph") == "B"]
        for phase in ("COMPRESS", "SEND", "DECOMPRESS"):
            assert names.count(phase) == 2, names
        begins = [event["ts"] for event in events if event.get("name") in ("COMPRESS", "SEND", "DECOMPRESS")]
        assert begins == sorted(begins)
