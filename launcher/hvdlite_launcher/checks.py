"""`hvdliterun --check`: runs `hvdlite.check` on this host, or over ssh on each host that is named.

A child process on each host examines it, with the environment that ranks would have. This module makes one report of
the answers. Only the child processes import hvdlite.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hvdlite_launcher import facts, readiness
from hvdlite_launcher.environment import forwarded
from hvdlite_launcher.hosts import Host
from hvdlite_launcher.settings import named_hosts, variables, way
from hvdlite_launcher.ssh import Ssh
from hvdlite_launcher.times import CHECK_ANSWERS

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the folder that this package lies in
_CHECK = [sys.executable, "-P", "-m", "hvdlite.check"]
_AT_ONCE = 64  # connections
_SILENT = ("ok", "optional", "not tried")
_THERE = (
    "import json, os, sys; job = json.load(sys.stdin); "
    "os.execve(job['argv'][0], job['argv'], {**os.environ, **job['env']})"
)
"""Code for other hosts. Variables come on stdin, because all users of a host can read its command lines."""

Report = dict[str, Any]


def check(options: argparse.Namespace) -> int:
    """Print the report about this host, or the hosts of -H or --hostfile. Returns the exit code. Raises UsageError."""
    hosts = named_hosts(options)
    given = variables(options, os.environ)
    if all(host.local for host in hosts):
        code = subprocess.call([*_CHECK, *(["--json"] if options.json else [])], env={**os.environ, **given})
        return code if code >= 0 else 128 - code
    said = several(hosts, way(options, os.environ), forwarded(os.environ) | given)
    if options.json:
        print(json.dumps(said), flush=True)
    else:
        _show(said)
    return 0 if said["ready"] else 1


def several(hosts: Sequence[Host], ssh: Ssh, env: Mapping[str, str]) -> Report:
    """The report about several hosts, which are examined at the same time. env: variables for the ranks."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(min(len(hosts), _AT_ONCE)) as asking:
        return merge(list(asking.map(lambda host: _ask(host, ssh, env), hosts)))


def merge(reports: Sequence[Report]) -> Report:
    """One report from those of single hosts."""
    hosts: list[Report] = [host for each in reports for host in each["hosts"]]
    findings: list[Report] = [finding for each in reports for finding in each["findings"]]
    same = facts.same_names({host["host"]: host["own_name"] or "" for host in hosts})
    for name, problem in (_differences(hosts) | same).items():
        _of(name, hosts).update(problem=problem, ready=False)
    findings += _warnings(findings)
    ready_for, not_ready = _readiness(reports, hosts)
    warnings = [f"{each['name']} on {each['host']}" for each in findings if each["state"] == "warning"]
    return {
        "ready": bool(ready_for),
        "verdict": readiness.verdict(ready_for, not_ready, warnings, len(hosts)),
        "ready_for": ready_for,
        "not_ready": not_ready,
        "hosts": hosts,
        "findings": findings,
    }


def _readiness(reports: Sequence[Report], hosts: Sequence[Report]) -> tuple[list[str], list[str]]:
    """What can train on all hosts; and what cannot, where and why."""
    problems = [f"{host['host']} ({host['problem']})" for host in hosts if host["problem"]]
    offered = list(dict.fromkeys(name for each in reports for name in each["ready_for"]))
    lacking: dict[str, list[str]] = {}
    for host, each in zip(hosts, reports, strict=True):
        for text in [] if host["problem"] else [*each["not_ready"], *_unsaid(offered, each)]:
            lacking.setdefault(text, []).append(host["host"])
    good = [name for name in offered if all(name in each["ready_for"] for each in reports)]
    return [] if problems else good, problems + [f"{text} on {', '.join(names)}" for text, names in lacking.items()]


def _unsaid(offered: Sequence[str], report: Report) -> list[str]:
    """What other hosts are ready for and this host does not mention: it is not installed."""
    if not report["ready_for"]:
        return []
    missing = [name for name in offered if name not in report["ready_for"]]
    return [f"{name} (not there)" for name in missing if not any(text.startswith(name) for text in report["not_ready"])]


def _differences(hosts: Sequence[Report]) -> dict[str, str]:
    """By host: facts that must be the same on all hosts, and are not."""
    told = {
        host["host"]: {"Python": host["python"], "hvdlite": host["hvdlite"], "MPI": host["mpi"] or "no MPI"}
        for host in hosts
        if not host["problem"]
    }
    return facts.differences(told)


def _warnings(findings: Sequence[Report]) -> list[Report]:
    """Warnings about frameworks whose versions differ between hosts."""
    frameworks = [each for each in findings if each["section"] == "Frameworks"]
    names = list(dict.fromkeys(each["name"] for each in frameworks))
    told: dict[str, dict[str, str]] = {}
    for each in frameworks:
        told.setdefault(each["host"], {})[each["name"]] = each["version"] or "missing"
    same = {"section": "Frameworks", "name": "versions", "state": "warning", "version": None}
    differences = facts.differences(told, names)
    return [{"host": host, "text": text, **same} for host, text in differences.items()]


def _ask(host: Host, ssh: Ssh, env: Mapping[str, str]) -> Report:
    """One host's report, or one with the reason why there is none."""
    argv = [*_CHECK, "--json", "--host", host.name, "--folder", os.getcwd()]
    order = json.dumps({"argv": argv, "env": dict(env)})
    command = argv if host.local else ssh.command(host.name, [sys.executable, "-I", "-S", "-c", _THERE])
    environ = {**os.environ, **env} if host.local else None
    try:
        done = subprocess.run(command, input=order, env=environ, capture_output=True, text=True, timeout=CHECK_ANSWERS)
    except subprocess.TimeoutExpired:
        return _no_report(host, f"no answer within {CHECK_ANSWERS:g} s")
    except FileNotFoundError:
        return _no_report(host, ssh.missing(command[0], host.name))
    why = readiness.explain(host.name, done.stderr, done.returncode, _PACKAGE)
    return facts.last_object(done.stdout) or _no_report(host, why)


def _no_report(host: Host, problem: str) -> Report:
    nothing = {"own_name": None, "hvdlite": None, "python": None, "mpi": None}
    state = {"host": host.name, "ready": False, "problem": problem, **nothing}
    return {"ready_for": [], "not_ready": [], "hosts": [state], "findings": []}


def _of(name: str, hosts: Sequence[Report]) -> Report:
    return next(host for host in hosts if host["host"] == name)


def _show(said: Report) -> None:
    """Print a table of hosts, a table of findings that are not in order, and the verdict."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    versions, rows = ("hvdlite", "python", "mpi"), []
    for host in said["hosts"]:
        state = host["problem"] or ("ready" if host["ready"] else "not ready")
        rows.append([host["host"], *(host[name] or "" for name in versions), state])
    console.print(readiness.table(("host", *versions, "state"), rows))
    odd = [each for each in said["findings"] if each["state"] not in _SILENT]
    if odd:
        console.print()
        rows = [[each["host"], each["state"], each["text"]] for each in odd]
        console.print(readiness.table(("host", "state", "what"), rows))
    console.print(f"\nnot tried: messages between hosts\n{said['verdict']}", soft_wrap=True)
