"""Run parts of the simulator as separate processes.

The parts are the API server, a kubelet, a driver that plays pods into a real API server, and a
command that prints the ground truth.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import orjson

from gpuledger.clock import NS_PER_SECOND
from gpuledger.errors import UserError
from gpuledger.runtime import configure_logs, run_until_signalled
from gpuledger.settings import LogSettings
from gpuledger_simulator.kube import serve_kube_api, write_kubeconfig
from gpuledger_simulator.kubelet import serve_kubelet
from gpuledger_simulator.simulation import Simulation, open_simulation


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 2 for invalid input, 1 for a failure."""
    options = _parser().parse_args(argv)
    try:
        simulation = open_simulation(
            options.scenario,
            epoch_ns=options.epoch_ns,
            epoch_file=options.epoch_file,
            uids_file=options.uids,
        )
    except UserError as error:
        sys.stderr.write(f"simulator: {error}\n")
        return 2
    configure_logs(LogSettings())
    commands = {"kube-api": _kube_api, "kubelet": _kubelet, "drive": _drive, "truth": _truth}
    return commands[options.command](simulation, options)


def _kube_api(simulation: Simulation, options: argparse.Namespace) -> int:
    async def work() -> None:
        async with serve_kube_api(simulation, listen=options.listen) as url:
            if options.kubeconfig:
                write_kubeconfig(options.kubeconfig, url)
            _print({"url": url, "epoch_ns": simulation.epoch_ns})
            await asyncio.Event().wait()

    return run_until_signalled(work)


def _kubelet(simulation: Simulation, options: argparse.Namespace) -> int:
    kubelet = simulation.node(options.node).kubelet

    async def work() -> None:
        async with serve_kubelet(kubelet, options.socket, logs=options.logs):
            _print({"socket": str(options.socket), "epoch_ns": simulation.epoch_ns})
            await asyncio.Event().wait()

    return run_until_signalled(work)


def _drive(simulation: Simulation, options: argparse.Namespace) -> int:
    # The agent's image contains the simulator but not the Kubernetes client.
    from gpuledger_simulator.kube.driver import drive  # noqa: PLC0415  # see above

    async def work() -> None:
        await drive(simulation, kubeconfig=options.kubeconfig, uids=options.uids)

    return run_until_signalled(work)


def _truth(simulation: Simulation, options: argparse.Namespace) -> int:
    start_ns = simulation.epoch_ns + round(options.start_seconds * NS_PER_SECOND)
    end_ns = simulation.epoch_ns + round(options.end_seconds * NS_PER_SECOND)
    for usage in simulation.truth(start_ns, end_ns, options.node):
        _print(asdict(usage))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gpuledger_simulator", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser("kube-api", help="serve the scenario's Kubernetes API")
    drive = commands.add_parser("drive", help="play the scenario's pods into a real API server")
    truth = commands.add_parser(
        "truth", help="print each pod's GPU usage, one JSON object per line"
    )
    kubelet = commands.add_parser("kubelet", help="serve the kubelet of a node on a Unix socket")
    for command in (serve, kubelet, drive, truth):
        # All commands of one run share the scenario, the epoch and the UIDs.
        command.add_argument("--scenario", type=Path, required=True, metavar="FILE")
        command.add_argument(
            "--epoch-ns", type=int, default=0, metavar="N",
            help="start of the scenario, in nanoseconds since 1970; default: the epoch in"
            " --epoch-file, or now",
        )  # fmt: skip
        command.add_argument(
            "--epoch-file", type=Path, metavar="FILE",
            help="file with the epoch; the first process creates it, later ones read it",
        )  # fmt: skip
        command.add_argument(
            "--uids", type=Path, metavar="FILE",
            help="file with the pods' UIDs; drive writes it, the other commands read it",
        )  # fmt: skip
    serve.add_argument(
        "--listen", default="127.0.0.1:8001", metavar="HOST:PORT", help="default: %(default)s"
    )
    serve.add_argument(
        "--kubeconfig", type=Path, metavar="FILE", help="write a kubeconfig for this server"
    )
    kubelet.add_argument("--node", required=True, help="name of the node")
    kubelet.add_argument(
        "--socket", type=Path, required=True, metavar="FILE", help="path of the socket"
    )
    kubelet.add_argument(
        "--logs",
        type=Path,
        metavar="FOLDER",
        help="create an empty file per container log here, as in /var/log/containers",
    )
    drive.add_argument(
        "--kubeconfig", type=Path, required=True, metavar="FILE", help="kubeconfig of the server"
    )
    truth.add_argument(
        "--start-seconds", type=float, default=0.0, help="seconds since the epoch; default: 0"
    )
    truth.add_argument("--end-seconds", type=float, required=True, help="seconds since the epoch")
    truth.add_argument("--node", help="print only the pods of this node")
    return parser


def _print(item: object) -> None:
    sys.stdout.buffer.write(orjson.dumps(item) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
