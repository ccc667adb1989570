"""The command line: `python -m hvdlite.bench BENCHMARK`.

allreduce, ops, step, fsdp, memory, overlap, compression, strategies, model, and draw.

`model` predicts, and `draw` draws what --json has written: both run in one process. All other benchmarks run under
hvdliterun, with at least two ranks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from mpi4py import MPI
from rich.console import Console

import hvdlite as hvd
from hvdlite.bench import allreduce, collectives, drawing, gpu, report, saved, style
from hvdlite.bench.contenders import KEYS, TITLES, contenders
from hvdlite.bench.progress import progress
from hvdlite.bench.timing import FEWEST_ROUNDS, MOST_ROUNDS, pin
from hvdlite.errors import HvdliteError

if TYPE_CHECKING:
    from hvdlite.bench.saved import Json

MODELS = ("mlp", "cnn", "transformer")  # here as well as in tasks.py, which imports torch
GPU_MODELS = ("resnet50", "gpt2")
KERAS_MODELS = ("mlp", "cnn")
IN_MEMORY = (
    "unsharded",
    "sharded",
    "gradients",
    "ddp",
    "zero",
    "fsdp",
)  # here as well as in memory.py, which imports torch
COMPRESSORS = (
    "none",
    "fp16",
    "bf16",
    "int8",
    "int4",
    "onebit",
    "topk",
    "dgc",
    "randomk",
    "powersgd",
    "powersgd4",
    "auto",
)  # here as well as in compression.py, which imports torch
PROBLEMS = ("digits", "text")  # here as well as in problems.py
STRATEGIES = ("synchronous", "local", "diloco", "ring", "one_peer", "age")  # here as well as in strategies.py
UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
EXAMPLES = """examples:
  hvdliterun -np 2 python -m hvdlite.bench allreduce
  hvdliterun -np 4 python -m hvdlite.bench allreduce --min 1M --max 64M --algorithms arena,mpi --json out.json
  hvdliterun -np 2 python -m hvdlite.bench allreduce --device cuda --max 1G
  hvdliterun -np 2 python -m hvdlite.bench ops
  hvdliterun -np 2 python -m hvdlite.bench step --plot steps.png
  hvdliterun -np 2 python -m hvdlite.bench step --device cuda
  hvdliterun -np 2 python -m hvdlite.bench step --framework keras
  hvdliterun -np 4 python -m hvdlite.bench fsdp
  hvdliterun -np 2 python -m hvdlite.bench memory
  hvdliterun -H host1:4,host2:4 python -m hvdlite.bench overlap
  hvdliterun -H host1:1,host2:1 python -m hvdlite.bench compression --link "1 Gbit/s" --json fast.json
  hvdliterun -H host1:1,host2:1 python -m hvdlite.bench compression --link "100 Mbit/s" --earlier fast.json
  hvdliterun -H host1:1,host2:1 python -m hvdlite.bench strategies --slow 1:4 --plot strategies.png
  python -m hvdlite.bench model --plot model.png
  python -m hvdlite.bench draw out.json --plot out.png
"""


def nbytes(text: str) -> int:
    """Parse a size: '4', '64K' or '1MiB' to bytes. Raises ArgumentTypeError for another text."""
    number = text.lower().removesuffix("ib").rstrip("kmgb")
    unit = text.lower()[len(number) :].removesuffix("ib") or "b"
    try:
        return int(number) * UNITS[unit]
    except (ValueError, KeyError):
        raise argparse.ArgumentTypeError(f"{text!r} is no size: say 4, 64K, 1M or 1GiB") from None


def positive(text: str) -> int:
    """Parse a number of at least 1. Raises ArgumentTypeError for another text."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)


def slow_rank(text: str) -> tuple[int, float]:
    """Parse 'RANK:FACTOR'. Raises ArgumentTypeError for another text."""
    rank, _, factor = text.partition(":")
    try:
        return int(rank), float(factor)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no slow rank: say RANK:FACTOR, such as 3:4") from None


def names(*known: str) -> Callable[[str], list[str]]:
    """Return a parser of comma-separated names. It raises ArgumentTypeError for a name that is not among these."""

    def parse(text: str) -> list[str]:
        found = text.split(",")
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
        return found

    return parse


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m hvdlite.bench",
        description="Time hvdlite beside what it is compared with, taking turns in one run.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True)
    reduce = commands.add_parser("allreduce", help="all-reduce from bytes to hundreds of megabytes")
    step = commands.add_parser("step", help="training steps of three models, beside torch DDP on gloo")
    fsdp = commands.add_parser("fsdp", help="training steps of a transformer with fully_shard (FSDP2), beside gloo")
    memory = commands.add_parser(
        "memory", help="memory and step() of Adam for 124 M parameters, beside torch's on gloo"
    )
    overlap = commands.add_parser("overlap", help="how much of the communication hides behind backward; several hosts")
    lossy = commands.add_parser(
        "compression", help="what lossy compression of gradients costs in accuracy, and saves in time; several hosts"
    )
    together = commands.add_parser(
        "strategies", help="how soon each strategy reaches a loss on this network, and with a slow rank; several hosts"
    )
    prices = commands.add_parser("ops", help="every collective at 4 B, 4 KiB and 1 MiB, beside the bare mpi4py call")
    model = commands.add_parser("model", help="predicted times on large clusters (nothing is measured)")
    draw = commands.add_parser("draw", help="draw the results that another benchmark's --json has written")
    draw.add_argument("results", metavar="RESULTS", help="the JSON file")
    draw.add_argument("--plot", metavar="PATH", required=True, help="the picture (PNG; needs matplotlib)")
    add_allreduce(reduce)
    add_step(step)
    fsdp.add_argument("--steps", type=int, metavar="N", help="timed steps per contender (default: 25 s of them)")
    add_memory(memory)
    add_overlap(overlap)
    add_compression(lossy)
    add_strategies(together)
    prices.add_argument("--seconds", type=float, default=1.0, metavar="S", help="time per call and size (default 1)")
    for command in (reduce, step, fsdp, memory, prices):
        command.add_argument("--no-pin", dest="pin", action="store_false", help="let ranks move between cores")
    for command in (reduce, step, fsdp, memory, prices, overlap, lossy, together):
        command.add_argument("--json", metavar="PATH", help="write everything measured, and the machine's facts")
    for command in (reduce, step, fsdp, memory, prices, overlap, model, lossy, together):
        command.add_argument("--plot", metavar="PATH", help="draw it (PNG; needs matplotlib)")
    return top


def add_allreduce(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--min", type=nbytes, default=4, metavar="SIZE", help="smallest size (default 4 bytes)")
    add("--max", type=nbytes, default=256 << 20, metavar="SIZE", help="largest size (default 256M)")
    add("--step", type=int, choices=(2, 4), default=4, help="ratio of sizes (default 4)")
    add("--iters", type=int, metavar="N", help="turns per contender and size (default: by --seconds)")
    add("--seconds", type=float, default=3.0, metavar="S",
        help=f"time per size, within {FEWEST_ROUNDS} to {MOST_ROUNDS} turns per contender (default 3)")  # fmt: skip
    add("--algorithms", type=names(*TITLES), metavar="A,B,...",
        help=f"any of {', '.join(KEYS)}; with --device cuda of {', '.join(gpu.KEYS)} (default: all)")  # fmt: skip
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where the arrays lie (default cpu)")


def add_step(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--framework", choices=("torch", "keras"), default="torch",
        help="keras: under fit on TensorFlow, beside the torch path (default torch)")  # fmt: skip
    add("--steps", type=int, metavar="N",
        help=f"timed steps per contender (default: 25 s of them, at most {MOST_ROUNDS}; with keras 25)")  # fmt: skip
    add("--models", type=names(*MODELS, *GPU_MODELS), metavar="A,B,...",
        help=f"default {', '.join(MODELS)}; with --device cuda {', '.join(GPU_MODELS)}; with --framework keras "
        f"{', '.join(KERAS_MODELS)}")  # fmt: skip
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where the models lie (default cpu)")


def add_memory(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--turns", type=positive, default=5, metavar="N", help="turns of each contender (default 5)")
    add("--steps", type=positive, default=5, metavar="N", help="timed steps of a turn (default 5)")
    add("--contenders", type=names(*IN_MEMORY), default=list(IN_MEMORY), metavar="A,B,...",
        help=f"any of {', '.join(IN_MEMORY)} (default: all)")  # fmt: skip
    add("--small", action="store_true", help="a model of 4.5 M parameters, for a quick look")
    add("--fused", action="store_true", help="torch's fused Adam")


def add_overlap(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--steps", type=int, default=15, metavar="N", help="timed steps per contender (default 15)")
    add("--models", type=names(*MODELS, *GPU_MODELS), metavar="A,B,...", help=f"default {', '.join(MODELS)}")
    add("--backward", type=float, default=1.5, metavar="X",
        help="the batch is enlarged until backward takes X times the communication (default 1.5)")  # fmt: skip


def add_compression(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--link", default="this network", metavar="NAME", help='the network\'s name in tables, such as "100 Mbit/s"')
    add("--earlier", metavar="PATH",
        help="what --json wrote on another network: no training again, and its times in the same tables")  # fmt: skip
    add("--compressors", type=names(*COMPRESSORS), default=list(COMPRESSORS), metavar="A,B,...",
        help=f"any of {', '.join(COMPRESSORS)}, beside none (default: all)")  # fmt: skip
    add("--problems", type=names(*PROBLEMS), default=list(PROBLEMS), metavar="A,B,...",
        help=f"any of {', '.join(PROBLEMS)} (default: both)")  # fmt: skip
    add("--seeds", type=positive, default=5, metavar="N", help="trainings of each compressor (default 5)")
    add("--steps", type=positive, metavar="N", help="steps of a training (default: 200 of digits, 1500 of text)")
    add("--timed", type=positive, default=9, metavar="N", help="timed steps of each compressor (default 9)")


def add_strategies(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--link", default="this network", metavar="NAME", help='the network\'s name, such as "5 ms, 100 Mbit/s"')
    add("--slow", type=slow_rank, metavar="RANK:FACTOR", help="this rank computes FACTOR times as long")
    add("--earlier", metavar="PATH", help="what --json wrote under other conditions, for the same tables and plot")
    add("--strategies", type=names(*STRATEGIES), default=list(STRATEGIES), metavar="A,B,...",
        help=f"any of {', '.join(STRATEGIES)}, beside synchronous (default: all)")  # fmt: skip
    add("--problem", choices=PROBLEMS, default="digits", help="the model and its data (default digits)")
    add("--seeds", type=positive, default=5, metavar="N", help="trainings of each strategy (default 5)")
    add("--steps", type=positive, default=240, metavar="N", help="updates of each rank (default 240)")
    add("--compute", type=float, default=20.0, metavar="MS", help="sleep per update, as computation (default 20)")


@dataclass(frozen=True)
class Outcome:
    """The results of one benchmark, ready to be shown.

    Attributes:
        name: The benchmark's name in the JSON file.
        show: Prints the results.
        content: The results for the JSON file.
    """

    name: str
    show: Callable[[Console], None]
    content: Json


def run_allreduce(args: argparse.Namespace, comm: MPI.Comm, out: Console) -> Outcome:
    on_gpu, sizes = args.device == "cuda", allreduce.sizes(args.min, args.max, args.step)
    with progress() as show:
        field_of = (gpu.contenders if on_gpu else contenders)(args.algorithms, max(sizes), comm)
        if args.pin:
            pin(comm)
        stages = len(sizes) + (not on_gpu)
        found = allreduce.sweep(
            comm, field_of, sizes, args.iters, args.seconds, lambda done, total, text: show(done, stages, text)
        )
        if not on_gpu:
            show(len(sizes), stages, "one scalar")
            found = replace(found, latency=allreduce.scalar_latency(comm))
    return Outcome("allreduce", lambda out: report.print_sweep(out, found), report.sweep_json(found))


def run_step(args: argparse.Namespace, comm: MPI.Comm, out: Console) -> Outcome:
    if args.framework == "keras":
        return run_keras_step(args, comm, out)
    from hvdlite.bench import step

    with progress() as show:
        models = args.models or list(GPU_MODELS if args.device == "cuda" else MODELS)
        found = step.compare(comm, models, args.steps, args.pin, show, args.device)
    return Outcome("step", lambda out: report.print_steps(out, found), report.steps_json(found))


def run_keras_step(args: argparse.Namespace, comm: MPI.Comm, out: Console) -> Outcome:
    from hvdlite.bench import keras_step

    with progress() as show:
        found = keras_step.compare(comm, args.models or list(KERAS_MODELS), args.steps or 25, args.pin, show)
    rows = [asdict(row) for row in found]
    return Outcome("keras step", lambda out: report.print_keras_steps(out, found), {"rows": rows})


def run_fsdp(args: argparse.Namespace, comm: MPI.Comm, out: Console) -> Outcome:
    from hvdlite.bench import fsdp

    with progress() as show:
        found = fsdp.compare(comm, args.steps, args.pin, show)
    return Outcome("fsdp", lambda out: report.print_fsdp(out, found), report.steps_json([found]))


def run_memory(args: argparse.Namespace, comm: MPI.Comm, out: Console) -> Outcome:
    from hvdlite.bench import memory

    course = memory.Course(list(dict.fromkeys(args.contenders)), args.turns, args.steps, args.small, args.fused)
    with progress() as show:
        found = memory.compare(comm, course, args.pin, show)
    return Outcome("memory", lambda out: report.print_memory(out, found), asdict(found))


def run_overlap(args: argparse.Namespace, comm: MPI.Comm, out: Console) -> Outcome:
    from hvdlite.bench import overlap

    with progress() as show:
        found = overlap.compare(comm, args.models or list(MODELS), args.steps, args.backward, show)
    return Outcome("overlap", lambda out: report.print_overlap(out, found), report.overlap_json(found))


def run_compression(args: argparse.Namespace, comm: MPI.Comm, out: Console) -> Outcome:
    from hvdlite.bench import compression

    earlier = compression.load(args.earlier) if args.earlier else {}
    course = compression.Course(args.problems, args.compressors, args.seeds, args.steps, args.timed, args.link, earlier)
    with progress() as show:
        rows = [*compression.compare(comm, course, show).values()]
    content = [asdict(row) for row in rows]
    return Outcome("compression", lambda out: report.print_compression(out, rows), {"rows": content})


def run_strategies(args: argparse.Namespace, comm: MPI.Comm, out: Console) -> Outcome:
    from hvdlite.bench import strategies

    earlier = strategies.load(args.earlier) if args.earlier else {}
    course = strategies.Course(
        args.problem, args.strategies, args.seeds, args.steps, args.compute / 1e3, args.slow, args.link, earlier
    )
    with progress() as show:
        rows = [*strategies.compare(comm, course, show).values()]
    content = [asdict(row) for row in rows]
    return Outcome("strategies", lambda out: report.print_strategies(out, rows), {"rows": content})


def run_ops(args: argparse.Namespace, comm: MPI.Comm, out: Console) -> Outcome:
    with progress() as show:
        found = collectives.measure(comm, args.seconds, args.pin, show)
    return Outcome("ops", lambda out: report.print_prices(out, found), report.prices_json(found))


def run_model(args: argparse.Namespace, out: Console) -> None:
    from hvdlite.bench import model

    model.print_model(out)
    picture(args, out, model.plot_model)


def picture(args: argparse.Namespace, out: Console, draw: Callable[[str], None]) -> None:
    """Draw a picture if the user asked for one. Without matplotlib, print a message instead."""
    if args.plot and style.available():
        draw(args.plot)
    elif args.plot:
        out.print('no plot: matplotlib is not installed: pip install matplotlib (the extra "bench")')


def finish(args: argparse.Namespace, comm: MPI.Comm, out: Console, outcome: Outcome) -> None:
    """On rank 0, print the results and the machine's facts, and write the files that the user asked for. Collective."""
    machine = report.machine(comm)
    if hvd.rank() != 0:
        return
    outcome.show(out)
    out.print(machine.line, highlight=False, style="dim")
    content = {"benchmark": outcome.name, "machine": asdict(machine), **outcome.content}
    if args.json:
        saved.write(args.json, content)
    picture(args, out, lambda path: drawing.draw(content, path))


def run_draw(args: argparse.Namespace, out: Console) -> int:
    """Draw saved results; returns the exit code."""
    try:
        picture(args, out, lambda path: drawing.draw(saved.content_of(args.results), path))
    except HvdliteError as error:
        print(error, file=sys.stderr)
        return 2
    return 0 if style.available() else 1


def main() -> int:
    args = parser().parse_args()
    if args.command == "allreduce":
        there = gpu.KEYS if args.device == "cuda" else KEYS
        args.algorithms = args.algorithms or list(there)
        if wrong := [key for key in args.algorithms if key not in there]:
            parser().error(f"--device {args.device} has no {', '.join(wrong)}; there are {', '.join(there)}")
    if args.command == "step" and args.framework == "keras" and set(args.models or ()) - set(KERAS_MODELS):
        parser().error(f"--framework keras has {', '.join(KERAS_MODELS)}")
    if args.command == "model":
        run_model(args, report.console())
        return 0
    if args.command == "draw":
        return run_draw(args, report.console())
    hvd.init()
    if hvd.size() < 2:
        print("The benchmarks need at least two ranks: hvdliterun -np 2 python -m hvdlite.bench ...", file=sys.stderr)
        return 2
    comm = MPI.COMM_WORLD.Dup()
    runs = {
        "allreduce": run_allreduce, "step": run_step, "fsdp": run_fsdp, "memory": run_memory, "overlap": run_overlap,
        "ops": run_ops, "compression": run_compression, "strategies": run_strategies,
    }  # fmt: skip
    out = report.console()
    finish(args, comm, out, runs[args.command](args, comm, out))
    comm.Free()
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
